"""A package's weights, where some or all of them are from a source."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch

from trainload.core.errors import WeightsError, printable
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.tensors.safetensors_file import DTYPES, TensorSpec, bytes_of
from trainload.packaging.tensors.weight_shards import WeightReader, stored_tensors
from trainload.packaging.weight_sources.fitting import is_exact
from trainload.packaging.weight_sources.weight_source import WeightSource


class OwnValues(Protocol):
    """Values of the package itself: a `WeightReader`, or what it computes."""

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightReader.slice`."""

    def check_headers(self) -> None:
        """See `WeightReader.check_headers`."""


class AddedValues:
    """`OwnValues` of an abstract package to which a launch has added parameters.

    Args:
        added: values of these.
        others: what the package computes; None if it computes nothing.
    """

    def __init__(self, added: WeightReader, others: OwnValues | None) -> None:
        self._added, self._others = added, others

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightReader.slice`."""
        if name in self._added or self._others is None:
            return self._added.slice(name, start, stop)
        return self._others.slice(name, start, stop)

    def check_headers(self) -> None:
        """See `WeightReader.check_headers`."""
        self._added.check_headers()


class ReplacedWeights:
    """Reader of a package's parameters and buffers, with the interface of `WeightReader`.

    Args:
        manifest: manifest of the package.
        own: opens the package's own weights, when a tensor that the source lacks is read first.
        source: opens the source, when a tensor of it is read first.
        names: parameter or buffer -> its name in the source (`fitted`).
    """

    def __init__(
        self,
        manifest: Manifest,
        own: Callable[[], OwnValues],
        source: Callable[[], WeightSource],
        names: Mapping[str, str],
    ) -> None:
        self._specs = {spec.name: spec for part in stored_tensors(manifest) for spec in part}
        self._aliases = {p.name: p.alias_of for p in manifest.parameters if p.alias_of is not None}
        self._open_own = own
        self._open_source = source
        self._opened: WeightSource | None = None
        self._given = dict(names)
        self._digest = hashlib.sha256()
        self._bytes = 0

    @cached_property
    def _own(self) -> OwnValues:
        return self._open_own()

    @property
    def _source(self) -> WeightSource:
        if self._opened is None:
            self._opened = self._open_source()
        return self._opened

    def begin(self) -> None:
        """Begin to count what is read, from files that are compared with their records again."""
        self._opened = None
        self._digest, self._bytes = hashlib.sha256(), 0

    @property
    def taken(self) -> dict[str, Any]:
        """Summary of the reads from the source since `begin`.

        `source`; `tensors` that are there, and those that are `kept`; `bytes`; and the `sha256`, in
        hex, of all reads: of tensors' names, ranges of elements, and their bytes.
        """
        return {
            "source": self._source.where,
            "tensors": len(self._given.keys() & self._specs.keys()),
            "kept": len(self._specs.keys() - self._given.keys()),
            "bytes": self._bytes,
            "sha256": self._digest.hexdigest(),
        }

    def names(self) -> tuple[str, ...]:
        """See `WeightReader.names`."""
        return tuple(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def dtype(self, name: str) -> torch.dtype:
        """See `WeightReader.dtype`."""
        return DTYPES[self._find(name).dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightReader.shape`."""
        return self._find(name).shape

    def tensor(self, name: str) -> torch.Tensor:
        """See `WeightReader.tensor`. Also raises what `WeightSource` raises."""
        shape = self._find(name).shape
        return self.slice(name, 0, math.prod(shape)).reshape(shape)

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightReader.slice`. Also raises what `WeightSource` raises."""
        spec = self._find(name)
        given = self._given.get(spec.name)
        if given is None:
            return self._own.slice(spec.name, start, stop)
        there = self._source.tensors.get(given)
        if there is None or there.shape != spec.shape or not is_exact(there.dtype, spec.dtype):
            raise WeightsError(
                f"{printable(given)} is not what it was when the run was launched",
                where=self._source.where,
                hint="Restore the files, or launch a new run.",
            )
        found = self._source.slice(given, start, stop)
        self._digest.update(f"{given} {start} {stop}\n".encode())
        self._digest.update(bytes_of(found))
        self._bytes += found.nbytes
        return found.to(DTYPES[spec.dtype])

    def check_headers(self) -> None:
        """See `WeightReader.check_headers`: the source's were checked when it was fitted."""
        if self._given.keys() < self._specs.keys():
            self._own.check_headers()

    def _find(self, name: str) -> TensorSpec:
        return self._specs[self._aliases.get(name, name)]
