"""Weights that a run is given at its launch, in place of its package's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import PolicyError, WeightsError
from trainload.core.storage.places import is_url
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.fetching import fetched, pinned
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import GivenWeightsEntry
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.initialization.initial_file import read_initialization
from trainload.packaging.initialization.initial_source import InitialSource
from trainload.packaging.package import Package, read_manifest
from trainload.packaging.signatures.policy import Policy, check_policies, find_policies
from trainload.packaging.stores.references import is_oci, is_reference
from trainload.packaging.tensors.weight_shards import WeightReader, stored_tensors
from trainload.packaging.weight_sources.dcp_source import METADATA, DcpSource
from trainload.packaging.weight_sources.fitting import first_lines, fitted, grouped
from trainload.packaging.weight_sources.package_source import PackageSource
from trainload.packaging.weight_sources.replaced_weights import (
    AddedValues,
    OwnValues,
    ReplacedWeights,
)
from trainload.packaging.weight_sources.safetensors_source import SafetensorsSource
from trainload.packaging.weight_sources.source_files import files_at
from trainload.packaging.weight_sources.weight_source import INIT, SourceFile, WeightSource

Kind = Literal["release", "package", "checkpoint", "files", "init"]


class GivenWeights(BaseModel):
    """Weights from a source, as they were when the run was launched.

    Attributes:
        kind: a package in a store or registry, a package's folder, a checkpoint of
            torch.distributed.checkpoint, safetensors files, or the first values that the package
            itself computes ("init").
        source: path, URL or name of the source.
        files: the source's files that are read.
        names: parameter or buffer -> its name in the source. Those that are not here keep the
            package's values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    source: str
    files: tuple[SourceFile, ...]
    names: dict[str, str]
    seed: int | None = None
    """Seed of first values."""

    def entry(self) -> GivenWeightsEntry:
        """Return the record of these weights in a package that was trained from them."""
        files = [each.model_dump(mode="json") for each in self.files]
        is_path = self.kind != "init" and not is_url(self.source)
        return GivenWeightsEntry(
            kind=self.kind,
            source=Path(self.source).name if is_path else self.source,
            digest=sha256_bytes(canonical_json({"files": files, "seed": self.seed})),
        )


def given_weights(
    package: Package, source: str, policies: Sequence[Policy], *, partial: bool, seed: int | None
) -> GivenWeights:
    """Check by their headers that weights fit a package.

    Args:
        package: the package as it was frozen.
        source: a safetensors file, a folder of them, or a checkpoint of
            torch.distributed.checkpoint, at an absolute path or URL; the folder of a package; a
            package in a store; or INIT.
        policies: policies that the source must satisfy.
        partial: see `fitted`.
        seed: seed of the random numbers of first values; None: the package's.

    Raises:
        WeightsError: there are none, or they do not fit; with a table of the tensors.
        PolicyError: a policy forbids their use.
        StorageError: they cannot be reached.
    """
    if source == INIT:
        names = _initialised(package, partial=partial)
        seed = package.recipe.seed if seed is None else seed
        return GivenWeights(kind="init", source=INIT, files=(), names=names, seed=seed)
    kind = _kind_of(source)
    if kind == "release":
        source, _ = pinned(source)
    opened = _opened(kind, source, policies)
    computed = _tables(package) if package.manifest.abstract is not None else ()
    names = fitted(package.manifest, opened, partial=partial, computed=computed)
    files = opened.files(set(names.values()))
    return GivenWeights(kind=kind, source=source, files=files, names=names)


def with_given(
    package: Package, given: GivenWeights | None, policies: Sequence[Policy] = ()
) -> Package:
    """Return a package whose weights are those that a run was given.

    They are opened when they are read first.

    Args:
        package: the run's package, frozen or with changes.
        given: the weights; None: the package's own.
        policies: policies of the run; those of this machine are added.
    """
    if given is None:
        return package
    weights = ReplacedWeights(
        package.manifest,
        lambda: _own_values(package),
        lambda: _source_of(package, given, policies),
        given.names,
    )
    return replace(package, given=weights)


