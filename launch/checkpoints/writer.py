"""Write checkpoints asynchronously: copy the state, write it from a thread, publish it atomically.

On a CPU, a state of more than `COPIED` bytes is not copied, since the copy would take memory that
the plan does not account for: the rank waits until its shard is written.

Every rank writes a shard to shared storage, and then a mark, a small file with its digests. Rank 0
waits for all marks, and publishes the index. If it gives up, it leaves a notice for ranks that
still wait or arrive late. So a kill at any moment leaves complete checkpoints and, perhaps, drafts
that the next attempt removes. `checkpoint_place.py` implements the storage.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import CheckpointError, PackageError, StorageError, TrainloadError
from trainload.core.logs import logged_suppress
from trainload.core.paths import is_full
from trainload.core.storage.places import Where
from trainload.launching.checkpoints.checkpoint_place import CheckpointPlace, Draft
from trainload.launching.checkpoints.index import (
    CheckpointIndex,
    DataPosition,
    FileRecord,
    Written,
    buffer_key,
    flat_key,
    own_key,
    scalar_key,
    shard_name,
)
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.checkpoints.retention import Retention
from trainload.launching.checkpoints.shard import write_shard
from trainload.launching.checkpoints.sharded_state import ShardedState, owned_slices
from trainload.sharding.plans.plan import Bucket, Plan

_log = logging.getLogger(__name__)

COPIED = 2**30
"""Maximum bytes of a CPU rank's state that is copied."""
_WAIT_SECONDS = 1.0
_ATTEMPT = re.compile(r"[A-Za-z0-9._-]+")


EVALUATION = "evaluation"
"""Key of the evaluation loss of a checkpoint's step in the checkpoint's `user` entries."""
_KEEP = Retention()
_ABORT_SECONDS = 2.0


