"""Reading checkpoints: nothing is believed before its digest was seen, and only the chunks of what is asked for are read.

A checkpoint is read by intervals of buckets or of parameters, so that ranks of any number, under any plan for the same package,
find what they need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from trainload.capture.errors import CheckpointError
from trainload.launch.checkpoints.index import INDEX, CheckpointIndex, buffer_key, decode_index, flat_key, own_key, published, scalar_key
from trainload.launch.checkpoints.shard import CURE, ShardReader
from trainload.packaging.chunks import LastChunk
from trainload.sharding.plan import Bucket, Shard, Slot
from trainload.sharding.shares import read_share, read_whole


class Checkpoint:
    """A published checkpoint. `path`: its folder; `index`: what it holds."""

    __slots__ = ("_buckets", "_last", "_open", "_slots", "index", "path")

    def __init__(self, path: Path, index: CheckpointIndex) -> None:
        self.path, self.index = path, index
        self._buckets: dict[str, Bucket] = {bucket.name: bucket for bucket in index.buckets}
        self._slots: dict[str, tuple[Bucket, Slot]] = {slot.parameter: (bucket, slot) for bucket in index.buckets for slot in bucket.slots}
        self._open: dict[int, ShardReader] = {}
        self._last = LastChunk()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads the index. Raises: CheckpointError where it is missing or a bit of it has changed."""
        file = path / INDEX
        try:
            data = file.read_bytes()
        except OSError as error:
            raise CheckpointError("the index cannot be read", where=str(file), got=str(error), cure=CURE) from error
        return cls(path, decode_index(data, str(file)))

    def verify(self) -> None:
        """Reads every shard and compares its digests. Raises: CheckpointError, naming the first file that is not as it was written."""
        for number in range(len(self.index.files)):
            self._shard(number).check()

    def bucket_of(self, parameter: str) -> tuple[Bucket, Slot]:
        """Where a parameter lies in this checkpoint. Raises: CheckpointError where it has none of that name."""
        if parameter not in self._slots:
            raise CheckpointError(f"the checkpoint has no parameter {parameter!r}", where=str(self.path))
        return self._slots[parameter]

    def read_interval(self, bucket: str, entry: str, start: int, stop: int, tensor_index: int = 0) -> torch.Tensor:
        """Elements [start, stop) of a bucket's entry: (stop - start,), on CPU. `tensor_index`: of a bucket that the tensor axis divided,
        whose of its ranks.

        Raises: CheckpointError where there is no such interval, or a shard that holds part of it has changed.
        """
        length = self._buckets[bucket].length if bucket in self._buckets else -1
        if not 0 <= start <= stop <= length or entry not in self.index.entries.get(bucket, ()):
            raise CheckpointError(
                "the checkpoint has no such interval",
                where=str(self.path),
                expected=f"entries of {bucket!r}: {', '.join(self.index.entries.get(bucket, ()))}; length {length}",
                got=f"{entry!r} [{start}, {stop})",
            )
        first = self.index.first_shard(self._buckets[bucket])
        lanes = self.index.tensor_ranks if self._buckets[bucket].divided else 1
        parts = self.index.run_length // lanes
        each = length // parts
        pieces: list[torch.Tensor] = []
        at = start
        # An empty interval still reads an empty slice, for its dtype.
        while at < stop or not pieces:
            number = min(at // each, parts - 1) if each else 0
            end = min(stop, (number + 1) * each)
            shard = self._shard(first + number * lanes + tensor_index)
            pieces.append(shard.interval(flat_key(bucket, entry), at - number * each, end - number * each))
            at = end
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def parameter_interval(self, parameter: str, entry: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter's entry ("param", "exp_avg", ...): (stop - start,), on CPU. Raises: as `read_interval`."""
        bucket, slot = self.bucket_of(parameter)
        length = math.prod(self.shape(parameter))
        if not 0 <= start <= stop <= length:
            raise CheckpointError(
                "the parameter has no such interval", where=parameter, expected=f"within [0, {length})", got=f"[{start}, {stop})"
            )
        if not bucket.divided:
            return self.read_interval(bucket.name, entry, slot.offset + start, slot.offset + stop)

        def share(index: int, low: int, high: int) -> torch.Tensor:
            return self.read_interval(bucket.name, entry, slot.offset + low, slot.offset + high, index)

        return read_whole(share, slot.shape, self.index.tensor_shards[parameter], self.index.tensor_ranks, start, stop)

    def share_interval(self, parameter: str, entry: str, shard: Shard, ranks: int, index: int, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the share that rank `index` of a tensor axis has of a parameter's entry. Raises: as `read_interval`."""
        bucket, slot = self.bucket_of(parameter)
        if (self.index.tensor_shards.get(parameter), self.index.tensor_ranks) == (shard, ranks):
            return self.read_interval(bucket.name, entry, slot.offset + start, slot.offset + stop, index)

        def whole(low: int, high: int) -> torch.Tensor:
            return self.parameter_interval(parameter, entry, low, high)

        return read_share(whole, shard.share_shape(self.shape(parameter), ranks), shard, ranks, index, start, stop)

    def shape(self, parameter: str) -> tuple[int, ...]:
        """The shape of a whole parameter. Raises: CheckpointError where there is none of that name."""
        _, slot = self.bucket_of(parameter)
        shard = self.index.tensor_shards.get(parameter)
        return slot.shape if shard is None else shard.whole_shape(slot.shape, self.index.tensor_ranks)

    def scalars(self, bucket: str) -> dict[str, torch.Tensor]:
        """A bucket's 0-dim entries. Raises: CheckpointError where the shard that holds them has changed."""
        found = self.index.scalars.get(bucket, ())
        return {entry: self._shard(self.index.first_shard(self._buckets[bucket])).tensor(scalar_key(bucket, entry)) for entry in found}

    def own(self, parameter: str) -> dict[str, torch.Tensor]:
        """A parameter's entries that have shapes of their own. Raises: CheckpointError where the shard that holds them has changed."""
        bucket, _ = self.bucket_of(parameter)
        shard = self.index.first_shard(bucket)
        return {entry: self._shard(shard).tensor(own_key(parameter, entry)) for entry in self.index.own.get(parameter, ())}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name. Raises: CheckpointError where a shard that holds one has changed."""
        homes = {name: self.index.buffer_ranks.get(name, 0) * self.index.run_length for name in self.index.buffers}
        return {name: self._shard(number).tensor(buffer_key(name)) for name, number in homes.items()}

    def _shard(self, number: int) -> ShardReader:
        if number not in self._open:
            self._open[number] = ShardReader(self.path, self.index.files[number], self._last)
        return self._open[number]


@dataclass(frozen=True, slots=True)
class Usable:
    """The newest checkpoint that is whole, or None, and why newer ones are not (one line each, newest first)."""

    path: Path | None
    rejected: tuple[str, ...]


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest published checkpoint of a run, None where there is none.

    Raises: CheckpointError where its index has changed; `usable_checkpoint` goes on to an earlier one.
    """
    found = list(published(run_dir).values())
    return Checkpoint.open(found[-1]).path if found else None


def usable_checkpoint(run_dir: Path) -> Usable:
    """The newest checkpoint of a run whose index and shards are all as they were written. Reads all of its bytes."""
    rejected: list[str] = []
    for path in reversed(published(run_dir).values()):
        try:
            Checkpoint.open(path).verify()
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            return Usable(path, tuple(rejected))
    return Usable(None, tuple(rejected))
