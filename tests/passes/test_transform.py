"""`trainload.transform`: passes over a package's graphs."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.jobs import Model
from tests.capture.jobs import job as small_job
from tests.packaging.graphs.test_graph_json import assert_same, run
from tests.packaging.jobs import Job, batch_of
from tests.passes import users_pass
from torch import Tensor
from torch.fx import GraphModule

import trainload
from trainload import passes
from trainload.autograd_trace.derivation.decompose import spelled
from trainload.capture.operators import calls_in
from trainload.cli import main as cli
from trainload.core.errors import DataError, PassError, StorageError
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.package import Package, open_package
from trainload.packaging.signatures.verify import verify_package
from trainload.packaging.write import with_weights, write_package
from trainload.passes import Pass, load_pass
from trainload.transforms.apply import Applied, Transformation

USERS = str(Path(users_pass.__file__))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A package that computes in float32, with GELU."""
    model = Model(lambda _, x: torch.nn.functional.gelu(x))
    return trainload.freeze(small_job(model), tmp_path_factory.mktemp("exact") / "exact.tl")


@pytest.fixture(scope="module")
def decomposed(packaged: Package, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.transform(
        packaged, [passes.decompose], tmp_path_factory.mktemp("core") / "core.tl"
    )


@pytest.fixture(scope="module")
def work(packaged: Package) -> Transformation:
    """The package to which passes are applied."""
    return Transformation(packaged)


@pytest.fixture(scope="module")
def told() -> list[Applied]:
    """The progress events of the pass that made `core`."""
    return []


@pytest.fixture(scope="module")
def core(exact: Package, told: list[Applied], tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The exact package, decomposed."""
    return trainload.transform(
        exact, [passes.decompose], tmp_path_factory.mktemp("core") / "exact.tl", on_pass=told.append
    )


@pytest.fixture(scope="module")
def changed(exact: Package, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The exact package after an allowed pass that changes values, and a pass that does not."""
    target = tmp_path_factory.mktemp("changed") / "new.tl"
    return trainload.transform(
        exact, [passes.gelu_tanh, passes.eliminate_dead_code], target, allow_change=True
    )


def count(package: Package, operator: str, graph: str = "train") -> int:
    module = package.program().graphs[graph].exported.graph_module
    return sum(spelled(node.target) == operator for node in calls_in(module))


def test_a_transformed_package_gives_the_loss_gradients_and_buffers_of_its_parent(
    packaged: Package, decomposed: Package
) -> None:
    first, second = (
        run(packaged.graph("train"), batch_of(6)),
        run(decomposed.graph("train"), batch_of(6)),
    )
    assert torch.allclose(first[0][0], second[0][0], atol=0, rtol=1e-5)
    for (name, gradient), other in zip(first[1].items(), second[1].values(), strict=True):
        assert (gradient is None) == (other is None), name
        assert (
            gradient is None
            or other is None
            or float((gradient - other).norm()) <= 1e-3 * float(gradient.norm())
        ), name
    assert_same(first[2], second[2])


def test_a_transformed_package_is_whole(decomposed: Package) -> None:
    assert verify_package(decomposed.path).problems == ()


def test_its_parent_is_what_it_was_made_from(packaged: Package, decomposed: Package) -> None:
    assert decomposed.manifest.parent == packaged.digest
    assert decomposed.digest != packaged.digest
    assert decomposed.manifest.program_digest != packaged.manifest.program_digest


def test_weights_and_assets_are_shared(packaged: Package, decomposed: Package) -> None:
    shared = [file for file in packaged.manifest.files if file.startswith(("weights/", "assets/"))]
    assert all((decomposed.path / file).samefile(packaged.path / file) for file in shared)
    assert decomposed.manifest.weights_digest == packaged.manifest.weights_digest
    assert decomposed.asset("LICENSE") == packaged.asset("LICENSE")


@pytest.mark.slow
def test_the_same_passes_give_the_same_bytes(exact: Package, core: Package, tmp_path: Path) -> None:
    assert (
        trainload.transform(exact, [passes.decompose], tmp_path / "again.tl").digest == core.digest
    )


@pytest.mark.slow
def test_the_same_passes_give_the_same_bytes_of_every_kind_of_graph(
    packaged: Package, decomposed: Package, tmp_path: Path
) -> None:
    assert (
        trainload.transform(packaged, [passes.decompose], tmp_path / "again.tl").digest
        == decomposed.digest
    )


def test_a_pass_is_recorded_with_its_distribution_and_the_digest_of_its_source(
    decomposed: Package,
) -> None:
    (entry,) = decomposed.manifest.passes
    assert (entry.name, entry.distribution, entry.version) == (
        "trainload.passes:decompose",
        "trainload",
        trainload.__version__,
    )
    assert entry.source == hashlib.sha256(Path(passes.__file__).read_bytes()).hexdigest()
    assert entry.preserving


def test_a_users_pass_is_recorded_with_its_options(exact: Package, tmp_path: Path) -> None:
    made = trainload.transform(
        exact,
        [(users_pass.double_negation, {"times": 2, "target": "aten.gelu.default"})],
        tmp_path / "new.tl",
    )
    (entry,) = made.manifest.passes
    assert (entry.distribution, entry.source) == (
        None,
        hashlib.sha256(Path(USERS).read_bytes()).hexdigest(),
    )
    assert entry.options == {"times": 2, "target": "aten.gelu.default"}
    assert Manifest.from_bytes((made.path / "manifest.json").read_bytes(), "m") == made.manifest
    assert count(made, "aten.neg.default") == 4


@pytest.mark.slow
def test_passes_are_recorded_in_order_after_those_of_the_parent(
    core: Package, tmp_path: Path
) -> None:
    made = trainload.transform(
        core,
        [passes.eliminate_dead_code, passes.eliminate_common_subexpressions],
        tmp_path / "2.tl",
    )
    names = ["decompose", "eliminate_dead_code", "eliminate_common_subexpressions"]
    assert [entry.name for entry in made.manifest.passes] == [
        f"trainload.passes:{name}" for name in names
    ]


def test_training_keeps_the_record(core: Package, tmp_path: Path) -> None:
    trained = with_weights(core, tmp_path / "2.tl", list(core.program().state.items()))
    assert trained.manifest.passes == core.manifest.passes


def test_a_transformed_package_trains_to_the_same_losses(
    exact: Package, core: Package, tmp_path: Path
) -> None:
    np.savez(
        tmp_path / "rows.npz",
        x=np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32),
    )
    losses = []
    for name, package in (("old", exact), ("new", core)):
        plan = trainload.plan(package, trainload.Cluster(), "single")
        result = trainload.launch(
            package,
            plan,
            tmp_path / "rows.npz",
            run_dir=tmp_path / name,
            steps=4,
            backend="local",
            compile=False,
        )
        losses.append((result.first_loss, result.last_loss))
    assert losses[0][0] != losses[0][1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_pass_sees_every_graphs_name_values_and_modules(work: Transformation) -> None:
    users_pass.SEEN.clear()
    work.apply(users_pass.look)
    assert {graph for graph, _ in users_pass.SEEN} == {"train", "eval"}
    assert {"emb", "norm", "drop"} <= {module for _, module in users_pass.SEEN}


def test_a_pass_may_return_another_module(exact: Package) -> None:
    assert Transformation(exact).apply(users_pass.new_graph).worst.distance == 0.0


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (users_pass.no_graph, "returns no graph.*got NoneType"),
        (users_pass.raises, "the pass fails: ZeroDivisionError: by nothing"),
        (users_pass.fewer_outputs, "different number of outputs.*expected 2 values, got 1"),
        (users_pass.another_input, "inputs of the new graph differ.*more"),
        (users_pass.broken, "broken graph"),
        (users_pass.specialises, "fixes a size that changes.*expected batch, got 4"),
        (users_pass.wrong_arguments, "a new node cannot be computed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_pass_that_cannot_be_used_is_refused_by_name(
    packaged: Package, function: Pass, problem: str
) -> None:
    name = function.__name__  # type: ignore[attr-defined]  # functions have names
    with pytest.raises(PassError, match=rf"users_pass:{name}, graph (eval|train).*{problem}"):
        Transformation(packaged).apply(function)  # not `work`: guards on sizes would remain


def test_a_pass_that_changes_values_is_refused_and_leaves_nothing(
    exact: Package, tmp_path: Path
) -> None:
    with pytest.raises(
        PassError, match=r"gelu_tanh: the pass changes the train graph's .*--allow-change"
    ):
        trainload.transform(exact, [passes.gelu_tanh], tmp_path / "new.tl")
    assert list(tmp_path.iterdir()) == []


def test_a_pass_that_removes_dropout_is_refused(work: Transformation) -> None:
    with pytest.raises(PassError, match="no_dropout: the pass changes the train graph's"):
        work.keep(work.apply(users_pass.no_dropout))


def test_a_change_that_is_allowed_is_recorded_as_one(changed: Package) -> None:
    assert [entry.preserving for entry in changed.manifest.passes] == [False, True]


def test_what_a_pass_did_is_told(core: Package, told: list[Applied]) -> None:
    assert len(core.manifest.passes) == 1
    (applied,) = told
    assert {difference.graph for difference in applied.differences} == {"train", "eval"}
    assert applied.calls_after > applied.calls_before


def test_a_path_that_is_taken_is_refused_before_any_work(exact: Package, tmp_path: Path) -> None:
    (tmp_path / "new.tl").mkdir()
    with pytest.raises(StorageError, match="it exists already"):
        trainload.transform(exact, [users_pass.raises], tmp_path / "new.tl")


def test_options_that_cannot_be_written_are_refused(exact: Package) -> None:
    def takes(graph: GraphModule, program: object, *, scale: Tensor) -> GraphModule:
        return graph

    with pytest.raises(PassError, match="the pass cannot be recorded"):
        Transformation(exact).apply(takes, {"scale": torch.ones(1)})


def test_real_rows_are_used_where_they_are_given(exact: Package, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.full((3, 8), np.nan, dtype=np.float32))
    with pytest.raises(DataError, match="the loss is not finite"):
        Transformation(exact, tmp_path / "rows.npz").apply(passes.eliminate_dead_code)


def test_a_package_that_does_not_say_what_its_integers_are_needs_rows(
    job: Job, tmp_path: Path
) -> None:
    graphs = {
        name: dataclasses.replace(
            graph, inputs=tuple(dataclasses.replace(i, quantiles=()) for i in graph.inputs)
        )
        for name, graph in job.program.graphs.items()
    }
    silent = write_package(
        tmp_path / "p.tl", dataclasses.replace(job.program, graphs=graphs), job.updates, job.recipe
    )
    with pytest.raises(DataError, match=r"input x.*--data"):
        Transformation(silent)
    batch = batch_of(4)
    np.savez(tmp_path / "rows.npz", x=batch["x"].numpy(), y=batch["y"].numpy())
    assert (
        Transformation(silent, tmp_path / "rows.npz")
        .apply(passes.eliminate_dead_code)
        .worst.distance
        == 0.0
    )


# Built-in passes.


def rewritten(
    package: Package, function: Callable[..., GraphModule], edit: Callable[[GraphModule], None]
) -> tuple[GraphModule, GraphModule]:
    """Return the train graph after `edit`, before and after a pass."""
    module = copy.deepcopy(package.program().graphs["train"].exported.graph_module)
    edit(module)
    return module, function(copy.deepcopy(module), package.program())


def duplicate(module: GraphModule, operator: Any) -> None:
    """Compute an operator twice; the last user uses the second result."""
    node = next(node for node in module.graph.nodes if node.target is operator)
    with module.graph.inserting_after(node):
        twin = module.graph.call_function(operator, node.args, node.kwargs)
    twin.meta = dict(node.meta)
    list(node.users)[-1].replace_input_with(node, twin)


def calls(module: GraphModule, operator: str) -> int:
    return sum(spelled(node.target) == operator for node in calls_in(module))


def test_dead_code_goes(packaged: Package) -> None:
    def edit(module: GraphModule) -> None:
        node = next(
            node for node in module.graph.nodes if node.target is torch.ops.aten.embedding.default
        )
        with module.graph.inserting_after(node):
            module.graph.call_function(torch.ops.aten.neg.default, (node,)).meta["val"] = node.meta[
                "val"
            ]

    before, after = rewritten(packaged, passes.eliminate_dead_code, edit)
    assert (calls(before, "aten.neg.default"), calls(after, "aten.neg.default")) == (1, 0)


@pytest.mark.parametrize(
    "operator", ["aten.dropout.default", "aten.mul_.Tensor", "wrap_with_set_grad_enabled", "cond"]
)
def test_what_has_an_effect_or_a_user_is_no_dead_code(packaged: Package, operator: str) -> None:
    before, after = rewritten(packaged, passes.eliminate_dead_code, lambda module: None)
    assert calls(before, operator) == calls(after, operator) > 0


def test_what_is_computed_twice_is_computed_once(exact: Package) -> None:
    before, after = rewritten(
        exact,
        passes.eliminate_common_subexpressions,
        lambda module: duplicate(module, torch.ops.aten.linear.default),
    )
    assert (calls(before, "aten.linear.default"), calls(after, "aten.linear.default")) == (3, 2)


def test_two_draws_are_not_one(packaged: Package) -> None:
    before, after = rewritten(
        packaged,
        passes.eliminate_common_subexpressions,
        lambda module: duplicate(module, torch.ops.aten.dropout.default),
    )
    assert calls(after, "aten.dropout.default") == calls(before, "aten.dropout.default") == 2


def test_what_is_read_before_and_after_a_write_is_not_the_same() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.call_function(torch.ops.aten.mul_.Tensor, (x, 2))
    second = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output((first, second))
    made = passes.eliminate_common_subexpressions(GraphModule({}, graph), None)  # type: ignore[arg-type]  # the pass ignores the program
    assert calls(made, "aten.neg.default") == 2


# The command line.


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("nothing", "does not name a pass"),
        ("a:b:", "does not name a pass"),
        ("trainload.passes:none", "there is no function 'none'"),
        ("no_such_module_anywhere:f", "no module"),
        ("none.py:f", "no such file"),
        ("trainload.passes:decompose,operators", "does not name a pass"),
    ],
)
def test_what_names_no_pass_is_refused(spec: str, problem: str) -> None:
    with pytest.raises(PassError, match=problem):
        load_pass(spec)


