from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.packaging.graphs.test_graph_json import assert_same, run
from tests.packaging.jobs import Job, batch_of, make_job
from tests.packaging.tampering import edit_manifest, reseal
from tests.ranks import ran

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import IntegrityError, PackageError, StorageError, UnsafePackageError
from trainload.packaging.format.format_version import FORMAT_VERSION
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.package import Package, open_package
from trainload.packaging.write import with_weights, write_package

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["train", "eval"])
def test_a_package_computes_the_loss_and_gradients_of_the_program(
    job: Job, packaged: Package, name: str
) -> None:
    first = run(job.program.graphs[name].exported, batch_of(6))
    second = run(packaged.graph(name), batch_of(6))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    for parameter, gradient in second[1].items():
        expected = first[1][parameter]
        assert (gradient is None) == (expected is None)
        assert gradient is None or expected is None or torch.equal(gradient, expected), parameter
    assert_same(first[2], second[2])


def test_a_program_keeps_its_specs(job: Job, packaged: Package) -> None:
    program = packaged.program()
    assert (program.parameters, program.buffers) == (job.program.parameters, job.program.buffers)
    for name, graph in job.program.graphs.items():
        assert (program.graphs[name].inputs, program.graphs[name].outputs) == (
            graph.inputs,
            graph.outputs,
        )
    assert program.constants.keys() == job.program.constants.keys()
    assert all(
        torch.equal(program.constants[name], tensor)
        for name, tensor in job.program.constants.items()
    )
    assert packaged.recipe == job.recipe


def test_a_programs_graphs_hold_no_weights_and_tie_what_is_tied(packaged: Package) -> None:
    state = packaged.program().graphs["train"].exported.state_dict
    assert all(tensor.device.type == "meta" for tensor in state.values())
    assert state["head.weight"] is state["emb.weight"]
    assert state["emb.weight"].requires_grad
    assert not state["frozen"].requires_grad


def test_opening_reads_no_weights(packaged: Package, copied: Path) -> None:
    for path in (copied / "weights").glob("model-*"):
        path.write_bytes(bytes(path.stat().st_size))
    assert open_package(copied).program().graphs.keys() == packaged.program().graphs.keys()


