"""Weights that a run is given at its launch, in place of its package's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import WeightsError
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.fetching import fetched, pinned
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.package import Package, read_manifest
from trainload.packaging.stores.references import is_oci, is_reference
from trainload.packaging.weight_sources.dcp_source import METADATA, DcpSource
from trainload.packaging.weight_sources.fitting import fitted
from trainload.packaging.weight_sources.package_source import PackageSource
from trainload.packaging.weight_sources.replaced_weights import ReplacedWeights
from trainload.packaging.weight_sources.safetensors_source import SafetensorsSource
from trainload.packaging.weight_sources.source_files import bounded
from trainload.packaging.weight_sources.weight_source import SourceFile, WeightSource


class GivenWeights(BaseModel):
    """Weights from a source, as they were when the run was launched.

    Attributes:
        source: path, URL or name of the source.
        files: the source's files that are read.
        names: parameter or buffer -> its name in the source. Those that are not here keep the
            package's values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    files: tuple[SourceFile, ...]
    names: dict[str, str]


def given_weights(package: Package, source: str, *, partial: bool) -> GivenWeights:
    """Check by their headers that weights fit a package.

    Args:
        package: the package as it was frozen.
        source: a safetensors file or a folder of them, at an absolute path or URL; the folder of a
            package; or a package in a store.
        partial: see `fitted`.

    Raises:
        WeightsError: there are none, or they do not fit; with a table of the tensors.
        StorageError: they cannot be reached.
    """
    if _is_release(source):
        source, _ = pinned(source)
    opened = _opened(source)
    names = fitted(package.manifest, opened, partial=partial)
    return GivenWeights(source=source, files=opened.files(set(names.values())), names=names)


def with_given(package: Package, given: GivenWeights | None) -> Package:
    """Return a package whose weights are those that a run was given.

    They are opened when they are read first.

    Args:
        package: the run's package, frozen or with changes.
        given: the weights; None: the package's own.
    """
    if given is None:
        return package
    weights = ReplacedWeights(
        package.manifest,
        lambda: package.stored_weights,
        lambda: _opened(given.source, given.files),
        given.names,
    )
    return replace(package, given=weights)


def _opened(source: str, known: Sequence[SourceFile] = ()) -> WeightSource:
    """Open a source, whose files must be `known`, if any are passed."""
    if not _is_release(source) and not (Path(source) / MANIFEST).is_file():
        is_dcp = bounded(source).size(METADATA) is not None
        return (DcpSource if is_dcp else SafetensorsSource)(source, known)
    path, digest = Path(source), known[0].state if known else None
    if _is_release(source):
        source, digest = (source, digest) if digest is not None else pinned(source)
        path = fetched(source, default_cache_dir(), digest)
    content = read_manifest(path)
    found = sha256_bytes(content)
    if digest not in (None, found):
        raise WeightsError(
            "the package with the weights has changed since the run was launched",
            where=source,
            expected=digest,
            got=found,
            hint="Restore it, or launch a new run.",
        )
    manifest = Manifest.from_bytes(content, MANIFEST)
    if manifest.abstract is not None:
        raise WeightsError("a package without weights gives none", where=source)
    return PackageSource(source, path, manifest, found, len(content))


def _is_release(source: str) -> bool:
    """Return True for a package in a store or registry. Other URLs are of safetensors files."""
    return is_oci(source) or (is_reference(source) and "#" in source)
