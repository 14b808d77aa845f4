"""Load operator libraries that a package contains, if the user trusts them, from the node's cache.

A wheel is code of the package's author. Only `may_load_extensions` decides whether it runs.
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
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import FileEntry, OpLibraryEntry
from trainload.packaging.format.package_files import copy_checked
from trainload.packaging.graphs.torch_operators import running_schema
from trainload.packaging.libraries.providers import installed_version
from trainload.packaging.libraries.wheels import (
    fits,
    missing_requirements,
    required_names,
    running_tag,
    tags_of,
    unpack_wheel,
)
from trainload.packaging.package import told_library, ways_to_allow


def may_load_extensions(path: Path, manifest: Manifest, *, trusted: bool) -> str | None:
    """Return the reason why a package's wheels may be loaded, which runs its author's code; None if
    they may not.

    Args:
        path: the package's folder.
        manifest: manifest of the package.
        trusted: True if the user, or a policy that the package satisfies, trusts its extensions.
    """
    return "the user or a policy said so" if trusted else None


def load_extensions(path: Path, manifest: Manifest, user_namespaces: Set[str]) -> frozenset[str]:
    """Import the operator libraries that a package contains, unless their operators are registered
    already.

    The caller must have checked `may_load_extensions`. Each wheel is unpacked once per node, in the
    cache folder, under its digest in the manifest; its folder is put first on this process's
    `sys.path`. Distributions that wheels require are not installed.

    Args:
        path: the package's folder.
        manifest: manifest of the package.
        user_namespaces: namespaces of libraries that the user has named; their wheels are not
            loaded.

    Returns:
        The namespaces whose operators the package provides.

    Raises:
        IntegrityError: a wheel does not have the digest in the manifest.
        UnsafePackageError: a wheel has contents that no wheel needs.
        PackageError: no wheel fits this Python and machine, a required distribution is missing, or
            a wheel does not register the operators.
        StorageError: the cache cannot be written.
    """
    bundled = {
        namespace: entry
        for namespace, entry in manifest.op_libraries.items()
        if entry.wheels and namespace not in user_namespaces
    }
    operators = {
        namespace: [name for name in manifest.ops if name.startswith(f"torch.ops.{namespace}.")]
        for namespace in bundled
    }
    lacking = {
        namespace: entry
        for namespace, entry in bundled.items()
        if not _are_registered(operators[namespace])
    }
    wheels = {namespace: _find_wheel(namespace, entry) for namespace, entry in lacking.items()}
    folders = {
        wheel: unpacked(path, wheel, manifest.files[wheel])
        for wheel in sorted(set(wheels.values()))
    }
    with _first_on_path(list(folders.values())):
        for wheel, folder in folders.items():
            _check_requirements(folder, wheel)
        for namespace, wheel in wheels.items():
            for module in lacking[namespace].modules:
                _import_module(namespace, module, wheel, folders[wheel])
            if not _are_registered(operators[namespace]):
                name = next(name for name in operators[namespace] if running_schema(name) is None)
                raise PackageError(
                    "the bundled wheel does not register an operator", where=wheel, got=name
                )
    return frozenset(bundled)


@contextmanager
def _first_on_path(folders: list[Path]) -> Iterator[None]:
    """Put folders first on `sys.path`, permanently, since their modules may import more later; undo
    it if the block fails.
    """
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in before]
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        sys.path[:] = before
        raise


def _are_registered(operators: list[str]) -> bool:
    return all(running_schema(name) is not None for name in operators)


def _find_wheel(namespace: str, entry: OpLibraryEntry) -> str:
    """Return the first wheel that this Python can use; raise PackageError if there is none."""
    tags = {wheel: tags_of(wheel.rpartition("/")[2]) for wheel in entry.wheels}
    for wheel, its in tags.items():
        if fits(its):
            return wheel
    raise PackageError(
        f"none of the bundled wheels of {told_library(entry)} supports this Python and machine",
        where=", ".join(tags),
        expected=running_tag(),
        got=", ".join(sorted(frozenset[str]().union(*tags.values()))),
        hint=f"Instead, {ways_to_allow(namespace, entry.model_copy(update={'wheels': ()}))}.",
    )


def _import_module(namespace: str, name: str, wheel: str, folder: Path) -> None:
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise PackageError(
            f"the bundled wheel cannot be imported: {type(error).__name__}: {error}",
            where=f"{wheel}, module {name}",
        ) from error
    file = getattr(module, "__file__", None)
    if file is None or folder not in Path(file).parents:
        raise PackageError(
            "another module with this name has already been imported",
            where=f"{wheel}, module {name}",
            expected=f"one in {folder}",
            got=str(file),
            hint=f"Use that module instead: trainload --library {namespace}={name} COMMAND.",
        )


def unpacked(path: Path, wheel: str, entry: FileEntry) -> Path:
    """Return the folder on this node with a package's unpacked wheel; the first caller unpacks it.

    The errors are those of `load_extensions`.

    Args:
        path: the package's folder.
        wheel: name of the wheel in it.
        entry: entry of the wheel in the manifest.
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
                # Check and unpack a private copy, so that nobody can change the wheel in between.
                copy_checked(path, wheel, entry, temporary / "wheel")
                with (temporary / "wheel").open("rb") as copy:
                    unpack_wheel(copy, file_name, temporary / "unpacked")
                (temporary / "unpacked").rename(final)
        except OSError as error:
            raise StorageError(
                f"the wheel cannot be unpacked: {error.strerror}",
                where=str(root),
                hint="Free some disk space, or set TRAINLOAD_CACHE_DIR to another folder.",
            ) from error
    return final


def _check_requirements(folder: Path, wheel: str) -> None:
    """Check that a wheel's requirements are installed, or provided by another wheel on
    `sys.path`.
    """
    requires = [
        text for info in folder.glob("*.dist-info") for text in Distribution.at(info).requires or ()
    ]
    missing = missing_requirements(
        requires, {name: installed_version(name) for name in required_names(requires, wheel)}
    )
    if missing:
        raise PackageError(
            "a bundled operator library requires distributions that are not installed",
            where=wheel,
            got=", ".join(missing),
            hint="Install them on every node.",
        )
