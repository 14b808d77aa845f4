"""What provides a module: the distribution that it is installed from, or the files beside it.

A provider's digest is the sha256 of the canonical JSON of path -> sha256 over the files that a wheel of it puts among the installed
packages, less those that describe it (`.dist-info/`). So it is the same for a wheel, for what was installed from it, and for the source
folder of a module of Python alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, packages_distributions
from pathlib import Path, PurePosixPath
from types import ModuleType
from urllib.parse import unquote, urlparse

from trainload.core.canonical_json import canonical_json, sha256_bytes, sha256_file
from trainload.core.errors import PackageError

_OF_INSTALLERS = frozenset({"RECORD", "RECORD.jws", "RECORD.p7s", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})


@dataclass(frozen=True)
class Provider:
    """What provides a module.

    Attributes:
        distribution: its name and `version`, where it is installed; else None.
        files: path in a wheel -> file. Those of an installed distribution with its `.dist-info/`; of a module without one, or of one that
            is installed in place (editable), the files of its outermost package, or its one file.
        metadata: METADATA, where `files` lack it and it is known.
    """

    distribution: str | None
    version: str | None
    files: Mapping[str, Path]
    metadata: str | None = None

    @cached_property
    def digest(self) -> str:
        """The sha256 of what it consists of.

        Raises:
            PackageError: a file cannot be read.
        """
        try:
            return digest_of((path, sha256_file(file)) for path, file in self.files.items())
        except OSError as error:
            raise PackageError(
                f"an operator library's file cannot be read: {error.strerror}", where=str(error.filename), hint="Install it again."
            ) from error


def digest_of(files: Iterable[tuple[str, str]]) -> str:
    """A provider's digest, from (path in a wheel, sha256 of the file)."""
    return sha256_bytes(canonical_json({path: digest for path, digest in files if not path.partition("/")[0].endswith(".dist-info")}))


def counts(path: str) -> bool:
    """Whether a file is of a distribution's wheel, and was not written by installers or by Python."""
    parts = PurePosixPath(path).parts
    if ".." in parts or "__pycache__" in parts or path.startswith("/") or path.endswith(".pyc"):
        return False
    return not (len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] in _OF_INSTALLERS)


def import_name(module: ModuleType) -> str:
    """The name by which another process can import a module: of a script or a file that was loaded by its path, the file's."""
    file = getattr(module, "__file__", None)
    name = module.__name__
    if file is not None and "." not in name and Path(file).stem not in (name, "__init__"):
        return Path(file).stem
    return name


def module_of_file(file: str) -> ModuleType | None:
    """The imported module whose source a file is."""
    return next((module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == file), None)


def provider_of(module: ModuleType) -> Provider | None:
    """What provides an imported module; None for what has no file."""
    named = getattr(module, "__file__", None)
    if named is None:
        return None
    file, name = Path(named), import_name(module)
    for known in distributions_with(name):
        installed = distribution(known)
        files = {str(path): Path(str(installed.locate_file(path))) for path in installed.files or () if counts(str(path))}
        same = any(each.name == file.name and each.resolve() == file.resolve() for each in files.values())
        if same and any(path.endswith(".dist-info/METADATA") for path in files):
            return Provider(installed.metadata["Name"], installed.version, files)
    loose = _beside(name, file)
    in_place = _editable(file)
    if in_place is not None:
        return Provider(in_place.metadata["Name"], in_place.version, loose, in_place.read_text("METADATA"))
    return Provider(None, None, loose)


def distributions_with(module: str) -> Sequence[str]:
    """The names of the installed distributions that a module's outermost package comes from."""
    places = tuple((place, Path(place).stat().st_mtime_ns) for place in sys.path if Path(place).is_dir())
    return _by_package(places).get(module.partition(".")[0], ())


@cache
def _by_package(places: tuple[tuple[str, int], ...]) -> Mapping[str, Sequence[str]]:
    """`packages_distributions()`, which reads a file of each distribution, for as long as nothing is installed in these places."""
    return packages_distributions()


def installed_version(name: str) -> str | None:
    """The version of a distribution that is installed here, if any."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _editable(file: Path) -> Distribution | None:
    """The distribution that is installed in place from a folder above a file."""
    for installed in distributions():
        url = json.loads(installed.read_text("direct_url.json") or "{}")
        if url.get("dir_info", {}).get("editable") and Path(unquote(urlparse(url["url"]).path)) in file.parents:
            return installed
    return None


def _beside(name: str, file: Path) -> dict[str, Path]:
    """The files of the outermost package of a module, or the module's own; folders without `__init__.py` may hold anything."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = sys.modules.get(".".join(parts[:end]))
        start = getattr(package, "__file__", None)
        if start is not None and Path(start).name == "__init__.py":
            root, prefix = Path(start).parent, "/".join(parts[:end])
            found = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
            visible = {path: each for path, each in found.items() if not any(part.startswith(".") for part in path.split("/"))}
            return {f"{prefix}/{path}": each for path, each in visible.items() if counts(path)}
    return {"/".join([*parts[:-1], file.name]): file}
