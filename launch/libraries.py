"""Operators of other libraries: imported because the package's owner says so, never because the package does."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainload.capture.errors import IntegrityError, PackageError
from trainload.packaging.policy import Policy, demand_policies, find_policies
from trainload.packaging.read import Package, open_package

Libraries = Mapping[str, str | None]
"""Namespace of operators -> what registers them: a module, or the path of a Python file; None: they are registered already."""


def open_with(path: Path, libraries: Libraries) -> Package:
    """Opens a package that may call the operators of these libraries, which are imported first.

    Raises:
        PackageError: a library cannot be imported; otherwise as `open_package`.
    """
    for namespace, location in libraries.items():
        if location is not None:
            _import(namespace, location)
    return open_package(path, namespaces=frozenset(libraries))


def open_for_run(path: Path, libraries: Libraries, policies: Sequence[Policy], digest: str | None) -> Package:
    """Opens a package that is about to be run, here, by whoever asks.

    Args:
        path: its folder.
        libraries: as for `open_with`. Nothing is imported before the policies were asked.
        policies: of who launched the run; those that hold in this process are added.
        digest: what the package's must be; None: it is not known.

    Raises:
        PolicyError: a policy does not let it be run.
        IntegrityError: it is another package; otherwise as `open_with`.
    """
    held = tuple(dict.fromkeys((*policies, *find_policies())))
    allowed = demand_policies(path, held) if held else digest
    package = open_with(path, libraries)
    for expected in (digest, allowed):
        if expected is not None and package.digest != expected:
            raise IntegrityError(
                "the package is another one than the run was launched with",
                where=str(path),
                expected=expected,
                got=package.digest,
                cure="Put the package back, or launch a new run.",
            )
    return package


def demand_run(package: Package, policies: Sequence[Policy]) -> None:
    """Demands that an open package may be run.

    Raises:
        PolicyError: a policy does not let it be run.
        IntegrityError: it was replaced since it was opened.
    """
    if policies and (now := demand_policies(package.path, policies)) != package.digest:
        raise IntegrityError("the package was replaced since it was opened", where=str(package.path), expected=package.digest, got=now)


def absolute(libraries: Libraries) -> dict[str, str | None]:
    """The same libraries, files by their absolute paths: workers run in other folders."""
    return {
        namespace: str(Path(location).absolute()) if location is not None and location.endswith(".py") else location
        for namespace, location in libraries.items()
    }


def _import(namespace: str, location: str) -> None:
    where = f"the library of {namespace}"
    if not location.endswith(".py"):
        try:
            importlib.import_module(location)
        except ImportError as error:
            raise PackageError(
                f"it cannot be imported: {error}", where=where, got=location, cure="Install it on every node, or give a .py file."
            ) from error
        return
    path = Path(location).absolute()
    loaded = sys.modules.get(path.stem)
    if getattr(loaded, "__file__", None) == str(path):
        return
    name = path.stem if loaded is None else f"_trainload_library_{path.stem}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise PackageError("there is no such file", where=where, got=str(path), cure="Put it where every node finds it.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
