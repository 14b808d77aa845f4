"""An abstract package can be opened, verified, inspected and planned, but not run."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.sized import Stack, job_of, large, small
from tests.golden.jobs import operators
from tests.launch import abstract_jobs
from tests.launch.commands import refused
from tests.packaging.tampering import edit_manifest

import trainload
from trainload.cli import main as cli
from trainload.core.errors import CaptureError, JobError, PackageError
from trainload.packaging.package import Package
from trainload.packaging.signatures.verify import verify_package
from trainload.transforms.operator_sets import operator_uses

pytestmark = pytest.mark.filterwarnings("ignore:1 parameters get no gradient")
JOBS = "tests.launch.abstract_jobs"
DEPTH = abstract_jobs.DEPTH


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Any]:
    """Abstract package frozen by the command line, and the command's JSON output."""
    made = tmp_path_factory.mktemp("abstract") / "big.tl"
    with redirect_stdout(io.StringIO()) as said:
        assert (
            cli.run(
                [
                    "freeze",
                    f"{JOBS}:big",
                    "--abstract",
                    "--reduced",
                    f"{JOBS}:reduced",
                    "-o",
                    str(made),
                    "--json",
                ]
            )
            == 0
        )
    return trainload.open(made), json.loads(said.getvalue())


@pytest.fixture(scope="module")
def abstract(frozen: tuple[Package, Any]) -> Package:
    return frozen[0]


