"""Opening a package by its folder, or by its name in a store or registry."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from trainload.core.arguments import check_arguments
from trainload.core.errors import StorageError
from trainload.launching.node.fetching import here
from trainload.launching.node.libraries import library_warnings, open_with
from trainload.packaging.libraries.op_libraries import Libraries
from trainload.packaging.package import Package


@check_arguments(StorageError)
def open(path: str | Path, *, libraries: Libraries = MappingProxyType({}), trust_extensions: bool = False) -> Package:
    """Open a package. Warns if operator libraries differ from those that it was made with.

    Args:
        path: its folder; or STORE#LINE/RELEASE, or oci://HOST/NAME:TAG: then it is fetched into this machine's cache, and a run of it into
            that of each node (docs/store.md).
        libraries: namespaces of other libraries' operators that it may call -> the module or Python file that registers them, which is
            imported; None: they are registered already. Name only what you trust.
        trust_extensions: whether to load the operator libraries that the package brings, where `libraries` names no others. That runs code
            of its maker's: say so only of packages that you trust.
    """
    source, folder = here(path)
    package = replace(open_with(folder, libraries, trust_extensions=trust_extensions), source=source)
    for warning in library_warnings(package, libraries):
        warnings.warn(warning, stacklevel=2)
    return package
