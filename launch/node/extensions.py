"""Operator libraries that a package brings: loaded where the user said so, from a cache of the node's own.

A wheel is the maker's code. `may_load_extensions` is the one place that decides whether it runs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from importlib.metadata import Distribution
from pathlib import Path

import filelock

from trainload.core.atomic import temporary_folder
from trainload.core.errors import PackageError, StorageError
from trainload.launching.node.cache import LOCK_SECONDS, default_cache_dir, private_folder
from trainload.packaging.format.manifest import FileEntry, Manifest, OpLibraryEntry
from trainload.packaging.format.package_files import copy_checked
from trainload.packaging.graphs.graph_json import running_schema
from trainload.packaging.libraries.providers import installed_version
from trainload.packaging.libraries.wheels import fits, missing_requirements, required_names, running_tag, tags_of, unpack_wheel
from trainload.packaging.package import told_library, ways_to_allow


def may_load_extensions(path: Path, manifest: Manifest, *, trusted: bool) -> str | None:
    """Why the wheels of a package may be loaded, which runs code of its maker's; None: they may not.

    Args:
        path: the package's folder.
        manifest: its manifest.
        trusted: whether the user said that this package's extensions are trusted, or a policy that it satisfies.
    """
    return "the user or a policy said so" if trusted else None


def load_extensions(path: Path, manifest: Manifest, named: Set[str]) -> frozenset[str]:
    """Imports the operator libraries that a package brings, and that are not there already. `may_load_extensions` has been asked.

    Each wheel is unpacked once per node, below the cache folder, under the digest that the manifest has of it; the folder comes first on
    `sys.path`, of this process alone. Distributions that wheels require are not installed.

    Args:
        path: the package's folder.
        manifest: its manifest.
        named: namespaces of libraries that the user has named; their wheels are left alone.

    Returns:
        The namespaces whose operators are there now.

    Raises:
        IntegrityError: a wheel's bytes are not those that the manifest lists.
        UnsafePackageError: a wheel holds what no wheel needs.
        PackageError: no wheel fits this Python and machine, a distribution that one requires is missing, or it does not register the
            operators.
        StorageError: the cache cannot be written.
    """
    brought = {namespace: entry for namespace, entry in manifest.op_libraries.items() if entry.wheels and namespace not in named}
    operators = {each: [name for name in manifest.ops if name.startswith(f"torch.ops.{each}.")] for each in brought}
    lacking = {namespace: entry for namespace, entry in brought.items() if not _registered(operators[namespace])}
    wheels = {namespace: _fitting(namespace, entry) for namespace, entry in lacking.items()}
    folders = {wheel: unpacked(path, wheel, manifest.files[wheel]) for wheel in sorted(set(wheels.values()))}
    with _first_on_path(list(folders.values())):
        for wheel, folder in folders.items():
            _check_requirements(folder, wheel)
        for namespace, wheel in wheels.items():
            for module in lacking[namespace].modules:
                _import(namespace, module, wheel, folders[wheel])
            if not _registered(operators[namespace]):
                name = next(name for name in operators[namespace] if running_schema(name) is None)
                raise PackageError("the wheel that the package brings does not register an operator", where=wheel, got=name)
    return frozenset(brought)


@contextmanager
def _first_on_path(folders: list[Path]) -> Iterator[None]:
    """Put folders first on `sys.path`, for good: what is imported from them may import more later. Not if the block fails."""
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in before]
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        sys.path[:] = before
        raise


def _registered(operators: list[str]) -> bool:
    return all(running_schema(name) is not None for name in operators)


def _fitting(namespace: str, entry: OpLibraryEntry) -> str:
    """The first wheel that this Python can use."""
    tags = {wheel: tags_of(wheel.rpartition("/")[2]) for wheel in entry.wheels}
    for wheel, its in tags.items():
        if fits(its):
            return wheel
    raise PackageError(
        f"no wheel of {told_library(entry)} that the package brings runs on this Python and machine",
        where=", ".join(tags),
        expected=running_tag(),
        got=", ".join(sorted(frozenset[str]().union(*tags.values()))),
        hint=f"Else {ways_to_allow(namespace, entry.model_copy(update={'wheels': ()}))}.",
    )


def _import(namespace: str, name: str, wheel: str, folder: Path) -> None:
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise PackageError(
            f"the wheel that the package brings does not import: {type(error).__name__}: {error}", where=f"{wheel}, module {name}"
        ) from error
    file = getattr(module, "__file__", None)
    if file is None or folder not in Path(file).parents:
        raise PackageError(
            "another module of this name was imported here before",
            where=f"{wheel}, module {name}",
            expected=f"one in {folder}",
            got=str(file),
            hint=f"Use that one instead: trainload --library {namespace}={name} COMMAND.",
        )


def unpacked(path: Path, wheel: str, entry: FileEntry) -> Path:
    """The folder on this node that holds a package's wheel, unpacked; made by the first process that asks.

    Args:
        path: the package's folder.
        wheel: the file in it.
        entry: what the manifest says of it.

    Raises: as `load_extensions`.
    """
    root = private_folder(default_cache_dir() / "extensions")
    final = root / entry.sha256
    file_name = wheel.rpartition("/")[2]
    if final.is_dir():
        return final
    with filelock.FileLock(f"{final}.lock", timeout=LOCK_SECONDS):
        if final.is_dir():
            return final
        try:
            with temporary_folder(final) as temporary:
                # What is checked is what is unpacked: a copy that nobody else writes to.
                copy_checked(path, wheel, entry, temporary / "wheel")
                with (temporary / "wheel").open("rb") as copy:
                    unpack_wheel(copy, file_name, temporary / "unpacked")
                (temporary / "unpacked").rename(final)
        except OSError as error:
            raise StorageError(
                f"the wheel cannot be unpacked: {error.strerror}",
                where=str(root),
                hint="Make room, or set TRAINLOAD_CACHE_DIR to another folder.",
            ) from error
    return final


def _check_requirements(folder: Path, wheel: str) -> None:
    """Check that what a wheel requires is installed here, or in another wheel that was put on `sys.path`."""
    requires = [text for info in folder.glob("*.dist-info") for text in Distribution.at(info).requires or ()]
    missing = missing_requirements(requires, {name: installed_version(name) for name in required_names(requires, wheel)})
    if missing:
        raise PackageError(
            "an operator library that the package brings requires what is not installed here",
            where=wheel,
            got=", ".join(missing),
            hint="Install it on every node.",
        )