def test_updates_run_on_any_length(job: Job, packaged: Package) -> None:
    for update, original in zip(packaged.updates(), job.updates, strict=True):
        assert (update.group, update.state, update.shape) == (
            original.group,
            original.state,
            original.shape,
        )
        vectors = [torch.randn(11) for _ in range(3)]
        arguments = (vectors[0], vectors[1], torch.tensor(0.1), vectors[2])
        for ours, theirs in zip(
            update.following.module()(*arguments),
            original.following.module()(*arguments),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


def test_assets_travel(packaged: Package) -> None:
    assert packaged.asset("LICENSE") == b"do as you like\n"
    with pytest.raises(StorageError, match="no such asset"):
        packaged.asset("nobody")


def test_the_digest_is_the_sha256_of_the_manifest(packaged: Package) -> None:
    assert packaged.digest == sha256_bytes((packaged.path / "manifest.json").read_bytes())


def test_a_manifest_reads_back_as_itself(packaged: Package) -> None:
    data = (packaged.path / "manifest.json").read_bytes()
    assert Manifest.from_bytes(data, "m") == packaged.manifest
    assert Manifest.from_bytes(data, "m").to_bytes() == data


@pytest.mark.slow
def test_another_process_in_another_folder_writes_the_same_bytes(job: Job, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from jobs import"
        " make_job\n"
        "from trainload.packaging.write import write_package\n"
        "j = make_job(); print(write_package(Path(sys.argv[2]), j.program, j.updates, j.recipe,"
        " debug={'to': sys.argv[2]}).digest)"
    )
    shutil.copy(Path(__file__).parents[1] / "jobs.py", tmp_path)
    environment = {**os.environ, "PYTHONHASHSEED": "22", "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path), str(tmp_path / "p.tl")]
    other = subprocess.run(
        command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert (
        other.strip()
        == write_package(tmp_path / "here.tl", job.program, job.updates, job.recipe).digest
    )


def test_debug_files_do_not_enter_the_digest(job: Job, packaged: Package, tmp_path: Path) -> None:
    first = write_package(tmp_path / "1.tl", job.program, job.updates, job.recipe)
    second = write_package(
        tmp_path / "2.tl", job.program, job.updates, job.recipe, debug={"note": {"host": "a"}}
    )
    assert first.digest == second.digest
    assert (second.path / "debug/note.json").exists()


def test_a_path_that_exists_is_left_alone(job: Job, tmp_path: Path) -> None:
    (tmp_path / "p.tl").mkdir()
    with pytest.raises(StorageError, match="already exists"):
        write_package(tmp_path / "p.tl", job.program, job.updates, job.recipe)
    assert list((tmp_path / "p.tl").iterdir()) == []


def test_a_missing_parent_folder_is_a_clear_error(job: Job, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the folder cannot be written"):
        write_package(tmp_path / "no" / "p.tl", job.program, job.updates, job.recipe)


def test_a_full_disk_leaves_nothing_behind(job: Job, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # the kernel rejects the write, as it does when a disk is full
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(StorageError, match="full"):
            write_package(tmp_path / "p.tl", job.program, job.updates, job.recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing_behind(
    job: Job, packaged: Package, tmp_path: Path
) -> None:
    def tensors() -> object:
        yield "emb.weight", torch.zeros(16, 8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_weights(packaged, tmp_path / "p.tl", tensors())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def write_until_killed(source: Path, target: Path) -> None:
    package = open_package(source)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "emb.weight", package.weights.tensor("emb.weight")
        os.kill(os.getpid(), signal.SIGKILL)

    with_weights(package, target, tensors())


def test_a_killed_write_is_no_package_and_does_not_block_the_next(
    packaged: Package, tmp_path: Path
) -> None:
    folder = tmp_path / "written"
    folder.mkdir()
    assert (
        ran(write_until_killed, packaged.path, folder / "p.tl", cwd=tmp_path)[0] == -signal.SIGKILL
    )
    assert not (folder / "p.tl").exists()
    left = list(folder.iterdir())
    assert all(path.name.startswith(".") for path in left) and left
    with pytest.raises(StorageError, match="no package"):
        open_package(left[0])
    with_weights(packaged, folder / "p.tl", dict(packaged.program().state).items())


def test_new_weights_share_graphs_and_name_their_parent(packaged: Package, tmp_path: Path) -> None:
    tensors = {name: tensor + 1 for name, tensor in packaged.program().state.items()}
    new = with_weights(packaged, tmp_path / "new.tl", reversed(tensors.items()))
    assert new.manifest.parent == packaged.digest
    assert new.digest != packaged.digest
    assert new.manifest.program_digest == packaged.manifest.program_digest
    assert new.manifest.weights_digest != packaged.manifest.weights_digest
    assert (new.path / "graphs/train.json").samefile(packaged.path / "graphs/train.json")
    assert all(torch.equal(new.weights.tensor(name), tensor) for name, tensor in tensors.items())


def test_buffers_that_training_does_not_touch_may_be_left_out(
    packaged: Package, tmp_path: Path
) -> None:
    tensors = {
        p.name: packaged.weights.tensor(p.name)
        for p in packaged.manifest.parameters
        if p.alias_of is None
    }
    new = with_weights(packaged, tmp_path / "new.tl", tensors.items())
    assert torch.equal(new.weights.tensor("mask"), packaged.weights.tensor("mask"))
    assert new.manifest.weights_digest == packaged.manifest.weights_digest or len(
        new.manifest.files
    ) != len(packaged.manifest.files)


@pytest.mark.parametrize("name", ["head.weight", "nobody"])
def test_new_weights_of_an_alias_or_a_stranger_are_refused(
    packaged: Package, tmp_path: Path, name: str
) -> None:
    with pytest.raises(PackageError, match=name):
        with_weights(packaged, tmp_path / "new.tl", [(name, torch.zeros(16, 8))])
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_does_not_cover_the_parameters_is_refused(job: Job, tmp_path: Path) -> None:
    short = job.recipe.model_copy(update={"groups": (job.recipe.groups[0],)})
    with pytest.raises(PackageError, match="groups do not fit"):
        write_package(tmp_path / "p.tl", job.program, job.updates[:1], short)
    assert list(tmp_path.iterdir()) == []


def test_a_program_whose_graph_reads_state_that_it_lacks_is_refused(
    job: Job, tmp_path: Path
) -> None:
    lacking = replace(job.program, buffers=tuple(b for b in job.program.buffers if b.name != "ema"))
    with pytest.raises(PackageError, match="ema"):
        write_package(tmp_path / "p.tl", lacking, job.updates, job.recipe)


def test_a_program_whose_inputs_are_named_otherwise_than_its_graphs_is_refused(
    job: Job, tmp_path: Path
) -> None:
    train = job.program.graphs["train"]
    renamed = replace(train, inputs=(replace(train.inputs[0], name="other"), train.inputs[1]))
    program = replace(job.program, graphs={"train": renamed})
    with pytest.raises(PackageError, match="one dict of tensors"):
        write_package(tmp_path / "p.tl", program, job.updates, job.recipe)


def test_a_folder_without_manifest_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no package"):
        open_package(tmp_path)


def test_a_newer_format_is_refused_with_the_cure(copied: Path) -> None:
    edit_manifest(copied, lambda m: m.update(format_version=FORMAT_VERSION + 1, surprise=1))
    with pytest.raises(
        PackageError, match=r"newer format.*expected format 1 to 2, got format 3.*Update trainload"
    ):
        open_package(copied)


@pytest.mark.parametrize(
    "given",
    [{"features": ["training"]}, {"training": {"steps": 1, "data": "0" * 64, "changed": []}}],
)
def test_training_is_told_with_its_feature_or_not_at_all(
    copied: Path, given: dict[str, Any]
) -> None:
    edit_manifest(
        copied,
        lambda m: m.update(
            {**given, "features": sorted({*m["features"], *given.get("features", ())})}
        ),
    )
    with pytest.raises(PackageError, match="the feature training requires the field training"):
        open_package(copied)


def test_an_unknown_feature_is_refused_by_name(copied: Path) -> None:
    edit_manifest(copied, lambda m: m["features"].append("quantised"))
    with pytest.raises(PackageError, match="quantised"):
        open_package(copied)


@pytest.mark.parametrize("version", [None, "1", 0, True, 1.5])
def test_a_manifest_without_a_version_is_refused(copied: Path, version: object) -> None:
    edit_manifest(copied, lambda m: m.update(format_version=version))
    with pytest.raises(PackageError, match="format version"):
        open_package(copied)


@pytest.mark.parametrize("quantiles", [[0] * 18, ["0"], [2**64], None, [[1]]])
def test_quantiles_that_are_no_few_numbers_are_refused(copied: Path, quantiles: object) -> None:
    edit_manifest(copied, lambda m: m["graphs"]["train"]["inputs"][0].update(quantiles=quantiles))
    with pytest.raises(PackageError, match=r"graphs\.train\.inputs\.0\.quantiles"):
        open_package(copied)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "os.system"},
        {"options": {"a": {"b": 1}}},
        {"options": {"a-b": 1}},
        {"preserving": 1},
        {"source": "x"},
    ],
)
def test_a_record_of_a_pass_that_is_none_is_refused(
    copied: Path, change: dict[str, object]
) -> None:
    entry: dict[str, object] = {
        "name": "a:b",
        "distribution": None,
        "version": None,
        "source": None,
        "options": {},
        "preserving": True,
    }
    edit_manifest(copied, lambda m: m.update(passes=[entry | change]))
    with pytest.raises(PackageError, match=r"passes\.0"):
        open_package(copied)


def test_an_unknown_field_is_refused(copied: Path) -> None:
    edit_manifest(copied, lambda m: m.update(surprise=1))
    with pytest.raises(PackageError, match="surprise"):
        open_package(copied)


def test_an_operator_that_changed_is_refused_with_was_and_is(copied: Path) -> None:
    schema = "aten::linear(Tensor input, Tensor weight) -> (Tensor, Tensor)"
    edit_manifest(copied, lambda m: m["ops"].update({"torch.ops.aten.linear.default": schema}))
    with pytest.raises(
        PackageError,
        match=r"linear\.default: was aten::linear\(Tensor input, Tensor w.*, is aten::linear\(",
    ):
        open_package(copied)


def test_an_operator_that_is_gone_is_refused_by_name(copied: Path) -> None:
    edit_manifest(
        copied,
        lambda m: m["ops"].update(
            {"torch.ops.aten.gone.default": "aten::gone(Tensor self) -> Tensor"}
        ),
    )
    with pytest.raises(PackageError, match=r"aten\.gone\.default.*missing"):
        open_package(copied)


def test_a_file_that_is_not_listed_is_refused(copied: Path) -> None:
    (copied / "graphs/extra.json").write_bytes(b"{}")
    with pytest.raises(IntegrityError, match=r"graphs/extra\.json"):
        open_package(copied)


@pytest.mark.parametrize(
    "path",
    [
        "graphs/train.json",
        "constants.safetensors",
        "assets/LICENSE",
        "weights/non-persistent.safetensors",
    ],
)
def test_a_missing_file_is_refused_by_name(copied: Path, path: str) -> None:
    (copied / path).unlink()
    with pytest.raises(IntegrityError, match=path):
        open_package(copied)


@pytest.mark.parametrize("path", ["graphs/train.json", "weights/model-00001-of-00003.safetensors"])
def test_a_truncated_file_is_refused_by_name(copied: Path, path: str) -> None:
    os.truncate(copied / path, 100)
    with pytest.raises(IntegrityError, match=path):
        open_package(copied)


@pytest.mark.parametrize(
    "path", ["graphs/train.json", "assets/LICENSE", "debug/train.json", "manifest.json"]
)
def test_a_link_is_refused(copied: Path, path: str, tmp_path: Path) -> None:
    (copied / path).rename(tmp_path / "outside")
    (copied / path).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafePackageError, match=path):
        open_package(copied)


def test_a_linked_folder_is_refused(copied: Path, tmp_path: Path) -> None:
    (copied / "graphs").rename(tmp_path / "outside")
    (copied / "graphs").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafePackageError, match="graphs"):
        open_package(copied)


def test_a_pipe_is_refused_without_waiting(copied: Path) -> None:
    os.mkfifo(copied / "graphs/pipe")
    with pytest.raises(UnsafePackageError, match="pipe"):
        open_package(copied)


@pytest.mark.parametrize(
    "path",
    [
        "../outside",
        "/etc/passwd",
        "a/../b",
        "a//b",
        "a\\b",
        "./a",
        "a/",
        ".hidden",
        "con",
        "a\u0000b",
        "é",
        "a.",
    ],
)
def test_a_path_that_could_leave_the_folder_is_refused(copied: Path, path: str) -> None:
    entry = {"media_type": "text/plain", "sha256": "0" * 64, "size": 0}
    edit_manifest(copied, lambda m: m["files"].update({path: entry}))
    with pytest.raises(PackageError, match="safe relative path"):
        open_package(copied)


@pytest.mark.parametrize("path", ["Graphs/other.json", "graphs/TRAIN.json"])
def test_paths_that_differ_in_case_only_are_refused(copied: Path, path: str) -> None:
    (copied / path).parent.mkdir(exist_ok=True)
    (copied / path).write_bytes(b"{}")
    edit_manifest(
        copied,
        lambda m: m["files"].update(
            {path: {"media_type": "text/plain", "sha256": "0" * 64, "size": 2}}
        ),
    )
    with pytest.raises(UnsafePackageError, match="case"):
        open_package(copied)


def test_a_graph_file_that_is_another_graph_is_refused(copied: Path) -> None:
    shutil.copy(copied / "graphs/update-rest-first.json", copied / "graphs/train.json")
    reseal(copied)
    with pytest.raises(PackageError, match=r"graphs/train\.json"):
        open_package(copied).program()


def test_a_package_survives_a_move_and_a_copy(packaged: Package, tmp_path: Path) -> None:
    shutil.copytree(packaged.path, tmp_path / "elsewhere")
    assert open_package(tmp_path / "elsewhere").digest == packaged.digest


def test_a_graph_can_be_loaded_twice_and_written_again(packaged: Package, tmp_path: Path) -> None:
    program = packaged.program()
    again = write_package(
        tmp_path / "again.tl", program, packaged.updates(), packaged.recipe, max_shard=600
    )
    ours, theirs = copy.deepcopy(again.manifest.files), packaged.manifest.files
    assert {path: entry for path, entry in theirs.items() if not path.startswith("assets/")} == ours
    assert json.loads((again.path / "manifest.json").read_bytes())["parent"] is None


@pytest.mark.slow
def test_other_weights_give_another_digest(packaged: Package, tmp_path: Path) -> None:
    other = make_job(seed=1)
    package = write_package(tmp_path / "p.tl", other.program, other.updates, other.recipe)
    assert package.manifest.weights_digest != packaged.manifest.weights_digest
    assert (
        package.manifest.files["graphs/train.json"] == packaged.manifest.files["graphs/train.json"]
    )
