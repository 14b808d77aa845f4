"""Another package as a source of weights."""

from __future__ import annotations

from pathlib import Path

import torch

from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.tensors.safetensors_file import TensorSpec
from trainload.packaging.tensors.weight_shards import WeightReader, stored_tensors
from trainload.packaging.weight_sources.weight_source import SourceFile


class PackageSource:
    """`WeightSource` of a package's weights, each byte of which is checked against its digest.

    Args:
        where: name of the package, for messages.
        path: its folder.
        manifest: its manifest, which has been checked.
        digest: digest of the manifest.
        size: size of the manifest in bytes.

    Raises:
        IntegrityError: the package's lists of weights are damaged.
    """

    def __init__(self, where: str, path: Path, manifest: Manifest, digest: str, size: int) -> None:
        self._where = where
        self._reader = WeightReader(path, manifest)
        self._file = SourceFile(name=MANIFEST, size=size, state=digest)
        self._tensors = {spec.name: spec for part in stored_tensors(manifest) for spec in part}

    @property
    def where(self) -> str:
        """Name of the package."""
        return self._where

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """See `WeightSource.tensors`."""
        return self._tensors

    def files(self, _names: set[str]) -> tuple[SourceFile, ...]:
        """Return the manifest, which has the digests of the others; see `WeightSource.files`."""
        return (self._file,)

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource.slice`."""
        return self._reader.slice(name, start, stop)
