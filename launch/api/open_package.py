"""Open a package by the path of its folder, or by its name in a store or registry."""

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
def open(
    path: str | Path, *, libraries: Libraries = MappingProxyType({}), trust_extensions: bool = False
) -> Package:
    """Open a package. Warns if operator libraries differ from those that it was made with.

    Args:
        path: path of the package's folder, or its name as STORE#LINE/RELEASE or oci://HOST/NAME:TAG.
            A named package is fetched into this machine's cache, and each node of a run fetches it
            into its own (docs/guides/store.md).
        libraries: custom operators that the package may call: namespace -> the module or Python
            file that registers the operators, which is imported, or None if they are registered
            already. Name only code that you trust.
        trust_extensions: True to load the operator libraries that the package contains, for
            namespaces that `libraries` does not name. This runs code of the package's author: use
            it only for packages that you trust.

    Example:
        package = trainload.open("gpt.tl")
        package = trainload.open("s3://models/store#gpt/2", libraries={"my_ops": "my_ops.py"})
    """
    source, folder = here(path)
    package = replace(
        open_with(folder, libraries, trust_extensions=trust_extensions), source=source
    )
    for warning in library_warnings(package, libraries):
        warnings.warn(warning, stacklevel=2)
    return package
