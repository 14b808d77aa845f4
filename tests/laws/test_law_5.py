"""Law 5: the same job gives the same bytes; a changed bit anywhere is detected before use."""

from __future__ import annotations

import io
import os
import random
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from tests.launch.checkpoint_cases import make_plan, save_all
from tests.laws.runs import ROOT
from tests.packaging.tampering import flip
from tests.selection import selected

import trainload
from trainload.core.canonical_json import sha256_file
from trainload.core.errors import CheckpointError, IntegrityError, PackageError
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.load import load_sharded
from trainload.launching.checkpoints.reader import Checkpoint, usable_checkpoint
from trainload.launching.run.journal import read_events
from trainload.packaging.comparison.package_difference import package_difference
from trainload.packaging.format.package_paths import OUTSIDE
from trainload.packaging.package import Package, open_package
from trainload.packaging.signatures.verify import verify_package

PLAN = make_plan("zero3", 2)


def files_of(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def flip_somewhere(path: Path, last: int | None = None) -> None:
    """Flip a random bit of a file, or of its last bytes. Print the seed."""
    seed = random.SystemRandom().randrange(10**6)
    size = path.stat().st_size
    at = random.Random(seed).randrange(0 if last is None else size - last, size)
    print(f"seed {seed}: byte {at} of {path.name}")
    flip(path, at)


OTHER = 12345
"""Id of a user other than this process's."""


def as_other_user(command: list[str]) -> list[str]:
    """Return the command that runs another command as another user, in a namespace.

    This user's files belong to the other user there. If the system allows no namespace, the command
    is returned unchanged.
    """
    become = ["unshare", "--user", f"--map-user={OTHER}", f"--map-group={OTHER}"]
    found = (
        shutil.which("unshare") is not None
        and subprocess.run([*become, "true"], capture_output=True, check=False).returncode == 0
    )
    return [*become, *command] if found and os.getuid() != OTHER else command


def circumstances(folder: Path) -> dict[str, str]:
    """Return an environment that differs from this process's in as much as possible.

    It has other names, home, locale, time zone, hash seed, terminal width, cache and key.
    """
    own = {
        "HOME": "home",
        "TRAINLOAD_CACHE_DIR": "cache",
        "TRAINLOAD_STATE_DIR": "state",
        "XDG_CACHE_HOME": "xdg",
        "TMPDIR": "temporary",
    }
    for place in own.values():
        (folder / place).mkdir()
    return {
        **os.environ,
        **{variable: str(folder / place) for variable, place in own.items()},
        **dict.fromkeys(("USER", "LOGNAME", "USERNAME", "HOSTNAME"), "grace"),
        "PYTHONHASHSEED": "2",  # the other process has a random one
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C" if os.environ.get("LC_ALL") == "C.UTF-8" else "C.UTF-8",
        "COLUMNS": "213",
    }


def freeze_here(folder: Path, names: Sequence[str]) -> str:
    """Run `freezer.py` in this process. Return its output."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setattr(sys, "argv", ["freezer.py", str(folder), *names])
        for module in ("gpt", "jobs"):
            patch.delitem(sys.modules, module, raising=False)
        runpy.run_path("freezer.py", run_name="__main__")
        for module in ("gpt", "jobs"):
            sys.modules.pop(module, None)
    return printed.getvalue()


PACKAGES = ("gpt.tl", "small.tl", "job.tl")


@pytest.fixture(scope="module")
def frozen_twice(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, Path]:
    """Folders with the same packages, frozen by this process and by another one.

    They are frozen from two copies of the source, by two users, with different names, homes, hash
    seeds, locales, time zones and umasks.
    """
    asked = sorted(selected(request, "name")) or PACKAGES
    here, there = folders = (
        tmp_path_factory.mktemp("here"),
        tmp_path_factory.mktemp("there") / "deeper" / "down",
    )
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for source in ("laws/freezer.py", "laws/gpt.py", "packaging/jobs.py"):
            shutil.copy(ROOT / "tests" / source, folder)
    command = [sys.executable, "freezer.py", str(there), *asked]
    who = as_other_user(command)
    print(f"run by {who[0]}")
    with subprocess.Popen(
        who, cwd=there, env=circumstances(there), umask=0o077, stdout=subprocess.PIPE, text=True
    ) as other:
        own = freeze_here(here, asked)
        printed = (own.splitlines(), other.communicate()[0].splitlines())
    assert other.returncode == 0
    assert printed[0][1:] == printed[1][1:]
    assert [lines[0] for lines in printed] == [
        str(os.getuid()),
        str(OTHER) if who[0] == "unshare" else str(os.getuid()),
    ]
    return folders


@pytest.mark.alone  # another interpreter starts next to this one
@pytest.mark.matrix("small.tl")
@pytest.mark.parametrize("name", PACKAGES)
def test_two_processes_in_two_folders_write_the_same_bytes(
    frozen_twice: tuple[Path, Path], name: str
) -> None:
    first, second = (folder / name for folder in frozen_twice)
    assert files_of(first) == files_of(second)
    different = {
        file for file in files_of(first) if sha256_file(first / file) != sha256_file(second / file)
    }
    assert {file for file in different if file.split("/")[0] not in OUTSIDE} == set()
    assert "debug/train.json" in different, "source paths were the same: this shows nothing"
    assert trainload.open(first).digest == trainload.open(second).digest
    assert package_difference(first, second).same


def demand_flips_found(package: Path) -> None:
    """Check that a changed bit in any file of a package is detected before it is used."""
    assert verify_package(package).ok
    for file in files_of(package):
        before = (package / file).read_bytes()
        flip_somewhere(package / file)
        assert {problem.file for problem in verify_package(package).problems} == {file}
        if file.split("/")[0] not in (*OUTSIDE, "assets"):
            with pytest.raises(PackageError, match=file):
                use(package)
        (package / file).write_bytes(before)
    use(package)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_flipped_bit_in_any_file_of_a_package_is_found(
    frozen_twice: tuple[Path, Path], name: str
) -> None:
    demand_flips_found(frozen_twice[0] / name)


def test_a_flipped_bit_in_a_file_of_any_kind_is_found(copied: Path) -> None:
    demand_flips_found(copied)


def use(path: Path) -> None:
    """Read everything that a run reads."""
    package = open_package(path)
    package.program()
    package.updates()
    dict(package.program().state)


@pytest.mark.slow  # some packages are frozen only for slow tests
def test_every_kind_of_file_that_a_package_can_hold_was_tried(
    frozen_twice: tuple[Path, Path], packaged: Package
) -> None:
    tried = {file for package in frozen_twice[0].glob("*.tl") for file in files_of(package)}
    assert {kind_of(file) for file in files_of(packaged.path)} - {
        kind_of(file) for file in tried
    } == {("assets", "")}


def kind_of(file: str) -> tuple[str, str]:
    return file.rpartition("/")[0], Path(file).suffix


def test_a_flipped_bit_in_an_asset_is_found(copied: Path) -> None:
    flip_somewhere(copied / "assets/LICENSE")
    assert {problem.file for problem in verify_package(copied).problems} == {"assets/LICENSE"}
    with pytest.raises(PackageError, match="assets/LICENSE"):
        open_package(copied).asset("LICENSE")


def test_a_run_does_not_train_on_weights_with_a_flipped_bit(
    gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    shutil.copytree(gpt.path, tmp_path / "gpt.tl")
    package = trainload.open(tmp_path / "gpt.tl")
    plan = trainload.plan(package, trainload.Cluster(), "single")
    weights = sorted((package.path / "weights").glob("model-*.safetensors"))[0]
    flip_somewhere(weights, last=1000)
    with pytest.raises(IntegrityError, match=weights.name):
        trainload.launch(
            package,
            plan,
            gpt_data,
            run_dir=tmp_path / "run",
            steps=2,
            backend="local",
            compile=False,
        )
    assert [event for event in read_events(tmp_path / "run") if event.kind == "step"] == []


def load_all(checkpoint: Path) -> None:
    for rank in range(PLAN.world_size):
        load_sharded(Checkpoint.open(checkpoint), PLAN, rank)


@pytest.mark.parametrize("last", [None, 40])
def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found(
    tmp_path: Path, last: int | None
) -> None:
    earlier, newest = (save_all(tmp_path, PLAN, step, salt=step) for step in (10, 20))
    for file in files_of(newest):
        before = (newest / file).read_bytes()
        flip_somewhere(newest / file, last)
        with pytest.raises(CheckpointError, match=file):
            load_all(newest)
        usable = usable_checkpoint(place_of(tmp_path))
        assert usable.path == earlier
        assert file in usable.rejected[0]
        (newest / file).write_bytes(before)
    assert usable_checkpoint(place_of(tmp_path)).path == newest
