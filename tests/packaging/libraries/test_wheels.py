"""Wheels are reproducible, accepted by pip, and confined to their folder."""

from __future__ import annotations

import importlib.metadata
import io
import os
import stat
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from trainload.core.errors import PackageError, UnsafePackageError
from trainload.packaging.libraries.providers import Provider, provider_of
from trainload.packaging.libraries.wheels import (
    MAX_UNPACKED,
    fits,
    make_wheel,
    missing_requirements,
    read_wheel,
    tags_of,
    unpack_wheel,
)

NAME = "tried-1.0-py3-none-any.whl"


def loose(folder: Path) -> Provider:
    """Write a package of two modules that is not installed."""
    (folder / "tried").mkdir(parents=True)
    (folder / "tried" / "__init__.py").write_text("answer = 42\n")
    (folder / "tried" / "more.py").write_text("from tried import answer\n")
    return Provider(
        None,
        None,
        {f"tried/{name}": folder / "tried" / name for name in ("__init__.py", "more.py")},
    )


def installed() -> Provider:
    found = provider_of(click)
    assert found is not None
    return found


def wheel(**files: str) -> io.BytesIO:
    """Return a wheel made by hand from path -> text, with __ for each slash of a path."""
    return zipped(
        {
            "tried-1.0.dist-info/METADATA": "Name: tried\n",
            **{path.replace("__", "/"): text for path, text in files.items()},
        }
    )


def zipped(contents: dict[str, str]) -> io.BytesIO:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # about duplicate names
        for path, text in contents.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return file


def test_an_installed_distribution_is_found() -> None:
    assert (installed().distribution, installed().version) == (
        "click",
        importlib.metadata.version("click"),
    )


def test_a_wheel_of_it_has_its_digest_and_metadata(tmp_path: Path) -> None:
    path = make_wheel(installed(), "click", tmp_path)
    with path.open("rb") as file:
        found = read_wheel(file, path.name)
    assert (found.name, found.version, found.digest) == (
        "click",
        installed().version,
        installed().digest,
    )
    assert fits(tags_of(path.name))
    assert found.has_module("click.core")
    assert not found.has_module("click.none")


