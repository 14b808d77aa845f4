"""A build's folder contains exactly what its record lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.builds import TARGET, made_build

from trainload.core.errors import IntegrityError, PackageError, StorageError
from trainload.packaging.builds.build_folder import check_build, read_build
from trainload.packaging.builds.build_record import BuildRecord, Target
from trainload.packaging.format.manifest_records import FileEntry


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return made_build(tmp_path / "tiny.build")


def test_a_record_is_read_as_it_was_written(build: Path) -> None:
    record, _ = read_build(build)
    assert BuildRecord.from_bytes(record.to_bytes(), "") == record
    assert record.target == TARGET


def test_an_intact_build_has_every_listed_file(build: Path) -> None:
    assert set(check_build(build)[0].files) == {
        "0/index.json",
        "0/train.only.bin",
        "0/kernels/abc.so",
    }


def change(path: Path) -> None:
    path.write_text("other")


def remove(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize("damage", [change, remove, link])
@pytest.mark.parametrize("file", ["0/train.only.bin", "0/kernels/abc.so", "build.json"])
def test_a_damaged_build_is_refused(build: Path, file: str, damage: Callable[[Path], None]) -> None:
    damage(build / file)
    with pytest.raises((PackageError, StorageError)):
        check_build(build)


def test_a_file_that_the_record_does_not_list_is_refused(build: Path) -> None:
    (build / "0" / "kernels" / "more.so").write_text("code")
    with pytest.raises(IntegrityError, match="not listed"):
        check_build(build)


def test_a_folder_without_a_record_is_no_build(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no build"):
        read_build(tmp_path)


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (["0/index.json", "signatures/x.sig"], "cannot be part of a build"),
        (["0/index.json", "manifest.json"], "cannot be part of a build"),
        (["0/index.json", "00/graph.bin"], "cannot be part of a build"),
        (["1/index.json"], "numbered from 0"),
        (["0/index.json", "1/graph.bin"], "part 1 has no index.json"),
        ([], "numbered from 0"),
    ],
)
def test_a_record_lists_complete_parts_and_nothing_else(
    build: Path, paths: list[str], told: str
) -> None:
    record, _ = read_build(build)
    entry = FileEntry(media_type="text/plain", sha256="0" * 64, size=1).model_dump()
    with pytest.raises(ValueError, match=told):
        BuildRecord.model_validate({**record.model_dump(), "files": dict.fromkeys(paths, entry)})


def test_a_folder_that_is_a_package_too_is_refused(build: Path) -> None:
    (build / "manifest.json").write_text("{}")
    with pytest.raises(IntegrityError, match="not listed"):
        check_build(build)


def test_only_graphs_of_the_build_can_be_unverified(build: Path) -> None:
    record, _ = read_build(build)
    with pytest.raises(ValueError, match="not of this build"):
        BuildRecord.model_validate({**record.model_dump(), "unverified": ("eval",)})


@pytest.mark.parametrize(
    ("part", "fact", "value", "told"),
    [
        ("architecture", "capability", "AVX2", "its capability is AVX512, not AVX2"),
        ("architecture", "threads", 2, "its threads is 4, not 2"),
        ("toolchain", "torch", "2.14.1", "its torch is 2.13.0+cpu, not 2.14.1"),
        ("toolchain", "triton", "3.8.0", "its triton is None, not 3.8.0"),
    ],
)
def test_what_a_build_does_not_fit_is_told(
    part: str, fact: str, value: int | str, told: str
) -> None:
    other = TARGET.model_dump()
    other[part][fact] = value
    here = Target.model_validate(other)
    assert TARGET.difference(here) == told
    assert TARGET.key != here.key


def test_a_build_fits_its_own_target() -> None:
    assert TARGET.difference(Target.model_validate(TARGET.model_dump())) is None
