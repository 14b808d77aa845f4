"""Wheels: built reproducibly from installed files, and read as untrusted input.

A wheel is a zip file of Python modules, often with native code. Nothing here imports its contents.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import os
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trainload.core.errors import PackageError, StorageError, UnsafePackageError
from trainload.packaging.format.package_paths import SAFE_PART
from trainload.packaging.libraries.providers import Provider, digest_of

MAX_FILES = 100_000
MAX_UNPACKED = 8 * 2**30
"""Maximum total size of a wheel's unpacked files in bytes."""
_NATIVE = frozenset({".so", ".pyd", ".dylib", ".dll"})
_COMPRESSION = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_TIME = (1980, 1, 1, 0, 0, 0)
_BLOCK = 2**20
# PyPI's library `packaging`; for mypy the name is this project's folder.
_tags: Any = importlib.import_module("packaging.tags")
_utils: Any = importlib.import_module("packaging.utils")
_requirements: Any = importlib.import_module("packaging.requirements")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel, described by its file name and its metadata.

    Attributes:
        name: normalised name of the distribution.
        version: version of the distribution.
        requires: requirements of other distributions, as in the metadata.
        digest: `Provider.digest` of the contents.
        paths: installed paths of its files.
    """

    name: str
    version: str
    requires: tuple[str, ...]
    digest: str
    paths: frozenset[str]

    def has_module(self, name: str) -> bool:
        """Return True if the wheel contains a module of this name."""
        base = name.replace(".", "/")
        native = re.compile(rf"{re.escape(base)}(\.[^/]*)?\.(so|pyd)")
        return not self.paths.isdisjoint({f"{base}.py", f"{base}/__init__.py"}) or any(
            native.fullmatch(path) for path in self.paths
        )


def normalised(name: str) -> str:
    """Return a distribution's name in normalised form, in which PyPI compares names."""
    return str(_utils.canonicalize_name(name))


def running_tag() -> str:
    """Return the most specific wheel tag of the running Python."""
    return str(next(_tags.sys_tags()))


def fits(tags: Set[str]) -> bool:
    """Return True if the running Python can use a wheel with these tags."""
    return not tags.isdisjoint(str(tag) for tag in _tags.sys_tags())


def tags_of(file_name: str) -> frozenset[str]:
    """Return the tags in a wheel's file name.

    Raises:
        PackageError: it is not the file name of a wheel.
    """
    return frozenset(str(tag) for tag in _parse_file_name(file_name)[3])


