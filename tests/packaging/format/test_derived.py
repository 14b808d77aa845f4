from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from tests.packaging.tampering import flip
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.core.errors import PackageError, StorageError
from trainload.freezing.prove import keep_steps
from trainload.packaging.derived import read_derived, share_derived, write_derived
from trainload.packaging.package import Package, open_package
from trainload.packaging.signatures.verify import verify_package
from trainload.packaging.write import with_weights

KEY = "cpu-torch2.13.0"


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINLOAD_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture(scope="module")
def step() -> StepGraph:
    def compute(
        weight: torch.Tensor, x: torch.Tensor, seed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = (x @ weight) * (seed + 1)
        values, _ = out.max(1)
        return values.sum(), x.t() @ torch.ones_like(out)

    module = make_fx(compute, tracing_mode="symbolic")(
        torch.randn(3, 5), torch.randn(4, 3), torch.tensor(7)
    )
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.t.default:
            node.meta["partitioner_tag"] = "is_backward"
    inputs = (Port(Role.PARAMETER, "weight"), Port(Role.BATCH, "x"), Port(Role.SEED, ""))
    return StepGraph(module, inputs, (Port(Role.LOSS, "loss"), Port(Role.GRADIENT, "weight")))


def same(first: StepGraph, second: StepGraph, rows: int) -> bool:
    arguments = (torch.randn(3, 5), torch.randn(rows, 3), torch.tensor(7))
    return all(
        torch.equal(a, b)
        for a, b in zip(first.module(*arguments), second.module(*arguments), strict=True)
    )


def test_a_derived_graph_reads_back_and_computes_the_same(copied: Path, step: StepGraph) -> None:
    package = open_package(copied)
    assert read_derived(package, KEY) is None
    write_derived(package, KEY, step)
    again = read_derived(open_package(copied), KEY)
    assert again is not None
    assert (again.inputs, again.outputs) == (step.inputs, step.outputs)
    assert same(step, again, 4)
    tagged = [
        n.name for n in again.module.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"
    ]
    assert (
        tagged
        == [
            n.name
            for n in step.module.graph.nodes
            if n.meta.get("partitioner_tag") == "is_backward"
        ]
        != []
    )
    assert all("val" in node.meta for node in again.module.graph.nodes if node.op != "output")


@pytest.mark.slow
def test_a_joint_graph_that_was_derived_from_a_package_reads_back_node_by_node(
    copied: Path,
) -> None:
    package = open_package(copied)
    step = derive(package.program(), "train", torch.device("cpu"))
    write_derived(package, KEY, step)
    again = read_derived(package, KEY)
    assert again is not None
    assert (again.inputs, again.outputs) == (step.inputs, step.outputs)
    assert described(again) == described(step)


def described(step: StepGraph) -> list[tuple[str, str, object]]:
    nodes = step.module.graph.nodes
    return [
        (n.name, str(n.target) if n.op == "call_function" else n.op, n.meta.get("partitioner_tag"))
        for n in nodes
    ]


def test_a_derived_graph_keeps_its_dynamic_sizes(copied: Path, step: StepGraph) -> None:
    package = open_package(copied)
    write_derived(package, KEY, step)
    again = read_derived(package, KEY)
    assert again is not None and same(step, again, 9)
    assert isinstance(
        next(iter(again.module.graph.find_nodes(op="placeholder", target="x_1")))
        .meta["val"]
        .shape[0],
        torch.SymInt,
    )


def test_derived_graphs_leave_the_digest_as_it_is(
    copied: Path, packaged: Package, step: StepGraph
) -> None:
    write_derived(open_package(copied), KEY, step)
    assert open_package(copied).digest == packaged.digest
    assert verify_package(copied).ok


def test_a_derived_graph_may_be_written_again(copied: Path, step: StepGraph) -> None:
    package = open_package(copied)
    write_derived(package, KEY, step)
    write_derived(package, KEY, step)
    assert read_derived(package, KEY) is not None
    assert [path.name for path in (copied / "derived").iterdir()] == [KEY]


def test_what_another_user_made_is_not_used(
    copied: Path, step: StepGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = open_package(copied)
    write_derived(package, KEY, step)
    monkeypatch.setenv("TRAINLOAD_STATE_DIR", str(tmp_path / "somebody"))
    assert read_derived(package, KEY) is None
    assert not (tmp_path / "somebody").exists()
    write_derived(package, "other", step)
    assert read_derived(package, KEY) is None
    assert read_derived(package, "other") is not None


def test_what_was_made_for_another_key_or_program_is_not_used(
    copied: Path, packaged: Package, step: StepGraph, tmp_path: Path
) -> None:
    package = open_package(copied)
    write_derived(package, KEY, step)
    (copied / "derived" / KEY).rename(copied / "derived" / "cuda")
    assert read_derived(package, "cuda") is None
    other = package.manifest.model_copy(
        update={"recipe": package.recipe.model_copy(update={"seed": 1})}
    )
    (copied / "derived" / "cuda").rename(copied / "derived" / KEY)
    assert read_derived(package, KEY) is not None
    assert read_derived(Package(package.path, package.digest, other), KEY) is None


def test_retrained_packages_keep_their_derived_graphs(
    copied: Path, step: StepGraph, tmp_path: Path
) -> None:
    package = open_package(copied)
    write_derived(package, KEY, step)
    new = with_weights(package, tmp_path / "new.tl", dict(package.program().state).items())
    assert read_derived(new, KEY) is not None


def test_a_package_of_the_same_program_takes_derived_graphs_over(
    packaged: Package, copied: Path, step: StepGraph, tmp_path: Path
) -> None:
    package = open_package(copied)
    new = with_weights(package, tmp_path / "new.tl", dict(package.program().state).items())
    write_derived(package, KEY, step)
    assert share_derived(new.path, new.manifest.program_digest, [tmp_path / "gone", copied]) == (
        KEY,
    )
    assert read_derived(new, KEY) is not None


def test_derived_graphs_of_another_program_are_left(
    copied: Path, step: StepGraph, tmp_path: Path
) -> None:
    write_derived(open_package(copied), KEY, step)
    assert share_derived(tmp_path / "new.tl", "0" * 64, [copied]) == ()
    assert not (tmp_path / "new.tl").exists()


def test_a_damaged_derived_graph_is_not_taken_over(
    copied: Path, step: StepGraph, tmp_path: Path
) -> None:
    package = open_package(copied)
    write_derived(package, KEY, step)
    flip(copied / "derived" / KEY / "seal.json", 20)
    assert share_derived(tmp_path / "new.tl", package.manifest.program_digest, [copied]) == ()


@pytest.mark.parametrize("file", ["step.json", "seal.json"])
@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_found_and_the_graph_not_used(
    copied: Path, step: StepGraph, file: str, where: float
) -> None:
    package = open_package(copied)
    write_derived(package, KEY, step)
    path = copied / "derived" / KEY / file
    flip(path, int(where * path.stat().st_size))
    assert [problem.file for problem in verify_package(copied).problems] == [
        f"derived/{KEY}/{file}"
    ]
    assert read_derived(package, KEY) is None


def test_a_damaged_derived_graph_is_logged(
    copied: Path, step: StepGraph, caplog: pytest.LogCaptureFixture
) -> None:
    package = open_package(copied)
    write_derived(package, KEY, step)
    flip(copied / "derived" / KEY / "step.json", 100)
    read_derived(package, KEY)
    assert f"derived/{KEY} is damaged; the graph will be derived again" in caplog.text


def test_the_key_is_the_users_alone(copied: Path, step: StepGraph, state_dir: Path) -> None:
    write_derived(open_package(copied), KEY, step)
    key = state_dir / "derived.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert [path.name for path in state_dir.iterdir()] == ["derived.key"]
    key.chmod(0o644)
    with pytest.raises(StorageError, match="readable by other users"):
        read_derived(open_package(copied), KEY)


@pytest.mark.parametrize("key", ["../x", "", ".x", "a/b", "a b"])
def test_a_key_that_is_no_plain_name_is_refused(
    packaged: Package, step: StepGraph, key: str
) -> None:
    with pytest.raises(PackageError, match="characters that are not allowed"):
        write_derived(packaged, key, step)
    with pytest.raises(PackageError, match="characters that are not allowed"):
        read_derived(packaged, key)


def test_a_package_that_cannot_be_written_is_a_clear_error(copied: Path, step: StepGraph) -> None:
    package = open_package(copied)
    (copied / "derived").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be saved"):
        write_derived(package, KEY, step)


def test_what_a_killed_writer_left_does_not_matter(
    copied: Path, step: StepGraph, tmp_path: Path
) -> None:
    package = open_package(copied)
    write_derived(package, KEY, step)
    (copied / "derived" / ".abc").mkdir()
    (copied / "derived" / ".abc" / "step.json").write_text("{")
    assert verify_package(copied).ok
    new = with_weights(
        open_package(copied), tmp_path / "new.tl", dict(package.program().state).items()
    )
    assert [path.name for path in (new.path / "derived").iterdir()] == [KEY]


def test_a_package_is_whole_where_its_derived_graphs_cannot_be_kept(
    copied: Path, step: StepGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINLOAD_STATE_DIR", str(tmp_path / "file" / "state"))
    with pytest.warns(
        UserWarning, match=r"the joint graphs could not be stored.*the key cannot be created"
    ):
        keep_steps(open_package(copied), {"train": step})
    assert not verify_package(copied).problems
