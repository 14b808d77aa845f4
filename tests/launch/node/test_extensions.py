"""Packages with bundled operator libraries.

They are created with the libraries, rejected without the user's consent, and trained where the
library is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch.forked import done, json_said, refused_apart, write_no_bytecode
from tests.launch.node.test_libraries import JOB, LIBRARY, expected_loss
from tests.packaging.signers import Signers
from tests.packaging.tampering import edit_manifest, flip, reseal

import trainload
from trainload.core.errors import IntegrityError, PackageError, UnsafePackageError
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.extensions import may_load_extensions
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.package import read_manifest
from trainload.packaging.signatures.verify import verify_package
from trainload.publishing.trust import sign

NAMESPACE, MODULE = "bundled_ops", "bundled_operators"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the library, the job, and the package with the bundled library."""
    folder = tmp_path_factory.mktemp("source")
    (folder / f"{MODULE}.py").write_text(LIBRARY.replace("launch_library", NAMESPACE))
    (folder / "job.py").write_text(JOB.replace("operators", MODULE))
    freeze(folder, "package.tl", "--bundle-ops")
    return folder


@pytest.fixture(scope="module")
def elsewhere(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the package and data, but without the library."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(source / "package.tl", folder / "package.tl")
    shutil.rmtree(folder / "package.tl" / "debug")
    np.savez(
        folder / "data.npz", x=np.random.default_rng(0).standard_normal((16, 4), dtype=np.float32)
    )
    return folder


@pytest.fixture
def copied(elsewhere: Path, tmp_path: Path) -> Path:
    shutil.copytree(elsewhere / "package.tl", tmp_path / "package.tl")
    return tmp_path / "package.tl"


def freeze(folder: Path, output: str, *options: str) -> None:
    status, _, err = done("freeze", "job.py:job", "-o", output, *options, cwd=folder)
    assert status == 0, err


def library(package: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((package / "manifest.json").read_bytes())["op_libraries"][
        NAMESPACE
    ]
    return found


def renamed(package: Path, name: str) -> None:
    """Rename the package's wheel."""
    (old,) = library(package)["wheels"]
    (package / old).rename(package / "extensions" / name)

    def change(manifest: dict[str, Any]) -> None:
        manifest["op_libraries"][NAMESPACE]["wheels"] = [f"extensions/{name}"]
        manifest["files"][f"extensions/{name}"] = manifest["files"].pop(old)

    edit_manifest(package, change)


def replaced(package: Path, extra: dict[str, str], code: str | None = None) -> None:
    """Rewrite the package's wheel with additional files or another library."""
    (name,) = library(package)["wheels"]
    with zipfile.ZipFile(package / name) as archive:
        contents = {entry: archive.read(entry) for entry in archive.namelist()}
    contents |= {entry: text.encode() for entry, text in extra.items()}
    if code is not None:
        contents[f"{MODULE}.py"] = code.encode()
    with zipfile.ZipFile(package / name, "w") as archive:
        for entry, data in contents.items():
            archive.writestr(entry, data)
    reseal(package)


# Recorded and bundled


def test_the_package_says_what_registers_its_operators(source: Path) -> None:
    found = library(source / "package.tl")
    assert found["modules"] == [MODULE]
    assert found["wheels"] == [f"extensions/{MODULE}-0-py3-none-any.whl"]
    assert found["digest"] is not None
    assert json.loads((source / "package.tl" / "manifest.json").read_bytes())["features"] == [
        "custom-ops",
        "extensions",
        "initialization",
    ]


def test_every_byte_of_it_is_verified(copied: Path) -> None:
    assert verify_package(copied).ok
    flip(copied / library(copied)["wheels"][0], 100)
    assert not verify_package(copied).ok


def test_a_wheel_that_lacks_the_module_is_found_by_verify(copied: Path) -> None:
    edit_manifest(
        copied, lambda manifest: manifest["op_libraries"][NAMESPACE].update(modules=["other"])
    )
    (problem,) = verify_package(copied).problems
    assert "has no module other" in problem.problem


@pytest.mark.slow
def test_a_module_that_needs_what_the_wheel_lacks_is_not_bundled(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / f"{MODULE}.py").write_text(
        f"import beside\n{(source / f'{MODULE}.py').read_text()}"
    )
    (tmp_path / "job.py").write_text(JOB.replace("operators", MODULE))
    line = refused_apart(
        ["freeze", "job.py:job", "-o", "package.tl", "--bundle-ops"], tmp_path, write_no_bytecode
    )
    assert "cannot be imported from their wheels alone" in line
    assert "No module named 'beside'" in line


@pytest.mark.slow
def test_the_same_job_with_the_library_s_wheel_given_gives_the_same_bytes(
    source: Path, tmp_path: Path
) -> None:
    for name in ("job.py", f"{MODULE}.py"):
        shutil.copy(source / name, tmp_path / name)
    (wheel,) = (source / "package.tl" / "extensions").iterdir()
    freeze(tmp_path, "again.tl", "--wheel", str(wheel))
    assert (tmp_path / "again.tl" / "manifest.json").read_bytes() == (
        source / "package.tl" / "manifest.json"
    ).read_bytes()


# Consent of the user


def test_without_the_word_the_refusal_says_what_is_missing_and_how_to_get_it(
    elsewhere: Path,
) -> None:
    line = refused_apart(["ops", "package.tl"], elsewhere)
    assert NAMESPACE in line
    assert f"sha256 {library(elsewhere / 'package.tl')['digest']}" in line
    assert "--trust-extensions" in line
    assert f"--library {NAMESPACE}={MODULE}" in line


def test_inspect_shows_the_library_without_the_word(elsewhere: Path) -> None:
    status, said, err = done("inspect", "package.tl", cwd=elsewhere)
    assert status == 0, err
    assert NAMESPACE in said and "operator library" in said


def test_a_namespace_that_is_only_allowed_is_not_loaded_from_the_wheel(elsewhere: Path) -> None:
    line = refused_apart(["--library", NAMESPACE, "inspect", "package.tl"], elsewhere)
    assert "is missing" in line
    assert "Its library was not imported" in line
    assert "--trust-extensions" in line


def test_without_the_word_nothing_of_the_wheel_runs(copied: Path, tmp_path: Path) -> None:
    replaced(copied, {}, code=f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(UnsafePackageError):
        trainload.open(copied)
    assert verify_package(copied).ok
    assert not (tmp_path / "ran").exists()
    with pytest.raises(PackageError, match="does not register an operator"):
        trainload.open(copied, trust_extensions=True)
    assert (tmp_path / "ran").exists(), "the trap would have been seen"
    del sys.modules[MODULE]


def test_one_place_decides(copied: Path) -> None:
    manifest = Manifest.from_bytes(read_manifest(copied), MANIFEST)
    assert may_load_extensions(copied, manifest, trusted=False) is None
    assert may_load_extensions(copied, manifest, trusted=True) == "the user or a policy said so"


@pytest.mark.slow
def test_a_policy_that_takes_signed_libraries_stands_for_the_word(
    copied: Path, elsewhere: Path, signers: Signers, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'extensions = "signed"\nidentities = ["{signers.alice.public}"]\n')
    launch: list[str | Path] = [
        "launch",
        str(copied),
        "--data",
        str(elsewhere / "data.npz"),
        "--run-dir",
        "run",
        "--backend",
        "local",
        "--no-compile",
    ]
    assert "it is not signed as required" in refused_apart(
        ["--policy", str(policy), *launch], tmp_path
    )
    sign(copied, signers.alice.key, name="alice")
    told = json_said("--policy", policy, *launch, cwd=tmp_path)
    assert told["first_loss"] == pytest.approx(expected_loss(), rel=1e-6)
    assert NAMESPACE in refused_apart(launch, tmp_path)


# Wheels that cannot be loaded


def test_a_wheel_for_another_machine_is_refused_by_its_tags(copied: Path) -> None:
    renamed(copied, f"{MODULE}-0-cp38-cp38-win_amd64.whl")
    with pytest.raises(
        PackageError, match=r"supports this Python and machine.*got cp38-cp38-win_amd64.*install"
    ):
        trainload.open(copied, trust_extensions=True)


def test_a_wheel_whose_requirements_are_not_met_is_refused_by_their_names(copied: Path) -> None:
    metadata = (
        f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 0\nRequires-Dist: none-of-this-name>=2\n"
    )
    replaced(copied, {f"{MODULE}-0.dist-info/METADATA": metadata})
    with pytest.raises(
        PackageError, match=r"requires distributions that are not installed.*none-of-this-name>=2"
    ):
        trainload.open(copied, trust_extensions=True)


def test_a_wheel_that_was_changed_is_refused_before_it_is_unpacked(copied: Path) -> None:
    (name,) = library(copied)["wheels"]
    replaced(copied, {"more.py": ""})
    digest = json.loads((copied / "manifest.json").read_bytes())["files"][name]["sha256"]
    flip(copied / name, 200)
    with pytest.raises(IntegrityError, match="does not match its entry in the manifest"):
        trainload.open(copied, trust_extensions=True)
    assert not (default_cache_dir() / "extensions" / digest).exists()


# Training without the installed library


@pytest.fixture(scope="module")
def run(elsewhere: Path) -> Any:
    """JSON output of a run in the folder without the library."""
    options = [
        "--data",
        "data.npz",
        "--run-dir",
        "run",
        "--backend",
        "local",
        "--no-compile",
        "--output",
        "trained.tl",
    ]
    return json_said(
        "--trust-extensions",
        "launch",
        "package.tl",
        *options,
        cwd=elsewhere,
        first=demand_that_it_is_not_here,
    )


def demand_that_it_is_not_here() -> None:
    assert importlib.util.find_spec(MODULE) is None


def test_a_package_trains_where_its_library_cannot_be_imported(run: Any) -> None:
    assert run["first_loss"] == pytest.approx(expected_loss(), rel=1e-6)


@pytest.mark.usefixtures("run")
def test_the_trained_package_brings_the_library_too(elsewhere: Path) -> None:
    assert library(elsewhere / "trained.tl") == library(elsewhere / "package.tl")
    assert verify_package(elsewhere / "trained.tl").ok


def test_a_run_is_resumed_with_the_word_that_it_was_given(run: Any, elsewhere: Path) -> None:
    (elsewhere / "trained.tl").rename(elsewhere / "trained-before.tl")
    resumed = json_said("resume", "run", "--backend", "local", cwd=elsewhere)
    assert resumed["last_loss"] == run["last_loss"]


@pytest.mark.slow
def test_a_pass_keeps_the_wheel(elsewhere: Path) -> None:
    options = ["package.tl", "--pass", "trainload.passes:eliminate_dead_code", "-o", "passed.tl"]
    json_said("--trust-extensions", "transform", *options, cwd=elsewhere)
    assert library(elsewhere / "passed.tl") == library(elsewhere / "package.tl")
    assert verify_package(elsewhere / "passed.tl").ok


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_workers_on_ray_that_lack_the_library_compile_and_train(
    elsewhere: Path, tmp_path: Path
) -> None:
    package = trainload.open(elsewhere / "package.tl", trust_extensions=True)
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2))
    result = trainload.launch(
        package, plan, elsewhere / "data.npz", run_dir=tmp_path / "run", trust_extensions=True
    )
    assert result.steps == 3
    assert result.first_loss == pytest.approx(expected_loss(), rel=1e-5)


def test_the_wheel_lies_unpacked_where_only_its_user_may_write(elsewhere: Path) -> None:
    trainload.open(elsewhere / "package.tl", trust_extensions=True)
    folder = default_cache_dir() / "extensions"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (name,) = library(elsewhere / "package.tl")["wheels"]
    digest = json.loads((elsewhere / "package.tl" / "manifest.json").read_bytes())["files"][name][
        "sha256"
    ]
    assert (folder / digest / f"{MODULE}.py").read_text() == LIBRARY.replace(
        "launch_library", NAMESPACE
    )
