"""Memory of the tensors that are alive, by storage."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainload.launching.profiling.profile_result import Kind


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a storage.

    Attributes:
        kind: its use.
        module: path of the user's module that made it; "" if none did.
        bucket: bucket to whose parameters, gradients or state it belongs; "" for none.
    """

    kind: Kind
    module: str = ""
    bucket: str = ""


@dataclass(slots=True)
class _Storage:
    origin: Origin
    bytes: int
    tensors: int = 0


class LiveTensors:
    """Storages of a device that are alive, of the tensors that it has seen.

    A storage is alive as long as a tensor of Python holds it; views count once. What an operator
    allocates and frees within its call is not seen.

    Args:
        device: the device.
        snapshot_at: value of `seen` at which a snapshot is taken; None for no snapshot.

    Attributes:
        seen: number of tensors that it has seen.
        bytes: bytes of all storages that are alive.
        peak: its maximum.
        peak_at: value of `seen` when it was reached first.
        most: kind -> maximum of the bytes of its storages.
        snapshot: origin and bytes of each storage that was alive at `snapshot_at`.
    """

    def __init__(self, device: torch.device, snapshot_at: int | None = None) -> None:
        self._device, self._snapshot_at = device.type, snapshot_at
        self._storages: dict[int, _Storage] = {}
        self._references: dict[int, weakref.ref[Tensor]] = {}
        self._by_kind: Counter[Kind] = Counter()
        self.seen = self.bytes = self.peak = self.peak_at = 0
        self.most: Counter[Kind] = Counter()
        self.snapshot: tuple[tuple[Origin, int], ...] = ()

    def see(self, value: Tensor, origin: Origin) -> None:
        """Take a tensor; the origin of a storage that is known does not change."""
        if value.device.type != self._device or value.layout is not torch.strided:
            return
        storage = value.untyped_storage()
        size, place = storage.nbytes(), storage.data_ptr()
        if not size:
            return
        self.seen += 1
        known = self._storages.get(place)
        if known is None:
            known = self._storages[place] = _Storage(origin, size)
            self._change(origin.kind, size)
        known.tensors += 1
        reference = weakref.ref(value, partial(self._forget, place))
        self._references[id(reference)] = reference
        if self.bytes > self.peak:
            self.peak, self.peak_at = self.bytes, self.seen
        if self.seen == self._snapshot_at:
            self.snapshot = tuple(self._alive())

    def _alive(self) -> Iterator[tuple[Origin, int]]:
        for storage in self._storages.values():
            yield storage.origin, storage.bytes

    def _forget(self, place: int, reference: weakref.ref[Tensor]) -> None:
        del self._references[id(reference)]
        storage = self._storages[place]
        storage.tensors -= 1
        if not storage.tensors:
            del self._storages[place]
            self._change(storage.origin.kind, -storage.bytes)

    def _change(self, kind: Kind, size: int) -> None:
        self.bytes += size
        self._by_kind[kind] += size
        self.most[kind] = max(self.most[kind], self._by_kind[kind])
