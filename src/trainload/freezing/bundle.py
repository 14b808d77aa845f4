"""`freeze --bundle-ops`: wheels of a package's operator libraries, built from installed files or
given, and tested in isolation.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainload.core.errors import PackageError, StorageError
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import OpLibraryEntry
from trainload.packaging.format.package_paths import EXTENSIONS
from trainload.packaging.libraries.op_libraries import (
    Libraries,
    modules_of,
    one_provider,
    spelled_library,
)
from trainload.packaging.libraries.providers import Provider
from trainload.packaging.libraries.wheels import (
    Wheel,
    fits,
    make_wheel,
    normalised,
    read_wheel,
    tags_of,
    unpack_wheel,
)

_STANDALONE_SCRIPT = """
import importlib, json, sys
folders, modules, operators = json.loads(sys.argv[1])
sys.path[:0] = folders
import torch
for module in modules:
    importlib.import_module(module)
schemas = {}
for name in operators:
    found = torch.ops
    for part in name.split(".")[2:]:
        found = getattr(found, part, None)
    schemas[name] = str(getattr(found, "_schema", None))
print(json.dumps(schemas))
"""
"""Code of a process that sees only the wheels and installed packages, not the user's folders."""


@dataclass(frozen=True, slots=True)
class GivenWheel:
    """A wheel from the user."""

    path: Path
    wheel: Wheel


def given_wheel(path: Path) -> GivenWheel:
    """Read and check a wheel.

    Raises:
        StorageError: the file cannot be read.
        PackageError: it is not a wheel.
    """
    try:
        with path.open("rb") as file:
            return GivenWheel(path, read_wheel(file, path.name))
    except OSError as error:
        raise StorageError(
            f"the wheel cannot be read: {error.strerror}", where=str(path)
        ) from error


@dataclass(frozen=True, slots=True)
class Bundler:
    """Writer of wheels of a package's operator libraries into the package: a
    `packaging.write.Bundle`.

    Attributes:
        given: wheels to use instead of built ones; a library may have several, for different kinds
            of machine.
        named: libraries that register the operators according to the user.
    """

    given: Sequence[GivenWheel]
    named: Libraries

    def __call__(self, manifest: Manifest, folder: Path) -> Mapping[str, OpLibraryEntry]:
        """Write the wheels into `folder`, and test them.

        Raises:
            PackageError: the library of some operators is unknown, a wheel belongs to no library or
                has another version, or a process that has only the wheels does not register the
                operators.
        """
        folder.mkdir()
        built: dict[str, Path] = {}
        entries: dict[str, OpLibraryEntry] = {}
        used_paths: set[Path] = set()
        for namespace, entry in manifest.op_libraries.items():
            matching_wheels = [each for each in self.given if _provides(each, entry)]
            used_paths |= {each.path for each in matching_wheels}
            for each in matching_wheels:
                if not (folder / each.path.name).exists():
                    shutil.copyfile(each.path, folder / each.path.name)
            paths = [folder / each.path.name for each in matching_wheels] or [
                self._build_wheel(namespace, manifest, folder, built)
            ]
            entries[namespace] = entry.model_copy(
                update={"wheels": tuple(sorted(f"{EXTENSIONS}/{path.name}" for path in paths))}
            )
        for each in self.given:
            if each.path not in used_paths:
                libraries = "; ".join(
                    f"{namespace}: {spelled_library(entry)}"
                    for namespace, entry in manifest.op_libraries.items()
                )
                raise PackageError(
                    "the wheel provides none of the operators that the graphs call",
                    where=str(each.path),
                    expected=libraries,
                )
        _check_standalone(manifest, entries, folder)
        return entries

    def _build_wheel(
        self, namespace: str, manifest: Manifest, folder: Path, built: dict[str, Path]
    ) -> Path:
        """Return the wheel of an imported library.

        For a library with several namespaces it is built once.
        """
        operators = sorted(
            name for name in manifest.ops if name.startswith(f"torch.ops.{namespace}.")
        )
        modules = modules_of(namespace, operators, self.named.get(namespace))
        provider: Provider | None = one_provider(modules)
        if provider is None:
            names = ", ".join(module.__name__ for module in modules)
            raise PackageError(
                f"cannot build a wheel of the library that registers the operators of {namespace}",
                where="--bundle-ops",
                expected="one distribution, or one module",
                got=names or "no known library",
                hint=(
                    f"Specify it: trainload --library {namespace}=MODULE freeze ..., or pass its"
                    " wheel: --wheel FILE."
                ),
            )
        if provider.digest not in built:
            built[provider.digest] = make_wheel(
                provider, manifest.op_libraries[namespace].modules[0].partition(".")[0], folder
            )
        return built[provider.digest]


def _provides(candidate: GivenWheel, entry: OpLibraryEntry) -> bool:
    """Return True if a wheel belongs to an operator library.

    Raises:
        PackageError: it does, but has another version.
    """
    if entry.distribution is None:
        return bool(entry.modules) and all(
            candidate.wheel.has_module(module) for module in entry.modules
        )
    if candidate.wheel.name != normalised(entry.distribution):
        return False
    if candidate.wheel.version != entry.version:
        raise PackageError(
            "the wheel has a different version from the library that the graphs were captured with",
            where=str(candidate.path),
            expected=f"{entry.distribution} {entry.version}",
            got=candidate.wheel.version,
            hint=(
                "Install the wheel's version and freeze again, or pass a wheel of the expected"
                " version."
            ),
        )
    return True


def _check_standalone(
    manifest: Manifest, libraries: Mapping[str, OpLibraryEntry], folder: Path
) -> None:
    """Check that wheels for this kind of machine register their operators in a process without the
    user's folders.
    """
    with tempfile.TemporaryDirectory() as place:
        folders, modules, operators = [], list[str](), list[str]()
        for namespace, entry in libraries.items():
            paths = [folder / Path(wheel).name for wheel in entry.wheels]
            path = next((path for path in paths if fits(tags_of(path.name))), None)
            if path is None:
                continue  # for other machines than this one
            if str(target := Path(place) / path.name) not in folders:
                with path.open("rb") as file:
                    unpack_wheel(file, path.name, target)
                folders.append(str(target))
            modules += entry.modules
            operators += [
                name for name in manifest.ops if name.startswith(f"torch.ops.{namespace}.")
            ]
        if not folders:
            return
        command = [
            sys.executable,
            "-I",
            "-c",
            _STANDALONE_SCRIPT,
            json.dumps([folders, modules, operators]),
        ]
        process = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    hint = "Bundle a self-contained wheel with --wheel FILE, or freeze without --bundle-ops."
    if process.returncode:
        last_line = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise PackageError(
            "the operator libraries cannot be imported from their wheels alone",
            where=", ".join(modules),
            got=last_line[:300],
            hint=hint,
        )
    schemas: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    for name, schema in schemas.items():
        if schema != manifest.ops[name]:
            raise PackageError(
                "the bundled wheels do not register this operator",
                where=name,
                expected=manifest.ops[name],
                got=schema,
                hint=hint,
            )
