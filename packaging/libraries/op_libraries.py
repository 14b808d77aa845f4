"""Libraries that register operators: named by the user or found among imported modules, and
recorded in the manifest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from trainload.core.canonical_json import sha256_file
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import KernelEntry, OpLibraryEntry
from trainload.packaging.graphs.torch_operators import registered_by, triton_kernels
from trainload.packaging.libraries.providers import (
    Provider,
    import_name,
    module_of_file,
    provider_of,
)

Libraries = Mapping[str, str | None]
"""Namespace -> module or path of a Python file that registers its operators; None: they are
registered already.
"""


def describe_libraries(
    operators: Iterable[str], namespaces: Iterable[str], user_libraries: Libraries
) -> dict[str, OpLibraryEntry]:
    """Return manifest entries, without wheels, of the libraries that register operators here.

    Args:
        operators: names of operators that graphs call; those of other namespaces are ignored.
        namespaces: namespaces that are not built in.
        user_libraries: libraries that the user named for some of them. They have been imported.

    Raises:
        PackageError: a file of a library cannot be read.
    """
    operator_names = list(operators)
    entries = {}
    for namespace in sorted(namespaces):
        library_operators = sorted(
            name for name in operator_names if name.startswith(f"torch.ops.{namespace}.")
        )
        modules = modules_of(namespace, library_operators, user_libraries.get(namespace))
        provider = one_provider(modules)
        entries[namespace] = OpLibraryEntry(
            distribution=provider.distribution if provider is not None else None,
            version=provider.version if provider is not None else None,
            digest=provider.digest if provider is not None else None,
            modules=tuple(sorted({import_name(module) for module in modules})),
            kernels=_kernel_entries(library_operators),
            wheels=(),
        )
    return entries


def modules_of(
    namespace: str, operators: Sequence[str], user_library: str | None
) -> tuple[ModuleType, ...]:
    """Return the imported modules that register the operators of a namespace; () if unknown.

    `user_library` is the module or file that registers them according to the user. Without it,
    torch is queried for each operator; if it knows nothing (C++ operators without any Python code),
    the module with the namespace's name is used, if it is imported.
    """
    if user_library is not None:
        user_module = (
            module_of_file(str(Path(user_library).absolute()))
            if user_library.endswith(".py")
            else sys.modules.get(user_library)
        )
        return () if user_module is None else (user_module,)
    modules: dict[str, ModuleType] = {}
    for name in operators:
        places = registered_by(name)
        module = next(
            (module for place in places if (module := _find_imported(place)) is not None), None
        )
        if module is not None:
            modules[module.__name__] = module
    if not modules and (module := sys.modules.get(namespace)) is not None:
        modules[namespace] = module
    return tuple(modules[name] for name in sorted(modules))


def one_provider(modules: Sequence[ModuleType]) -> Provider | None:
    """Return the provider of all of the modules; None if it is unknown, or if there are several."""
    providers = [provider_of(module) for module in modules]
    identified = [provider for provider in providers if provider is not None]
    if (
        not identified
        or len(identified) < len(providers)
        or len({(each.distribution, *sorted(each.files)) for each in identified}) > 1
    ):
        return None
    return identified[0]


def differences(manifest: Manifest, user_libraries: Libraries) -> list[str]:
    """Describe how the operator libraries imported here differ from those that a package was made
    with, a sentence for each.

    Args:
        manifest: the package's manifest.
        user_libraries: namespace -> library that registers its operators according to the user.
            Other namespaces are left out.

    Raises:
        PackageError: a file of a library cannot be read.
    """
    recorded = {
        namespace: entry
        for namespace, entry in manifest.op_libraries.items()
        if namespace in user_libraries and entry.digest is not None
    }
    current = describe_libraries(manifest.ops, recorded, user_libraries)
    sentences = []
    for namespace, was in recorded.items():
        now = current[namespace]
        if now.digest is None or now.digest == was.digest:
            continue
        if (now.distribution, now.version) != (was.distribution, was.version):
            before, after = spelled_library(was), spelled_library(now)
            sentences.append(
                f"the package was made with the operators {namespace} of {before}; here they come"
                f" from {after}"
            )
        else:
            sentences.append(
                f"the package was made with the operators {namespace} of {spelled_library(was)},"
                " whose files differ here"
            )
    return sentences


def spelled_library(entry: OpLibraryEntry) -> str:
    """Return the name of a library for messages: "my-ops 1.2", "the module operators", "a library
    that is not known".
    """
    if entry.distribution is not None:
        return " ".join(part for part in (entry.distribution, entry.version) if part)
    return f"the module {', '.join(entry.modules)}" if entry.modules else "an unknown library"


def _find_imported(place: str) -> ModuleType | None:
    return module_of_file(place) if place.endswith(".py") else sys.modules.get(place)


def _kernel_entries(operators: Iterable[str]) -> tuple[KernelEntry, ...]:
    functions: dict[str, Any] = {}
    for name in operators:
        for function in triton_kernels(name):
            functions[f"{function.__module__}:{function.__name__}"] = function
    return tuple(_kernel_entry(name, functions[name]) for name in sorted(functions))


def _kernel_entry(name: str, function: Any) -> KernelEntry:
    module = sys.modules.get(function.__module__)
    provider = provider_of(module) if module is not None else None
    file = getattr(module, "__file__", None)
    return KernelEntry(
        name=name,
        distribution=provider.distribution if provider is not None else None,
        version=provider.version if provider is not None else None,
        source=sha256_file(Path(file)) if file is not None else None,
    )
