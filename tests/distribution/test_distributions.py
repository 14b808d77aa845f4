"""The wheel and the source distribution: what they contain, and that both work."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from tests.distribution import first_job
from tests.distribution.requirements import extras, project
from tests.house.source import ROOT, STAGES
from tests.laws.isolated import make_environment
from tests.shared import made_once

FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md")


def build(folder: Path) -> None:
    """Build the source distribution, and the wheel from it, as `make dist` does."""
    source = folder / "source"
    source.mkdir()
    for name in (*FILES, "CITATION.cff", "src", *STAGES):
        subprocess.run(["cp", "-a", str(ROOT / name), str(source)], check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(source)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both distributions."""
    return made_once(tmp_path_factory, "dist", build) / "dist"


def contents(wheel: Path) -> dict[str, str]:
    """Return name -> digest of each file in a wheel, except for the list of these digests."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if not name.endswith("/RECORD")
        }


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_licence_is_in_the_wheel(wheel: Path) -> None:
    assert metadata(wheel).get_all("License-File") == ["LICENSE"]
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"
    held = {name.partition(".dist-info/")[2]: digest for name, digest in contents(wheel).items()}
    assert held["licenses/LICENSE"] == hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()


def test_the_readme_is_the_description(wheel: Path) -> None:
    assert metadata(wheel)["Description-Content-Type"] == "text/markdown"
    assert str(metadata(wheel).get_payload()).strip() == (ROOT / "README.md").read_text().strip()


def test_the_wheel_requires_what_the_project_declares(wheel: Path) -> None:
    assert metadata(wheel)["Requires-Python"] == project()["requires-python"]
    assert set(metadata(wheel).get_all("Provides-Extra") or []) == extras()


@pytest.mark.slow  # builds both distributions
def test_the_source_distribution_builds_the_same_wheel(wheel: Path, dist: Path) -> None:
    (rebuilt,) = dist.glob("*.whl")
    assert contents(rebuilt) == contents(wheel)


@pytest.mark.slow
def test_the_source_distribution_has_plain_files_instead_of_links(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
    assert [each.name for each in members if not (each.isfile() or each.isdir())] == []
    names = {each.name.partition("/")[2] for each in members}
    assert {"CHANGELOG.md", "LICENSE", "SECURITY.md", "src/trainload/launching/api/launch.py"} <= (
        names
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", [("twine", "check", "--strict"), ("check_wheel_contents",)])
def test_the_checkers_of_distributions_accept_both(command: tuple[str, ...], dist: Path) -> None:
    files = dist.glob("*.whl") if command[0] == "check_wheel_contents" else dist.iterdir()
    done = subprocess.run(
        [sys.executable, "-m", *command, *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow  # freezes, compiles, trains and exports in processes of their own
def test_the_wheel_without_extras_runs_a_first_job_from_an_empty_folder(
    dist: Path, tmp_path: Path
) -> None:
    (rebuilt,) = dist.glob("*.whl")
    environment = make_environment(tmp_path / "venv", rebuilt)
    folder = tmp_path / "empty"
    folder.mkdir()
    printed = environment.run(Path(first_job.__file__).read_text(), folder, "compiled")
    assert printed.splitlines()[-1] == "predicts"
