"""Import custom operator libraries, only if the package's user requests it, never because the
package does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from trainload.core.errors import IntegrityError, PackageError
from trainload.launching.node.extensions import load_extensions, may_load_extensions
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import EXTENSIONS, MANIFEST
from trainload.packaging.libraries.op_libraries import Libraries, differences
from trainload.packaging.package import Package, open_package, read_manifest
from trainload.packaging.signatures.policy import (
    Policy,
    check_policies,
    find_policies,
    which_trusts_extensions,
)


def open_with(path: Path, libraries: Libraries, *, trust_extensions: bool = False) -> Package:
    """Import operator libraries, then open a package that may call their operators.

    Args:
        path: the package's folder.
        libraries: libraries that the user names.
        trust_extensions: True to load the operator libraries that the package contains, for
            namespaces that the user does not name.

    Raises:
        PackageError: a library cannot be imported, a wheel cannot be loaded, or an error of
            `open_package`.
    """
    return open_package(
        path, namespaces=import_for(path, libraries, trust_extensions=trust_extensions)
    )


def import_for(
    path: Path, libraries: Libraries, *, trust_extensions: bool = False
) -> frozenset[str]:
    """Do the imports of `open_with`, and return the namespaces whose operators the package's graphs
    may call.

    Raises:
        PackageError: a library cannot be imported, or a wheel cannot be loaded.
    """
    import_libraries(libraries)
    brought = frozenset[str]()
    if (path / EXTENSIONS).is_dir():
        manifest = Manifest.from_bytes(read_manifest(path), MANIFEST)
        if may_load_extensions(path, manifest, trusted=trust_extensions) is not None:
            # A namespace without a location is registered already, or else by the package's wheel.
            brought = load_extensions(
                path,
                manifest,
                {name for name, location in libraries.items() if location is not None},
            )
    return frozenset(libraries) | brought


def import_libraries(libraries: Libraries) -> None:
    """Import the libraries that the user names. Raises PackageError if one cannot be imported."""
    for namespace, location in libraries.items():
        if location is not None:
            _import_library(namespace, location)


def library_warnings(package: Package, libraries: Libraries) -> list[str]:
    """Return the differences between this process's operator libraries and those that the package
    was made with.

    See `op_libraries.differences`.
    """
    return differences(package.manifest, {name: libraries.get(name) for name in package.namespaces})


def open_for_run(
    path: Path,
    libraries: Libraries,
    policies: Sequence[Policy],
    digest: str | None,
    *,
    trust_extensions: bool = False,
) -> Package:
    """Check policies, then open a package that is to be run in this process.

    Args:
        path: the package's folder.
        libraries: libraries that the user names. They are imported only after the policies accept
            the package.
        policies: policies of the launch; those of this process are added.
        digest: required digest of the package; None if it is not known.
        trust_extensions: True to load the operator libraries that the package contains. A policy
            that allows this for signed packages has the same effect.

    Raises:
        PolicyError: a policy rejects the package.
        IntegrityError: it is another package.
        PackageError: as for `open_with`.
    """
    all_policies = tuple(dict.fromkeys((*policies, *find_policies())))
    allowed = check_policies(path, all_policies) if all_policies else digest
    trusted = trust_extensions or (
        allowed is not None and which_trusts_extensions(all_policies, allowed) is not None
    )
    package = open_with(path, libraries, trust_extensions=trusted)
    for expected in (digest, allowed):
        if expected is not None and package.digest != expected:
            raise IntegrityError(
                "this is not the package that the run was launched with",
                where=str(path),
                expected=expected,
                got=package.digest,
                hint="Restore the package, or launch a new run.",
            )
    return package


def check_runnable(package: Package, policies: Sequence[Policy]) -> None:
    """Check that policies allow an open package to be run.

    Raises:
        PolicyError: a policy rejects the package.
        IntegrityError: the package was replaced since it was opened.
    """
    if policies and (now := check_policies(package.path, policies)) != package.digest:
        raise IntegrityError(
            "the package was replaced since it was opened",
            where=str(package.path),
            expected=package.digest,
            got=now,
        )


def absolute(libraries: Libraries) -> dict[str, str | None]:
    """Return the libraries with absolute paths of files, since workers run in other folders."""
    return {
        namespace: (
            str(Path(location).absolute())
            if location is not None and location.endswith(".py")
            else location
        )
        for namespace, location in libraries.items()
    }


def _import_library(namespace: str, location: str) -> None:
    where = f"the library of {namespace}"
    if not location.endswith(".py"):
        try:
            importlib.import_module(location)
        except ImportError as error:
            raise PackageError(
                f"it cannot be imported: {error}",
                where=where,
                got=location,
                hint="Install it on every node, or pass a .py file.",
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
        raise PackageError(
            "there is no such file",
            where=where,
            got=str(path),
            hint="Put it at a path that every node can read.",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