def _do_nothing() -> None:
    """Do nothing: the default of `before_publishing`."""


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that rank 0 has published: step, seconds from its copy to its publication, and
    bytes of all shards.
    """

    step: int
    seconds: float
    bytes: int


class CheckpointWriter:
    """One rank's writer of a run's checkpoints. At most one save is in progress at a time.

    Args:
        place: storage of the run's checkpoints, which all ranks reach.
        plan: plan of the run.
        rank: this rank.
        attempt: name of this attempt of the run, the same on all ranks and unique to the attempt;
            letters, digits, `.`, `_`, `-`.
        keep: retention of checkpoints; the others are deleted once a new one is published.
        timeout: seconds that a rank waits for the others.
        before_publishing: called by rank 0's thread when a checkpoint is complete and not yet
            visible.
        aborted: once it is set, nothing is published, and no rank is waited for.
        writing_state: called once a second while `save` waits for a state that is not copied, for
            at most `timeout`.

    Raises:
        StorageError, CheckpointError: the place is not writable.
    """

    def __init__(
        self,
        place: CheckpointPlace,
        plan: Plan,
        rank: int,
        attempt: str,
        *,
        keep: Retention = _KEEP,
        timeout: float = 600.0,
        before_publishing: Callable[[], None] = _do_nothing,
        aborted: threading.Event | None = None,
        writing_state: Callable[[], None] = _do_nothing,
    ) -> None:
        assert 0 <= rank < plan.world_size
        assert keep.last >= 1
        assert _ATTEMPT.fullmatch(attempt), attempt
        self._place, self._plan, self._rank, self._attempt = place, plan, rank, attempt
        self._keep, self._timeout, self._before_publishing = keep, timeout, before_publishing
        self._aborted = aborted or threading.Event()
        self._host: dict[str, torch.Tensor] = {}
        self._writing_state = writing_state
        self._state_written = threading.Event()
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._published: Published | None = None
        self._given_up: list[Draft] = []
        self._losses: dict[int, float | None] = {}
        try:
            place.begin()
            if rank == 0:
                place.tidy(attempt)
        except (OSError, StorageError) as error:
            raise self._user_error(error, place.where) from error

    def save(
        self, step: int, state: ShardedState, data: DataPosition, user: Mapping[str, Any]
    ) -> None:
        """Copy the state and start to write it; or write it, if it is too large to be copied.

        All ranks must call it in the same order, with the same arguments except for the state.

        Args:
            step: the next step to run.
            state: tensors of this rank, on any device; they may change as soon as this returns.
            data: position of the run in its data.
            user: other JSON values that a resumed run needs.

        Raises:
            CheckpointError: the state does not fit the plan, or `user` is not JSON.
            TrainloadError: the previous save has failed (see `wait`).
        """
        self._saves += 1  # before anything that may fail, so that all ranks have the same count
        self.wait()
        try:
            canonical_json(dict(user))
        except PackageError as error:
            raise CheckpointError(f"the user's state is not JSON: {error.problem}") from error
        owned = owned_slices(state, self._plan, self._rank)
        tensors = {flat_key(*key): tensor for key, tensor in owned.items()}
        own: dict[str, tuple[str, ...]] = {}
        scalar_buckets = self._scalar_buckets()
        for bucket in scalar_buckets:
            tensors |= {
                scalar_key(bucket.name, entry): tensor
                for entry, tensor in state.scalars.get(bucket.name, {}).items()
            }
            stacks = state.stacks.get(bucket.name, {})
            for number, slot in enumerate(bucket.slots if stacks else ()):
                tensors |= {
                    own_key(slot.parameter, entry): stack[number] for entry, stack in stacks.items()
                }
                own[slot.parameter] = tuple(sorted(stacks))
        homes = self._buffer_ranks()
        tensors |= {
            buffer_key(name): tensor
            for name, tensor in state.buffers.items()
            if self._leads(homes.get(name, 0))
        }
        copied = self._copy_to_host(tensors)
        entries = {
            bucket.name: tuple(sorted(state.flats[bucket.name])) for bucket in scalar_buckets
        }
        scalars = {
            bucket.name: tuple(sorted(state.scalars.get(bucket.name, {})))
            for bucket in scalar_buckets
        }
        index = CheckpointIndex(
            package=self._plan.package,
            step=step,
            attempt=self._attempt,
            strategy=self._plan.strategy,
            world_size=self._plan.world_size,
            tensor_ranks=self._plan.tensor_ranks,
            tensor_shards=self._plan.tensor_shards,
            stage_ranks=() if self._plan.pipeline is None else self._plan.pipeline.stage_ranks,
            buckets=self._plan.buckets,
            entries=entries,
            scalars=scalars,
            own=own,
            buffers=tuple(sorted(state.buffers)),
            buffer_ranks=homes,
            data=data,
            files=(),
            user=dict(user),
        )
        self._thread = threading.Thread(
            target=self._run, args=(index,), name=f"checkpoint {step}", daemon=True
        )
        self._state_written.clear()
        self._thread.start()
        if not copied:
            self._wait_for_state()

    def _wait_for_state(self) -> None:
        """Wait until this rank's shard is written, or has failed."""
        until = time.monotonic() + self._timeout
        while not self._state_written.wait(_WAIT_SECONDS):
            if time.monotonic() < until:
                self._writing_state()
        self._host = {}

    def _leads(self, pipeline_index: int) -> bool:
        """Return True if this rank's shard is the first of those of a pipeline rank."""
        return (
            self._plan.file_index(self._rank)
            == pipeline_index * self._plan.data_ranks * self._plan.tensor_ranks
        )

    def _scalar_buckets(self) -> list[Bucket]:
        """Return the buckets whose scalars this rank writes."""
        return [b for b in self._plan.buckets if self._leads(self._plan.holders(b)[0])]

    def _buffer_ranks(self) -> dict[str, int]:
        pipeline = self._plan.pipeline
        return (
            {}
            if pipeline is None
            else {name: pipeline.stage_ranks[stage] for name, stage in pipeline.buffers.items()}
        )

    @property
    def writing(self) -> bool:
        """True if a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def idle(self, seconds: float) -> bool:
        """Wait at most `seconds` for a save in progress; return True if none is left.

        `wait` reports its outcome.
        """
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.writing

    def wait(self) -> Published | None:
        """Wait until the last save is published.

        Returns:
            On rank 0 the published checkpoint, if no earlier call has returned it; otherwise None.

        Raises:
            StorageError: the disk is full; the draft is removed, and earlier checkpoints remain.
            CheckpointError: it could not be written for another reason, or another rank did not
                write its shard in time.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        published, self._published = self._published, None
        return published

    def abort(self) -> bool:
        """End a save in progress without a checkpoint; return False if it does not end soon."""
        self._aborted.set()
        return self.idle(_ABORT_SECONDS)

    def _copy_to_host(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy the tensors to host memory, which all saves reuse; it is pinned for GPU tensors.

        Returns:
            False if they are not copied, and must not change while they are written.
        """
        on_cpu = [tensor.nbytes for tensor in tensors.values() if tensor.device.type == "cpu"]
        if sum(on_cpu) > COPIED:
            self._host = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            return False
        host_tensors: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            host = self._host.get(name)
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            host_tensors[name] = host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        self._host = host_tensors
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return True

    def _run(self, index: CheckpointIndex) -> None:
        began = time.perf_counter()
        draft = self._place.draft(index.step, self._attempt, self._saves)
        try:
            try:
                if self._rank == 0:
                    size = self._write_and_publish(draft, index)
                    self._published = Published(index.step, time.perf_counter() - began, size)
                else:
                    self._write_and_wait(draft, index)
            except (OSError, StorageError) as error:
                raise self._user_error(error, draft.where) from error
        except BaseException as error:  # noqa: BLE001  # stored for the training thread, whose `save` or `wait` raises it
            self._failure = error
        finally:
            self._state_written.set()

    def _write_shard(self, draft: Draft, shard: str) -> FileRecord:
        record = write_shard(draft, shard, self._host)
        self._state_written.set()
        return record

    def _user_error(self, error: OSError | TrainloadError, where: str) -> TrainloadError:
        """Return an error for the user: that of the operating system behind one of a folder, in
        words of checkpoints.
        """
        cause = self._place.os_error(error)
        return _storage_error(cause, where) if isinstance(cause, OSError) else cause

    def _write_and_publish(self, draft: Draft, index: CheckpointIndex) -> int:
        """Write rank 0's shard, wait for the others, and publish; return the bytes of all
        shards.
        """
        shard = shard_name(0, self._plan.world_size)
        try:
            mine = self._write_shard(draft, shard)
            written = [
                Written(file=mine, entries=index.entries, scalars=index.scalars, own=index.own),
                *self._collect(draft),
            ]
            in_order = sorted(range(self._plan.world_size), key=self._plan.file_index)
            update: dict[str, Any] = {"files": tuple(written[rank].file for rank in in_order)}
            for name in ("entries", "scalars", "own"):
                update[name] = {
                    key: value
                    for shard_contents in written
                    for key, value in getattr(shard_contents, name).items()
                }
            index = index.model_copy(update=update)
            draft.complete(index)
            self._before_publishing()
            if self._aborted.is_set():
                raise _aborted_error(draft)
            draft.publish(index)
        except (OSError, TrainloadError) as error:
            draft.give_up(shard, _encode_error(self._user_error(error, draft.where)))
            self._given_up.append(draft)
            raise
        message = "old checkpoints were not removed; removed after the next save"
        with logged_suppress(_log, message, OSError, StorageError):
            draft.release()
            while self._given_up:  # no rank waits for these any more
                self._given_up[-1].forget()
                self._given_up.pop()
            self._delete_unretained(index)
        return sum(file.size for file in index.files)

    def _write_and_wait(self, draft: Draft, index: CheckpointIndex) -> None:
        shard = shard_name(self._rank, self._plan.world_size)
        try:
            written = Written(
                file=self._write_shard(draft, shard),
                entries=index.entries,
                scalars=index.scalars,
                own=index.own,
            )
            draft.leave(_done_mark(self._rank), canonical_json(written.model_dump(mode="json")))
        except (OSError, TrainloadError) as error:
            notice = None
            # the mark saves rank 0 from waiting for its timeout
            message = "rank 0 does not learn that this rank failed, and waits for its timeout"
            with logged_suppress(_log, message, OSError, StorageError):
                notice = draft.notice()
                if notice is None:
                    draft.drop(shard)
                    draft.leave(
                        _failed_mark(self._rank),
                        _encode_error(self._user_error(error, draft.where)),
                    )
            if notice is not None:
                draft.withdraw(self._rank, shard)
                raise _decode_error(notice, draft.where, "rank 0") from error
            raise
        self._await_publication(draft, shard)

    def _collect(self, draft: Draft) -> list[Written]:
        """Wait for the other ranks' shards; raise CheckpointError or StorageError if one of them
        failed or is late.
        """
        written: dict[int, Written] = {}
        failed: dict[int, bytes] = {}
        missing = list(range(1, self._plan.world_size))

        def settled() -> bool:
            marks = draft.marks()
            first = next((rank for rank in missing if _failed_mark(rank) in marks), None)
            if first is not None:
                (failed[first],) = draft.read([_failed_mark(first)])
                return True
            ready = [rank for rank in missing if _done_mark(rank) in marks]
            for rank, data in zip(
                ready, draft.read([_done_mark(rank) for rank in ready]), strict=True
            ):
                written[rank] = Written.model_validate(
                    parse_canonical(data, f"{draft.where}/{_done_mark(rank)}")
                )
                missing.remove(rank)
            return not missing

        if not self._poll_until(settled, draft):
            raise CheckpointError(
                "a rank did not write its part of the checkpoint",
                where=draft.where,
                expected=f"the part of rank {missing[0]} within {self._timeout:g} s",
                hint=(
                    "Check that rank's log. All nodes must be able to reach the place of the"
                    " checkpoints."
                ),
            )
        for rank, mark in failed.items():
            raise _decode_error(mark, draft.where, f"rank {rank}")
        return [written[rank] for rank in range(1, self._plan.world_size)]

    def _await_publication(self, draft: Draft, shard: str) -> None:
        """Wait until rank 0 has published.

        Raises:
            CheckpointError, StorageError: rank 0 has given up; this rank's part of the draft is
                removed.
        """
        over = draft.notice() is not None  # this rank may have arrived after rank 0 gave up
        if not over and not self._poll_until(lambda: not draft.pending(self._rank), draft):
            raise CheckpointError(
                "rank 0 did not publish the checkpoint",
                where=draft.where,
                expected=f"within {self._timeout:g} s",
            )
        notice = draft.notice()
        if notice is not None:
            draft.withdraw(self._rank, shard)
            raise _decode_error(notice, draft.where, "rank 0")
        if not draft.published():
            raise CheckpointError(
                "rank 0 could not publish the checkpoint",
                where=draft.where,
                hint="Check rank 0's log.",
            )

    def _poll_until(self, ask: Callable[[], bool], draft: Draft) -> bool:
        """Poll a condition until it is true or the timeout is over; return True if it became true.

        If the storage is unreachable, polling continues.

        Raises:
            StorageError: the storage is still unreachable at the timeout.
            CheckpointError: the attempt was aborted.
        """
        deadline = time.monotonic() + self._timeout
        pause, longest = self._place.pauses
        while True:
            late = time.monotonic() > deadline
            try:
                if ask():
                    return True
            except StorageError:
                if late:
                    raise
            if late:
                return False
            if self._aborted.wait(pause):
                raise _aborted_error(draft)
            pause = min(pause * 1.5, longest)

    def _delete_unretained(self, index: CheckpointIndex) -> None:
        """Delete the checkpoints up to the one just published that the retention does not keep."""
        existing = {at: where for at, where in self._place.published().items() if at <= index.step}
        if self._keep.best:
            self._losses[index.step] = index.user.get(EVALUATION)
            self._losses = {
                at: self._losses[at] if at in self._losses else _loss_of(where)
                for at, where in existing.items()
            }
        for at in self._keep.doomed({at: self._losses.get(at) for at in existing}):
            self._place.delete(at)


def _loss_of(checkpoint: Where) -> float | None:
    """Return the evaluation loss of a checkpoint; None if there was no evaluation, or the index
    cannot be read.
    """
    try:
        loss: float | None = Checkpoint.open(checkpoint).index.user.get(EVALUATION)
    except CheckpointError:
        return None
    return loss


def _aborted_error(draft: Draft) -> CheckpointError:
    return CheckpointError(
        "the attempt ended before the checkpoint was complete", where=draft.where
    )


def _done_mark(rank: int) -> str:
    return f"rank-{rank:05}.done"


def _failed_mark(rank: int) -> str:
    return f"rank-{rank:05}.failed"


def _encode_error(error: TrainloadError) -> bytes:
    """Return an error encoded for the other ranks."""
    return canonical_json(
        {"problem": error.problem, "got": error.got, "full": isinstance(error, StorageError)}
    )


def _decode_error(mark: bytes, where: str, who: str) -> StorageError | CheckpointError:
    """Decode the error of another rank."""
    fields = parse_canonical(mark, where)
    kind = StorageError if fields["full"] else CheckpointError
    return kind(
        f"{who}: {fields['problem']}", where=where, expected="all ranks' shards", got=fields["got"]
    )


def _storage_error(error: OSError, where: str) -> StorageError | CheckpointError:
    if is_full(error):
        return StorageError(
            "the disk is full: the checkpoint was not written",
            where=where,
            expected="space for one checkpoint more than are kept",
            got=str(error),
            hint="Free some disk space or keep fewer checkpoints. Earlier checkpoints are intact.",
        )
    return CheckpointError(
        "the checkpoint could not be written",
        where=where,
        got=str(error),
        expected="a writable folder",
    )
