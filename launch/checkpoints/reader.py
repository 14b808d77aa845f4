"""Read checkpoints. Every byte is checked against its digest, and only the chunks that are needed
are read.

A checkpoint is read by intervals of buckets or parameters, so any number of ranks, under any plan
for the same package, can load their parts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from trainload.core.errors import CheckpointError, StorageError, UnsafePackageError
from trainload.core.storage.places import Where
from trainload.launching.checkpoints.checkpoint_files import files_at
from trainload.launching.checkpoints.checkpoint_place import CheckpointPlace
from trainload.launching.checkpoints.index import (
    INDEX,
    CheckpointIndex,
    buffer_key,
    decode_index,
    flat_key,
    own_key,
    scalar_key,
)
from trainload.launching.checkpoints.shard import CURE, ShardReader
from trainload.launching.node.process_groups import gathered
from trainload.packaging.tensors.chunks import LastChunk
from trainload.packaging.tensors.safetensors_file import to_fill
from trainload.sharding.plans.plan import Bucket, Shard, Slot
from trainload.sharding.rewriting.shares import fill_share, fill_whole

T = TypeVar("T")
_PAUSE_SECONDS = 1.0


class Checkpoint:
    """A published checkpoint.

    Attributes:
        path: its folder or URL.
        index: its index.
    """

    __slots__ = ("_buckets", "_files", "_last", "_open", "_slots", "index", "path")

    def __init__(self, path: Where, index: CheckpointIndex) -> None:
        self.path, self.index = path, index
        self._files = files_at(path)
        self._buckets: dict[str, Bucket] = {bucket.name: bucket for bucket in index.buckets}
        self._slots: dict[str, tuple[Bucket, Slot]] = {
            slot.parameter: (bucket, slot) for bucket in index.buckets for slot in bucket.slots
        }
        self._open: dict[int, ShardReader] = {}
        self._last = LastChunk()

    @classmethod
    def open(cls, path: Where) -> Self:
        """Open a checkpoint by reading its index.

        Raises:
            CheckpointError: the index is missing, or has changed since it was written.
            StorageError: a URL cannot be reached.
        """
        file = f"{path}/{INDEX}"
        try:
            data = files_at(path).read(INDEX)
        except (OSError, UnsafePackageError) as error:
            raise CheckpointError(
                "the index cannot be read", where=file, got=str(error), hint=CURE
            ) from error
        return cls(path, decode_index(data, file))

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Check the digests of all shards; with several ranks, those of the shards of rank `rank`
        of `world`.

        Raises:
            CheckpointError: a shard has changed since it was written; names the first one.
        """
        for number in range(rank, len(self.index.files), world):
            self._shard(number).check()

    def bucket_of(self, parameter: str) -> tuple[Bucket, Slot]:
        """Return the bucket and slot of a parameter.

        Raises CheckpointError if the parameter is unknown.
        """
        if parameter not in self._slots:
            raise CheckpointError(
                f"the checkpoint has no parameter {parameter!r}", where=str(self.path)
            )
        return self._slots[parameter]

    def dtype_of(self, parameter: str, entry: str, start: int = 0) -> torch.dtype:
        """Return the dtype of a parameter's entry, read from the shard with its element `start`.

        The errors are those of `fill_interval`.
        """
        bucket, slot = self.bucket_of(parameter)
        at = slot.offset + (0 if bucket.divided else start)
        self._check(bucket.name, entry, at, at)
        number, _, _ = self._locate(bucket.name, at, 0)
        return self._shard(number).dtype(flat_key(bucket.name, entry))

    def _locate(self, bucket: str, at: int, tensor_index: int) -> tuple[int, int, int]:
        """Return the number of the shard with an element of a bucket, and the bounds [start, stop)
        of its elements.
        """
        lanes = self.index.tensor_ranks if self._buckets[bucket].divided else 1
        parts = self.index.run_length // lanes
        part_length = self._buckets[bucket].length // parts
        part = min(at // part_length, parts - 1) if part_length else 0
        return (
            self.index.first_shard(self._buckets[bucket]) + part * lanes + tensor_index,
            part * part_length,
            (part + 1) * part_length,
        )

    def fill_interval(
        self, bucket: str, entry: str, start: int, into: torch.Tensor, tensor_index: int = 0
    ) -> None:
        """Read elements of a bucket's entry into a tensor.

        Args:
            bucket: name of the bucket.
            entry: name of its entry.
            start: number of the first element.
            into: tensor to fill: 1-dim, contiguous, on the CPU, of the entry's dtype.
            tensor_index: for a bucket that a tensor axis divides, the rank of the axis.

        Raises:
            CheckpointError: there is no such interval, or a shard with part of it has changed.
        """
        stop = start + len(into)
        self._check(bucket, entry, start, stop)
        at = start
        while at < stop:
            number, first, last = self._locate(bucket, at, tensor_index)
            end = min(stop, last)
            self._shard(number).fill(
                flat_key(bucket, entry), at - first, into[at - start : end - start]
            )
            at = end

    def _check(self, bucket: str, entry: str, start: int, stop: int) -> None:
        length = self._buckets[bucket].length if bucket in self._buckets else -1
        if not 0 <= start <= stop <= length or entry not in self.index.entries.get(bucket, ()):
            raise CheckpointError(
                "the checkpoint has no such interval",
                where=str(self.path),
                expected=(
                    f"entries of {bucket!r}: {', '.join(self.index.entries.get(bucket, ()))};"
                    f" length {length}"
                ),
                got=f"{entry!r} [{start}, {stop})",
            )

    def fill_parameter(self, parameter: str, entry: str, start: int, into: torch.Tensor) -> None:
        """Read elements of a parameter's entry ("param", "exp_avg", ...) into a tensor; see
        `fill_interval`.
        """
        bucket, slot = self.bucket_of(parameter)
        self._check_elements(parameter, start, start + len(into))
        if not bucket.divided:
            self.fill_interval(bucket.name, entry, slot.offset + start, into)
            return

        def share(index: int, low: int, part: torch.Tensor) -> None:
            self.fill_interval(bucket.name, entry, slot.offset + low, part, index)

        fill_whole(
            share,
            slot.shape,
            self.index.tensor_shards[parameter],
            self.index.tensor_ranks,
            start,
            into,
        )

    def fill_share(
        self,
        parameter: str,
        entry: str,
        shard: Shard,
        ranks: int,
        index: int,
        start: int,
        into: torch.Tensor,
    ) -> None:
        """Read elements of a tensor-axis rank's share of a parameter's entry into a tensor; see
        `fill_interval`.

        `shard` describes how an axis of `ranks` ranks divides the parameter; `index` is the rank of
        the axis, and `start` the first element within its share.
        """
        bucket, slot = self.bucket_of(parameter)
        if (self.index.tensor_shards.get(parameter), self.index.tensor_ranks) == (shard, ranks):
            self.fill_interval(bucket.name, entry, slot.offset + start, into, index)
            return

        def whole(low: int, part: torch.Tensor) -> None:
            self.fill_parameter(parameter, entry, low, part)

        fill_share(
            whole, shard.share_shape(self.shape(parameter), ranks), shard, ranks, index, start, into
        )

    def parameter_interval(self, parameter: str, entry: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a parameter's entry: (stop - start,), on the CPU; see
        `fill_interval`.
        """
        self._check_elements(parameter, start, stop)
        interval = to_fill((stop - start,), self.dtype_of(parameter, entry, start))
        self.fill_parameter(parameter, entry, start, interval)
        return interval

    def _check_elements(self, parameter: str, start: int, stop: int) -> None:
        length = math.prod(self.shape(parameter))
        if not 0 <= start <= stop <= length:
            raise CheckpointError(
                "the parameter has no such interval",
                where=parameter,
                expected=f"within [0, {length})",
                got=f"[{start}, {stop})",
            )

    def shape(self, parameter: str) -> tuple[int, ...]:
        """Return the shape of a whole parameter.

        Raises CheckpointError if the parameter is unknown.
        """
        _, slot = self.bucket_of(parameter)
        shard = self.index.tensor_shards.get(parameter)
        return (
            slot.shape if shard is None else shard.whole_shape(slot.shape, self.index.tensor_ranks)
        )

    def scalars(self, bucket: str) -> dict[str, torch.Tensor]:
        """Return a bucket's 0-dim entries. Raises CheckpointError if their shard has changed."""
        entries = self.index.scalars.get(bucket, ())
        return {
            entry: (
                self._shard(self.index.first_shard(self._buckets[bucket])).tensor(
                    scalar_key(bucket, entry)
                )
            )
            for entry in entries
        }

    def own(self, parameter: str) -> dict[str, torch.Tensor]:
        """Return a parameter's entries that have their own shapes.

        Raises CheckpointError if their shard has changed.
        """
        bucket, _ = self.bucket_of(parameter)
        shard = self.index.first_shard(bucket)
        return {
            entry: self._shard(shard).tensor(own_key(parameter, entry))
            for entry in self.index.own.get(parameter, ())
        }

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers by name.

        Raises CheckpointError if a shard with one of them has changed.
        """
        homes = {
            name: self.index.buffer_ranks.get(name, 0) * self.index.run_length
            for name in self.index.buffers
        }
        return {
            name: self._shard(number).tensor(buffer_key(name)) for name, number in homes.items()
        }

    def _shard(self, number: int) -> ShardReader:
        if number not in self._open:
            self._open[number] = ShardReader(self._files, self.index.files[number], self._last)
        return self._open[number]


@dataclass(frozen=True, slots=True)
class Usable:
    """Result of `usable_checkpoint`.

    Attributes:
        path: the newest complete checkpoint; None if there is none.
        rejected: for each newer checkpoint, newest first, one line with the reason for its
            rejection.
    """

    path: Where | None
    rejected: tuple[str, ...]


def latest_checkpoint(place: CheckpointPlace) -> Where | None:
    """Return the newest published checkpoint of a run; None if there is none.

    Raises:
        CheckpointError: its index has changed. (`usable_checkpoint` would try an earlier one.)
    """
    checkpoints = list(place.published().values())
    return Checkpoint.open(checkpoints[-1]).path if checkpoints else None


def usable_checkpoint(
    place: CheckpointPlace, *, patience: float = 0.0, control: dist.ProcessGroup | None = None
) -> Usable:
    """Find the newest checkpoint of a run whose index and shards are unchanged since they were
    written.

    All of its bytes are read and checked; several ranks divide its shards among them.

    Args:
        place: storage of the run's checkpoints.
        patience: seconds for which reading is retried if storage fails. A checkpoint that has
            changed is rejected without a retry.
        control: group of the ranks that search together, and get the same result; None if there is
            one rank.

    Raises:
        StorageError: a URL cannot be reached. This does not cause an older checkpoint to be used.
    """
    until = time.monotonic() + patience
    rank, world = (
        (0, 1) if control is None else (dist.get_rank(control), dist.get_world_size(control))
    )
    rejected: list[str] = []
    listed: Callable[[], list[Where]] = partial(_newest_first, place, until) if rank == 0 else list
    for path in _read_on_all_ranks(listed, control)[0]:
        try:
            _read_on_all_ranks(
                partial(_read_with_retries, partial(_check_whole, path, rank, world), until),
                control,
            )
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            return Usable(path, tuple(rejected))
    return Usable(None, tuple(rejected))


def _newest_first(place: CheckpointPlace, until: float) -> list[Where]:
    return list(_read_with_retries(place.published, until).values())[::-1]


def _check_whole(path: Where, rank: int, world: int) -> None:
    Checkpoint.open(path).verify(rank, world)


def _read_on_all_ranks(read: Callable[[], T], control: dist.ProcessGroup | None) -> list[T]:
    """Return the result of `read` on each rank.

    If it raises on one rank, the error is raised on every rank; errors of storage come first.
    """
    mine: tuple[T | None, Exception | None]
    try:
        mine = read(), None
    except (OSError, CheckpointError, StorageError) as error:
        mine = None, error
    outcomes = gathered(mine, control)
    errors = sorted(
        (error for _, error in outcomes if error is not None),
        key=lambda error: isinstance(error, CheckpointError),
    )
    if errors:
        raise errors[0]
    return [value for value, _ in outcomes]  # type: ignore[misc]  # without errors there are values


def _read_with_retries(read: Callable[[], T], until: float) -> T:
    """Return the result of `read`, and retry it until a deadline if storage fails.

    Permanent errors are raised immediately.
    """
    while True:
        try:
            return read()
        except (OSError, CheckpointError, StorageError) as error:
            cause = error.__cause__ if isinstance(error, CheckpointError) else error
            passing = isinstance(cause, OSError | StorageError) and not isinstance(
                cause, FileNotFoundError
            )
            if not passing or time.monotonic() > until:
                raise
        time.sleep(_PAUSE_SECONDS)