@pytest.fixture(scope="module")
def concrete(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Package of the same job with weights."""
    torch.manual_seed(0)
    return trainload.freeze(
        job_of(Stack(64, DEPTH)), tmp_path_factory.mktemp("concrete") / "big.tl"
    )


@pytest.fixture
def copied(abstract: Package, tmp_path: Path) -> Path:
    return Path(shutil.copytree(abstract.path, tmp_path / "copied.tl"))


# Contents


def test_it_says_so(abstract: Package) -> None:
    assert "abstract" in abstract.manifest.features
    assert abstract.manifest.abstract is not None
    assert abstract.manifest.abstract.reduced_parameters == sum(
        p.numel() for p in small().model.parameters()
    )
    assert abstract.manifest.abstract.check == "usual"


def test_it_records_the_library_that_the_user_named(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("")  # its operators are registered already
    libraries = {"golden_ops": str(tmp_path / "kernels.py")}
    package = trainload.freeze(
        operators(), tmp_path / "a.tl", abstract=True, reduced=operators(), libraries=libraries
    )
    assert package.manifest.op_libraries["golden_ops"].modules == ("kernels",)


def test_it_bundles_operator_libraries_like_a_package_with_weights(tmp_path: Path) -> None:
    whole = trainload.freeze(operators(), tmp_path / "whole.tl", bundle_ops=True)
    package = trainload.freeze(
        operators(), tmp_path / "a.tl", abstract=True, reduced=operators(), bundle_ops=True
    )
    assert package.manifest.op_libraries == whole.manifest.op_libraries
    wheels = [file for file in whole.manifest.files if file.startswith("extensions/")]
    assert wheels
    assert all(package.manifest.files[file] == whole.manifest.files[file] for file in wheels)


def test_no_wheels_bundle_nothing(tmp_path: Path) -> None:
    package = trainload.freeze(operators(), tmp_path / "a.tl", bundle_ops=())
    assert "extensions" not in package.manifest.features


def test_it_has_no_weights(abstract: Package) -> None:
    assert not (abstract.path / "weights").exists()
    with pytest.raises(PackageError, match="this package is abstract"):
        _ = abstract.weights


def test_it_has_the_graphs_of_the_job_with_weights(abstract: Package, concrete: Package) -> None:
    for file in concrete.manifest.graph_files():
        assert (abstract.path / file).read_bytes() == (concrete.path / file).read_bytes()


@pytest.mark.slow
def test_the_same_job_gives_the_same_bytes(abstract: Package, tmp_path: Path) -> None:
    again = trainload.freeze(
        abstract_jobs.big, tmp_path / "again.tl", abstract=True, reduced=abstract_jobs.reduced
    )
    assert again.digest == abstract.digest


def test_every_byte_is_verified(abstract: Package, copied: Path) -> None:
    assert verify_package(abstract.path).ok
    file = copied / "graphs/train.json"
    file.write_bytes(file.read_bytes().replace(b"aten", b"atem", 1))
    assert not verify_package(copied).ok


def test_its_step_graph_is_kept(abstract: Package) -> None:
    assert (abstract.path / "derived").is_dir()
    assert any(use.counts.get("step") for use in operator_uses(trainload.open(abstract.path)))


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3"])
def test_it_is_planned_as_the_job_with_weights(
    strategy: Any, abstract: Package, concrete: Package
) -> None:
    cluster = trainload.Cluster(nodes=2, devices_per_node=8)
    made, expected = (
        trainload.plan(package, cluster, strategy) for package in (abstract, concrete)
    )
    assert made.buckets == expected.buckets
    assert made.estimate == expected.estimate


# Operations that need weights


def test_a_graph_with_weights_is_refused(abstract: Package) -> None:
    with pytest.raises(PackageError, match="this package is abstract"):
        abstract.graph("train")


@pytest.mark.parametrize("verb", ["launch", "dry_run"])
def test_it_is_not_launched(verb: str, abstract: Package, tmp_path: Path) -> None:
    plan = trainload.plan(abstract, trainload.Cluster())
    with pytest.raises(PackageError, match="--weights FOLDER"):
        getattr(trainload, verb)(
            abstract, plan, tmp_path / "no.npz", run_dir=tmp_path / "run", backend="local"
        )
    assert not (tmp_path / "run").exists()


def test_a_run_of_it_is_not_resumed(abstract: Package, tmp_path: Path) -> None:
    from trainload.launching.run.run_spec import RunSpec, write_spec

    plan = trainload.plan(abstract, trainload.Cluster())
    write_spec(
        RunSpec(
            package=str(abstract.path),
            plan=plan,
            data=str(tmp_path / "no.npz"),
            run_dir=str(tmp_path / "run"),
            steps=1,
        )
    )
    with pytest.raises(PackageError, match="this package is abstract"):
        trainload.resume(tmp_path / "run", backend="local")


def test_no_pass_is_applied_to_it(abstract: Package, tmp_path: Path) -> None:
    assert (
        cli.run(["ops", str(abstract.path), "--set", "core", "-o", str(tmp_path / "core.tl")]) == 2
    )
    assert not (tmp_path / "core.tl").exists()


# Requirements of the reduced job


def test_without_a_reduced_job_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="needs a reduced job"):
        trainload.freeze(large(depth=DEPTH), tmp_path / "big.tl", abstract=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_reduced_job_of_other_structure_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="differs from the reduced one"):
        trainload.freeze(large(depth=2), tmp_path / "big.tl", abstract=True, reduced=small(depth=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    reduced = job_of(
        small().model, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(CaptureError, match="optimizer differs from that of the reduced job"):
        trainload.freeze(large(depth=DEPTH), tmp_path / "big.tl", abstract=True, reduced=reduced)


def test_a_reduced_job_that_is_wrong_is_refused_as_any_job(tmp_path: Path) -> None:
    with torch.device("meta"):
        reduced = job_of(Stack(8, 2))
    with pytest.raises(CaptureError, match="on the meta device"):
        trainload.freeze(large(depth=DEPTH), tmp_path / "big.tl", abstract=True, reduced=reduced)


def test_a_reduced_job_goes_with_abstract_alone(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="reduced requires abstract"):
        trainload.freeze(small(), tmp_path / "small.tl", reduced=small())


# Hostile manifests


def test_a_package_with_weights_that_says_it_is_abstract_is_refused(
    abstract: Package, concrete: Package, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(concrete.path, tmp_path / "copied.tl"))
    entry = json.loads((abstract.path / "manifest.json").read_bytes())["abstract"]
    edit_manifest(
        copied, lambda m: m.update(abstract=entry, features=sorted([*m["features"], "abstract"]))
    )
    with pytest.raises(PackageError, match="says it is abstract has weights"):
        trainload.open(copied)


def without_feature(manifest: dict[str, Any]) -> None:
    manifest["features"].remove("abstract")


def without_field(manifest: dict[str, Any]) -> None:
    del manifest["abstract"]


def test_a_package_without_weights_that_does_not_say_so_is_refused(copied: Path) -> None:
    edit_manifest(copied, without_feature)
    edit_manifest(copied, without_field)
    with pytest.raises(PackageError, match="a file that the manifest needs"):
        trainload.open(copied)


@pytest.mark.parametrize("change", [without_feature, without_field])
def test_the_feature_and_the_field_go_together(
    change: Callable[[dict[str, Any]], None], copied: Path
) -> None:
    edit_manifest(copied, change)
    with pytest.raises(PackageError, match="requires the field abstract"):
        trainload.open(copied)


def test_weights_beside_an_abstract_manifest_are_not_listed(copied: Path) -> None:
    (copied / "weights").mkdir()
    (copied / "weights/model-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(PackageError, match="not in the manifest"):
        trainload.open(copied)


# The command line


def test_the_command_line_freezes_it(frozen: tuple[Package, Any]) -> None:
    package, said = frozen
    assert said["digest"] == package.digest
    assert package.manifest.abstract is not None


def test_inspect_says_what_was_proven(
    abstract: Package, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["inspect", str(abstract.path)]) == 0
    assert "no weights; proven on" in capsys.readouterr().out


def test_a_launch_is_refused_in_a_line(
    abstract: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(
        ["launch", abstract.path, "--data", tmp_path / "no.npz", "--run-dir", tmp_path / "run"],
        tmp_path,
        capsys,
    )
    assert "this package is abstract" in line


def test_a_reduced_job_without_abstract_is_a_wrong_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(
        ["freeze", f"{JOBS}:reduced", "--reduced", f"{JOBS}:other", "-o", tmp_path / "x.tl"],
        tmp_path,
        capsys,
    )
    assert "--reduced requires --abstract" in line