def missing_requirements(requires: Sequence[str], installed: Mapping[str, str | None]) -> list[str]:
    """Return the requirements that apply to the running Python and are not met.

    Args:
        requires: requirements as in `Wheel.requires`.
        installed: normalised name -> version. None and missing names count as not installed.
    """
    unmet = []
    for text in requires:
        requirement = _requirements.Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(normalised(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet.append(
                f"{requirement.name}{requirement.specifier}"
                + (f" (here: {version})" if version is not None else "")
            )
    return unmet


def required_names(requires: Sequence[str], where: str) -> list[str]:
    """Return the normalised names of the distributions that requirements name.

    Raises:
        PackageError: a requirement is malformed.
    """
    try:
        return [normalised(_requirements.Requirement(text).name) for text in requires]
    except _requirements.InvalidRequirement as error:
        raise PackageError(
            f"a wheel has an invalid requirement: {' '.join(str(error).split())[:200]}", where=where
        ) from error


def make_wheel(provider: Provider, name: str, folder: Path) -> Path:
    """Write a wheel of a provider's files.

    Args:
        provider: an installed distribution, or loose files.
        name: name of the wheel's distribution, if the provider has none.
        folder: folder in which to write the wheel.

    Law: equal files yield equal bytes: entries are sorted, not compressed, and have a fixed time.
    Files that installers added are left out.

    Raises:
        PackageError: the distribution does not say which wheel it comes from, or the file name is
            not allowed in a package.
        StorageError: a file cannot be read, or the disk is full.
    """
    contents: dict[str, Path | bytes] = dict(provider.files)
    info = next(
        (path.partition("/")[0] for path in contents if path.endswith(".dist-info/METADATA")), None
    )
    if info is None:
        name, version = provider.distribution or name, provider.version or "0"
        info = f"{_escape_name(name)}-{version}.dist-info"
        pure = not any(Path(path).suffix in _NATIVE for path in contents)
        tag = "py3-none-any" if pure else running_tag()
        contents[f"{info}/METADATA"] = (
            provider.metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        ).encode()
        contents[f"{info}/WHEEL"] = (
            "Wheel-Version: 1.0\n"
            "Generator: trainload\n"
            f"Root-Is-Purelib: {str(pure).lower()}\n"
            f"Tag: {tag}\n".encode()
        )
    try:
        return _write_wheel(contents, info, folder)
    except OSError as error:
        raise StorageError(
            f"a wheel cannot be made: {error.strerror}", where=str(error.filename or folder)
        ) from error


def _write_wheel(contents: dict[str, Path | bytes], info: str, folder: Path) -> Path:
    """Write a wheel of the given files; `info` is its `.dist-info` folder."""
    with _open_data(contents.get(f"{info}/WHEEL", b"")) as source:
        described = source.read().decode("utf-8", "replace")
    tags = re.findall(r"^Tag: *([^\s-]+-[^\s-]+-[^\s-]+)\s*$", described, re.MULTILINE)
    if not tags:
        raise PackageError(
            "an installed distribution does not record the wheel that it was installed from",
            where=info,
            hint="Specify its wheel.",
        )
    triple = "-".join(".".join(sorted({tag.split("-")[part] for tag in tags})) for part in range(3))
    plain, _, version = info.removesuffix(".dist-info").rpartition("-")
    file_name = f"{_escape_name(plain)}-{version}-{triple}.whl"
    if not re.fullmatch(SAFE_PART, file_name):
        raise PackageError(
            "a wheel's name is not allowed in a package",
            where=file_name,
            expected="letters, digits and _ . + -",
        )
    record = "".join(f"{path},{_record_fields(data)}\n" for path, data in sorted(contents.items()))
    contents[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    _write_archive(folder / file_name, contents)
    return folder / file_name


def read_wheel(file: IO[bytes], file_name: str) -> Wheel:
    """Describe a wheel. Every entry is read, with the same checks as in `unpack_wheel`.

    Raises:
        PackageError: it is not a wheel.
        UnsafePackageError: it contains what no wheel needs: paths that leave its folder, links, or
            too much data.
    """
    name, version, _, _ = _parse_file_name(file_name)
    with _open_archive(file, file_name) as archive:
        entries = list(_checked_entries(archive, file_name))
        texts = [path for path, _ in entries if re.fullmatch(r"[^/]+\.dist-info/METADATA", path)]
        if len(texts) != 1:
            raise PackageError(
                "a wheel has no metadata, or several", where=file_name, got=", ".join(texts)
            )
        metadata = b""
        digests = []
        for path, entry in entries:
            digest = hashlib.sha256()
            with archive.open(entry) as source:
                while block := source.read(_BLOCK):
                    digest.update(block)
                    metadata += block if path == texts[0] else b""
            digests.append((path, digest.hexdigest()))
    headers = metadata.decode("utf-8", "replace").partition("\n\n")[0]
    requires = tuple(re.findall(r"^Requires-Dist: *(.*?)\s*$", headers, re.MULTILINE))
    required_names(requires, file_name)
    return Wheel(
        name=normalised(str(name)),
        version=str(version),
        requires=requires,
        digest=digest_of(digests),
        paths=frozenset(path for path, _ in digests),
    )


def unpack_wheel(file: IO[bytes], file_name: str, folder: Path) -> None:
    """Write the importable files of a wheel into a folder.

    Scripts, headers and data files are left out.

    Raises: as `read_wheel`, and OSError.
    """
    with _open_archive(file, file_name) as archive:
        for path, entry in _checked_entries(archive, file_name):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, target.open("xb") as target_file:
                shutil.copyfileobj(source, target_file, _BLOCK)
                target_file.flush()
                os.fsync(target_file.fileno())


def _parse_file_name(file_name: str) -> tuple[Any, Any, Any, Any]:
    try:
        parts: tuple[Any, Any, Any, Any] = _utils.parse_wheel_filename(file_name)
    except _utils.InvalidWheelFilename as error:
        raise PackageError(
            "this is not a valid wheel name",
            where=file_name[:200],
            expected="NAME-VERSION-PYTHON-ABI-PLATFORM.whl",
            got=str(error)[:200],
        ) from error
    return parts


@contextmanager
def _open_archive(file: IO[bytes], name: str) -> Iterator[zipfile.ZipFile]:
    """Open a wheel as an archive. Errors of the zip format are raised as PackageError."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
        raise PackageError(f"a wheel is not a zip file: {error}", where=name) from error
    try:
        with archive:
            yield archive
    except (zipfile.BadZipFile, NotImplementedError, EOFError, zlib.error) as error:
        raise PackageError(f"a wheel is damaged: {error}", where=name) from error


def _checked_entries(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield (installed path, entry) of every file.

    Raises:
        UnsafePackageError: a path leaves the folder or occurs twice, an entry is not a plain file,
            or there is too much data.
    """
    entries = archive.infolist()
    total = sum(entry.file_size for entry in entries)
    if len(entries) > MAX_FILES or total > MAX_UNPACKED:
        got = f"{len(entries)} files, {total} bytes"
        raise UnsafePackageError(
            "a wheel is too large",
            where=name,
            expected=f"at most {MAX_FILES} files, {MAX_UNPACKED} bytes",
            got=got,
        )
    seen: set[str] = set()
    for entry in entries:
        # zipfile changes some names: it cuts them at NUL, and replaces backslashes on Windows. Such
        # names are rejected.
        parts = entry.filename.removesuffix("/").split("/")
        plain = entry.orig_filename == entry.filename and not any(
            ord(letter) < 32 or letter in '\\:*?"<>|' for letter in entry.filename
        )
        if not plain or any(part in ("", ".", "..") for part in parts):
            raise UnsafePackageError(
                "a wheel contains a path that is invalid or leaves its folder",
                where=name,
                got=repr(entry.filename)[:200],
            )
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if (
            kind not in (0, stat.S_IFREG, stat.S_IFDIR)
            or entry.flag_bits & 1
            or entry.compress_type not in _COMPRESSION
        ):
            got = f"{entry.filename[:200]}: a link, encrypted, or compressed in an unsupported way"
            raise UnsafePackageError("a wheel may contain only regular files", where=name, got=got)
        if entry.is_dir():
            continue
        if parts[0].endswith(".data"):
            if len(parts) < 3 or parts[1] not in ("purelib", "platlib"):
                continue
            parts = parts[2:]
        path = "/".join(parts)
        if path.casefold() in seen:
            raise UnsafePackageError("a wheel contains a path twice", where=name, got=path[:200])
        seen.add(path.casefold())
        yield path, entry


def _write_archive(target: Path, contents: Mapping[str, Path | bytes]) -> None:
    """Write the archive: sorted, with `.dist-info` last, as is usual in wheels."""
    with target.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(contents, key=lambda path: (".dist-info/" in path, path)):
                entry = zipfile.ZipInfo(path, _TIME)
                entry.create_system = 3
                entry.external_attr = (stat.S_IFREG | 0o644) << 16
                data = contents[path]
                entry.file_size = data.stat().st_size if isinstance(data, Path) else len(data)
                with _open_data(data) as source, archive.open(entry, "w") as member:
                    shutil.copyfileobj(source, member, _BLOCK)
        file.flush()
        os.fsync(file.fileno())


def _open_data(data: Path | bytes) -> IO[bytes]:
    return data.open("rb") if isinstance(data, Path) else io.BytesIO(data)


def _record_fields(data: Path | bytes) -> str:
    """Return digest and size in the form of RECORD."""
    digest, size = hashlib.sha256(), 0
    with _open_data(data) as source:
        while block := source.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return f"sha256={base64.urlsafe_b64encode(digest.digest()).decode().rstrip('=')},{size}"


def _escape_name(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