def _own_values(package: Package) -> OwnValues:
    """Return the values of a package that its source of weights lacks."""
    manifest = package.manifest
    if manifest.abstract is None:
        return package.stored_weights
    if not manifest.abstract.added:
        return _first_values(package, 0)  # only tables may be missing, which depend on no seed
    added = WeightReader(package.path, manifest)
    return AddedValues(added, None if not _tables(package) else _first_values(package, 0))


def _first_values(package: Package, seed: int) -> InitialSource:
    initialization = read_initialization(package.path, package.manifest)
    assert initialization is not None, "it was there when the weights were checked"
    return InitialSource(initialization, seed)


def _tables(package: Package) -> tuple[str, ...]:
    """Return the tensors that a package computes without random numbers."""
    initialization = read_initialization(package.path, package.manifest)
    if initialization is None:
        return ()
    return tuple(name for name, value in initialization.values.items() if not value.draws)


def _source_of(package: Package, given: GivenWeights, policies: Sequence[Policy]) -> WeightSource:
    """Open the source that a run was given."""
    if given.kind != "init":
        return _opened(given.kind, given.source, (*policies, *find_policies()), given.files)
    assert given.seed is not None
    return _first_values(package, given.seed)


def _initialised(package: Package, *, partial: bool) -> dict[str, str]:
    """Return the names of the parameters and buffers whose first values a package computes.

    Raises:
        WeightsError: it does not compute all of them, unless `partial`; with a table.
    """
    initialization = read_initialization(package.path, package.manifest)
    if initialization is None:
        raise WeightsError(
            "the package has no graphs of its model's first values",
            where=INIT,
            hint=(
                "Freeze a function that constructs the model (freeze FILE.py:FUNCTION), or name"
                " another source of weights."
            ),
        )
    specs = [spec.name for part in stored_tensors(package.manifest) for spec in part]
    without = [name for name in specs if name not in initialization.values]
    if without and not (partial and package.manifest.abstract is None):
        reasons = [
            (name, initialization.missing.get(name, "it was added to the package"))
            for name in without
        ]
        raise WeightsError(
            f"{len(without)} of {len(specs)} parameters and buffers cannot be initialised",
            where=INIT,
            hint=(
                "Name another source of weights."
                if package.manifest.abstract is not None
                else "Pass --partial-weights to keep the package's values of these."
            ),
            table=first_lines([f"{names}: {reason}" for names, reason in grouped(reasons)]),
        )
    return {name: name for name in specs if name in initialization.values}


def _kind_of(source: str) -> Kind:
    if is_oci(source) or (is_reference(source) and "#" in source):
        return "release"
    folder = Path(source)
    if (folder / MANIFEST).is_file() and (folder / "weights").is_dir():
        return "package"
    return "checkpoint" if files_at(source).size(METADATA) is not None else "files"


def _opened(
    kind: Kind, source: str, policies: Sequence[Policy], known: Sequence[SourceFile] = ()
) -> WeightSource:
    """Open a source, whose files must be `known`, if any are passed."""
    if kind == "checkpoint" or kind == "files":
        _check_unsigned(source, policies)
        return (DcpSource if kind == "checkpoint" else SafetensorsSource)(source, known)
    digest = known[0].state if known else None
    path = Path(source)
    if kind == "release":
        digest = digest or pinned(source)[1]
        path = fetched(source, default_cache_dir(), digest)
    if policies:
        check_policies(path, policies)
    content = read_manifest(path)
    found = sha256_bytes(content)
    if digest not in (None, found):
        raise WeightsError(
            "the package with the weights has changed since the run was launched",
            where=source,
            expected=digest or "",
            got=found,
            hint="Restore it, or launch a new run.",
        )
    manifest = Manifest.from_bytes(content, MANIFEST)
    if manifest.abstract is not None:
        raise WeightsError("a package without weights gives none", where=source)
    return PackageSource(source, path, manifest, found, len(content))


def _check_unsigned(source: str, policies: Sequence[Policy]) -> None:
    """Check that no policy requires signatures, which plain files do not have."""
    for policy in policies:
        if policy.require_signature:
            raise PolicyError(
                f"the policy {policy.source} forbids weights that nobody has signed",
                where=source,
                expected="a package, signed as the policy requires",
                got="files without signatures",
                hint="Write a package with them (trainload fill), and have it signed.",
            )
