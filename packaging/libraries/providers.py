"""Providers of modules: the distribution from which a module was installed, or its files.

A provider's digest is the sha256 of the canonical JSON of path -> sha256 over the files that its
wheel installs, without metadata (`.dist-info/`). So it is the same for a wheel, for its
installation, and for the source folder of a pure Python module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    distributions,
    packages_distributions,
)
from pathlib import Path, PurePosixPath
from types import ModuleType
from urllib.parse import unquote, urlparse

from trainload.core.canonical_json import canonical_json, sha256_bytes, sha256_file
from trainload.core.errors import PackageError

_INSTALLER_FILES = frozenset(
    {
        "RECORD",
        "RECORD.jws",
        "RECORD.p7s",
        "INSTALLER",
        "REQUESTED",
        "direct_url.json",
        "uv_cache.json",
    }
)


@dataclass(frozen=True)
class Provider:
    """The provider of a module.

    Attributes:
        distribution: name of the distribution, with its `version`, if it is installed; otherwise
            None.
        files: path in a wheel -> file. For an installed distribution: its files, `.dist-info/`
            included. For a module without one, or an editable installation: the files of its
            outermost package, or its single file.
        metadata: contents of METADATA, if known and not among `files`.
    """

    distribution: str | None
    version: str | None
    files: Mapping[str, Path]
    metadata: str | None = None

    @cached_property
    def digest(self) -> str:
        """Digest of the provider's files.

        Raises:
            PackageError: a file cannot be read.
        """
        try:
            return digest_of((path, sha256_file(file)) for path, file in self.files.items())
        except OSError as error:
            raise PackageError(
                f"an operator library's file cannot be read: {error.strerror}",
                where=str(error.filename),
                hint="Reinstall the library.",
            ) from error


def digest_of(files: Iterable[tuple[str, str]]) -> str:
    """Return a provider's digest from pairs of (path in a wheel, sha256 of the file)."""
    return sha256_bytes(
        canonical_json(
            {
                path: digest
                for path, digest in files
                if not path.partition("/")[0].endswith(".dist-info")
            }
        )
    )


def counts(path: str) -> bool:
    """Return True if a file comes from a wheel, and was not written by an installer or by
    Python.
    """
    parts = PurePosixPath(path).parts
    if ".." in parts or "__pycache__" in parts or path.startswith("/") or path.endswith(".pyc"):
        return False
    return not (
        len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] in _INSTALLER_FILES
    )


def import_name(module: ModuleType) -> str:
    """Return the name by which another process can import a module: for a script or a module loaded
    by path, the file's stem.
    """
    file = getattr(module, "__file__", None)
    name = module.__name__
    if file is not None and "." not in name and Path(file).stem not in (name, "__init__"):
        return Path(file).stem
    return name


def module_of_file(file: str) -> ModuleType | None:
    """Return the imported module whose source is `file`, or None."""
    return next(
        (
            module
            for module in list(sys.modules.values())
            if getattr(module, "__file__", None) == file
        ),
        None,
    )


def provider_of(module: ModuleType) -> Provider | None:
    """Return the provider of an imported module; None if the module has no file."""
    module_file = getattr(module, "__file__", None)
    if module_file is None:
        return None
    file, name = Path(module_file), import_name(module)
    for distribution_name in distributions_with(name):
        installed = distribution(distribution_name)
        files = {
            str(path): Path(str(installed.locate_file(path)))
            for path in installed.files or ()
            if counts(str(path))
        }
        same = any(
            each.name == file.name and each.resolve() == file.resolve() for each in files.values()
        )
        if same and any(path.endswith(".dist-info/METADATA") for path in files):
            return Provider(installed.metadata["Name"], installed.version, files)
    loose = _package_files(name, file)
    in_place = _find_editable(file)
    if in_place is not None:
        return Provider(
            in_place.metadata["Name"], in_place.version, loose, in_place.read_text("METADATA")
        )
    return Provider(None, None, loose)


def distributions_with(module: str) -> Sequence[str]:
    """Return the names of the installed distributions that provide a module's outermost package."""
    places = tuple(
        (place, Path(place).stat().st_mtime_ns) for place in sys.path if Path(place).is_dir()
    )
    return _packages_to_distributions(places).get(module.partition(".")[0], ())


@cache
def _packages_to_distributions(places: tuple[tuple[str, int], ...]) -> Mapping[str, Sequence[str]]:
    """Return `packages_distributions()`, which reads a file of each distribution; cached until
    something is installed in `places`.
    """
    return packages_distributions()


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _find_editable(file: Path) -> Distribution | None:
    """Return the editable distribution whose source folder contains a file, or None."""
    for installed in distributions():
        url = json.loads(installed.read_text("direct_url.json") or "{}")
        if (
            url.get("dir_info", {}).get("editable")
            and Path(unquote(urlparse(url["url"]).path)) in file.parents
        ):
            return installed
    return None


def _package_files(name: str, file: Path) -> dict[str, Path]:
    """Return the files of a module's outermost package, or its own file.

    Folders without `__init__.py` do not count as packages, since they may contain anything.
    """
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = sys.modules.get(".".join(parts[:end]))
        start = getattr(package, "__file__", None)
        if start is not None and Path(start).name == "__init__.py":
            root, prefix = Path(start).parent, "/".join(parts[:end])
            files = {
                path.relative_to(root).as_posix(): path
                for path in sorted(root.rglob("*"))
                if path.is_file()
            }
            visible = {
                path: each
                for path, each in files.items()
                if not any(part.startswith(".") for part in path.split("/"))
            }
            return {f"{prefix}/{path}": each for path, each in visible.items() if counts(path)}
    return {"/".join([*parts[:-1], file.name]): file}
