"""Every attack by a package is rejected before a tensor is created and without running anything.

The message is one line that names the file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hostile.guarded import checked, refusal, watched
from tests.hostile.packages import CASES, FIRST, KEY, Case

from trainload.core.errors import IntegrityError, PackageError, UnsafePackageError
from trainload.packaging.derived import read_derived
from trainload.packaging.signatures.verify import verify_package


@pytest.fixture
def target(attacked: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "job.tl"
    shutil.copytree(attacked, folder)
    return folder


EVERYWHERE = {
    "a key twice",
    "no bytes",
    "code as a symbolic size",
    "function of Python",
    "object as an input",
    "a header that claims 2^60 bytes",
    "one tensor more",
    "a pickle",
}
"""Attacks that are tried on every file.

Any other attack is tried on the first of the files that are read in the same way.
"""
FIRST_OF = {case.what: case for case in reversed(CASES)}


def stands_for_others(case: Case) -> bool:
    return "two million" not in case.what and (
        case.what in EVERYWHERE or case is FIRST_OF[case.what]
    )


@pytest.mark.matrix(when=stands_for_others)
@pytest.mark.parametrize("case", CASES, ids=[f"{case.file}: {case.what}" for case in CASES])
def test_it_is_refused_by_file_in_one_line_before_anything_is_made_or_run(
    target: Path, case: Case
) -> None:
    case.attack(target)
    with watched() as noted:
        line = refusal(target, case.file)
    assert case.file.split("/")[0] in line and Path(case.file).name in line
    assert "\n" not in line
    assert noted.acts == []
    assert noted.made == 0


def test_without_an_attack_it_is_taken(target: Path) -> None:
    with watched() as noted:
        package = checked(target)
    assert (noted.acts, noted.made) == ([], 0)
    assert verify_package(target).ok
    assert read_derived(package, KEY) is not None


def test_what_is_watched_is_noticed(target: Path, tmp_path: Path) -> None:
    with watched() as noted:
        checked(target).constants  # noqa: B018 - reads it
        (tmp_path / "x").write_text("x")
        os.system("true")
    assert noted.made > 0
    assert [act.split(" ")[0] for act in noted.acts] == ["open", "os.system"]


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(2**20))


def _become_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _move_below_a_link(path: Path) -> None:
    path.parent.rename(path.parent.parent / "debug" / "elsewhere")
    path.parent.symlink_to("debug/elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        _grow,
        lambda path: os.truncate(path, 9),
        _become_a_link,
        _become_a_pipe,
        _move_below_a_link,
        Path.unlink,
    ],
)
@pytest.mark.parametrize("file", [FIRST, "graphs/train.json"])
def test_what_changes_between_check_and_use_is_refused(
    target: Path, file: str, change: Callable[[Path], object]
) -> None:
    package = checked(target)
    change(target / file)
    if change is _grow and file == FIRST:
        # only the listed size is read
        assert {name: tensor.shape for name, tensor in package.program().state.items()}
        with pytest.raises(IntegrityError, match="size"):
            checked(target)
        return
    with pytest.raises((IntegrityError, UnsafePackageError), match=file.split("/")[0]):
        dict(package.program().state)


def test_a_package_may_lie_below_a_link_of_its_users(target: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(target)
    assert checked(tmp_path / "link").digest == checked(target).digest


def test_a_launch_refuses_hostile_weights_before_anything_starts(
    target: Path, tmp_path: Path
) -> None:
    import trainload

    case = next(case for case in CASES if case.file == FIRST and "2^60" in case.what)
    case.attack(target)
    package = trainload.open(target)
    plan = trainload.plan(package, trainload.Cluster(), "single")
    with pytest.raises(PackageError, match=FIRST):
        trainload.launch(
            package, plan, tmp_path / "nothing.npz", run_dir=tmp_path / "run", backend="local"
        )
    assert not (tmp_path / "run").exists()