@pytest.mark.parametrize("provider", ["installed", "loose"])
def test_a_wheel_has_the_same_bytes_each_time(provider: str, tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        found = installed() if provider == "installed" else loose(tmp_path / name / "source")
        for file in found.files.values() if provider == "loose" else ():
            os.utime(file, (0, 1e9 if name == "a" else 2e9))
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(make_wheel(found, "tried", tmp_path / name))
    assert made[0].name == made[1].name
    assert made[0].read_bytes() == made[1].read_bytes()


def test_pip_installs_a_wheel_that_was_made(tmp_path: Path) -> None:
    path = make_wheel(loose(tmp_path), "tried", tmp_path)
    options = [
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--disable-pip-version-check",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(path)], check=True)
    code = "import tried.more; print(tried.more.answer)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert (
        subprocess.run(
            [sys.executable, "-P", "-c", code], env=environment, capture_output=True, check=True
        ).stdout
        == b"42\n"
    )


def test_a_loose_package_and_its_wheel_have_one_digest(tmp_path: Path) -> None:
    provider = loose(tmp_path)
    path = make_wheel(provider, "tried", tmp_path)
    with path.open("rb") as file:
        assert read_wheel(file, path.name).digest == provider.digest
    (tmp_path / "tried" / "more.py").write_text("")
    assert Provider(None, None, provider.files).digest != provider.digest


def test_native_code_makes_a_wheel_of_this_machine_alone(tmp_path: Path) -> None:
    provider = loose(tmp_path)
    (tmp_path / "tried" / "native.so").write_bytes(b"\x7fELF")
    path = make_wheel(
        Provider(
            None, None, {**provider.files, "tried/native.so": tmp_path / "tried" / "native.so"}
        ),
        "tried",
        tmp_path,
    )
    assert fits(tags_of(path.name))
    assert not path.name.endswith("none-any.whl")


@pytest.mark.parametrize(
    "tag",
    ["cp27-cp27m-win_amd64", "cp311-cp311-macosx_11_0_arm64", "cp399-cp399-manylinux_2_17_x86_64"],
)
def test_a_wheel_for_another_machine_does_not_fit(tag: str) -> None:
    assert not fits(tags_of(f"tried-1.0-{tag}.whl"))


@pytest.mark.parametrize("name", ["tried.whl", "tried-1.0.zip", "tried-x-py3-none-any.whl", ""])
def test_what_has_no_name_of_a_wheel_is_none(name: str) -> None:
    with pytest.raises(PackageError, match="not a valid wheel name"):
        tags_of(name)


def test_scripts_and_data_are_left_out_and_libraries_put_where_they_belong(tmp_path: Path) -> None:
    paths = {
        "tried-1.0.data/scripts/run": "x",
        "tried-1.0.data/purelib/tried/moved.py": "",
        "tried/__init__.py": "",
    }
    file = zipped({"tried-1.0.dist-info/METADATA": "Name: tried\n", **paths})
    unpack_wheel(file, NAME, tmp_path / "out")
    found = {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == {"tried/__init__.py", "tried/moved.py", "tried-1.0.dist-info/METADATA"}


HOSTILE = {
    "a path above": "../outside.py",
    "a path above, further in": "tried/../../outside.py",
    "an absolute path": "/outside.py",
    "a backslash": "tried\\..\\outside.py",
    "a drive": "c:outside.py",
    "a dot": "./outside.py",
    "an empty part": "tried//outside.py",
    "a line break": "tried/out\nside.py",
    "a path above, through data": "tried-1.0.data/purelib/../../outside.py",
}


@pytest.mark.parametrize("path", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_wheel_with_a_path_that_leaves_its_folder_is_refused(path: str, tmp_path: Path) -> None:
    for act in (
        lambda file: read_wheel(file, NAME),
        lambda file: unpack_wheel(file, NAME, tmp_path / "in" / "out"),
    ):
        with pytest.raises(UnsafePackageError, match="leaves its folder"):
            act(zipped({"tried-1.0.dist-info/METADATA": "", path: "x"}))
    assert list(tmp_path.rglob("outside*")) == []


def entry(change: Callable[[zipfile.ZipInfo], None]) -> io.BytesIO:
    """Return a wheel with one more file, whose entry was changed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tried-1.0.dist-info/METADATA", "")
        info = zipfile.ZipInfo("tried/link")
        change(info)
        archive.writestr(info, "../../outside")
    return file


def test_a_link_in_a_wheel_is_refused(tmp_path: Path) -> None:
    file = entry(lambda info: setattr(info, "external_attr", (stat.S_IFLNK | 0o777) << 16))
    with pytest.raises(UnsafePackageError, match="only regular files"):
        unpack_wheel(file, NAME, tmp_path)


def test_a_path_that_comes_twice_is_refused(tmp_path: Path) -> None:
    file = zipped({"tried-1.0.dist-info/METADATA": "", "tried/a.py": "", "tried/A.py": ""})
    with pytest.raises(UnsafePackageError, match="twice"):
        unpack_wheel(file, NAME, tmp_path)


def test_a_wheel_that_says_it_is_too_large_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    sizes = (2**32 - 2).to_bytes(4, "little")
    count = MAX_UNPACKED // 2**32 + 1
    data = zipped(
        {"tried-1.0.dist-info/METADATA": "", **{f"tried/{number}": "x" for number in range(count)}}
    ).getvalue()
    for number in range(count):
        # the place of its size in its entry of the central directory
        at = data.rindex(f"tried/{number}".encode()) - 46 + 24
        data = data[:at] + sizes + data[at + 4 :]
    with pytest.raises(UnsafePackageError, match="too large"):
        unpack_wheel(io.BytesIO(data), NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9])
def test_a_damaged_wheel_is_refused(at: float, tmp_path: Path) -> None:
    data = bytearray(wheel(tried__a="x" * 1000).getvalue())
    data[int(at * len(data))] ^= 0xFF
    with pytest.raises(PackageError):
        unpack_wheel(io.BytesIO(bytes(data[:-30])), NAME, tmp_path)


def test_what_is_no_zip_file_is_refused() -> None:
    with pytest.raises(PackageError, match="not a zip file"):
        read_wheel(io.BytesIO(b"nothing"), NAME)


def test_a_wheel_without_metadata_is_refused() -> None:
    with pytest.raises(PackageError, match="no metadata"):
        read_wheel(zipped({"tried.py": ""}), NAME)


def test_requirements_that_are_not_met_are_listed_and_others_are_not() -> None:
    requires = (
        "there",
        "there>=2",
        "gone",
        'other; sys_platform == "none"',
        "extra; extra == 'test'",
    )
    assert missing_requirements(requires, {"there": "1.5"}) == ["there>=2 (here: 1.5)", "gone"]