def test_options_are_read_as_numbers_truth_values_and_strings() -> None:
    function, options = load_pass(
        f"{USERS}:double_negation,times=2,deep=true,rate=0.5,target=aten.gelu.default"
    )
    assert function.__name__ == "double_negation"  # type: ignore[attr-defined]  # functions have names
    assert options == {"times": 2, "deep": True, "rate": 0.5, "target": "aten.gelu.default"}


def test_the_command_writes_a_package_and_says_what_each_pass_did(
    exact: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "new.tl")
    spec = f"{USERS}:double_negation,target=aten.gelu.default"
    assert (
        cli.run(
            [
                "transform",
                str(exact.path),
                "--pass",
                spec,
                "--pass",
                "trainload.passes:decompose",
                "-o",
                target,
                "--json",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["digest"] == open_package(tmp_path / "new.tl").digest
    assert [one["pass"]["name"].rpartition(":")[2] for one in said["passes"]] == [
        "double_negation",
        "decompose",
    ]
    assert said["passes"][0]["calls_after"] - said["passes"][0]["calls_before"] == 4


def test_the_command_refuses_a_change_with_2(
    exact: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(
            [
                "transform",
                str(exact.path),
                "--pass",
                "trainload.passes:gelu_tanh",
                "-o",
                str(tmp_path / "new.tl"),
            ]
        )
        == 2
    )
    assert "--allow-change" in capsys.readouterr().err


def test_inspect_says_which_passes_were_applied(
    changed: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["inspect", str(changed.path)]) == 0
    assert "trainload.passes:gelu_tanh (changes values)" in capsys.readouterr().out
