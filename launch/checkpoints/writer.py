"""Writing checkpoints: copied at once, written by a thread, published by a rename.

All ranks write into `checkpoints/.tmp-step-N-<attempt>/`, a folder that all nodes must share: a shard each and then a mark that
names its digest. Rank 0 waits for all marks, writes the index and renames the folder to `checkpoints/step-N`. Where it gives up, it
leaves a notice for the ranks that still wait or come late. So a kill at any moment leaves whole checkpoints and, perhaps, drafts
that the next attempt removes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainload.capture.errors import CheckpointError, PackageError, StorageError, TrainloadError
from trainload.launch.checkpoints.index import (
    CHECKPOINTS,
    DRAFT,
    INDEX,
    CheckpointIndex,
    DataPosition,
    Written,
    buffer_key,
    decode_index,
    encode_index,
    flat_key,
    folder_name,
    own_key,
    published,
    scalar_key,
    shard_name,
)
from trainload.launch.checkpoints.retention import Retention
from trainload.launch.checkpoints.shard import write_shard
from trainload.launch.checkpoints.state import ShardedState, owned_slices
from trainload.packaging.canonical import canonical_json, parse_canonical
from trainload.packaging.files import is_full, sync_folder
from trainload.sharding.plan import Bucket, Plan

_POLL_SECONDS = 0.02
_ATTEMPT = re.compile(r"[A-Za-z0-9._-]+")


EVALUATION = "evaluation"
"""What a checkpoint has of its step's evaluation, in what it keeps for the run's user: the loss."""
_KEEP = Retention()


def _nothing() -> None:
    """For runs that have nothing to do before a checkpoint is published."""


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that rank 0 has published: its step, the seconds from its copy to its publication, and the bytes of all its shards."""

    step: int
    seconds: float
    bytes: int


class CheckpointWriter:
    """One rank's part in writing the checkpoints of a run. One save is under way at a time.

    Args:
        run_dir: the run's folder, on storage that all ranks share.
        plan: the run's plan.
        rank: this rank.
        attempt: a name for this attempt of the run, the same on all its ranks and new each time; letters, digits, `.`, `_`, `-`.
        keep: which checkpoints are kept; others are deleted once a new one is published.
        timeout: seconds that a rank waits for the others.
        before_publishing: called by rank 0's thread when a checkpoint is whole and not yet seen.

    Raises: StorageError where the folder cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        plan: Plan,
        rank: int,
        attempt: str,
        *,
        keep: Retention = _KEEP,
        timeout: float = 600.0,
        before_publishing: Callable[[], None] = _nothing,
    ) -> None:
        assert 0 <= rank < plan.world_size
        assert keep.last >= 1
        assert _ATTEMPT.fullmatch(attempt), attempt
        self._run_dir, self._plan, self._rank, self._attempt = run_dir, plan, rank, attempt
        self._keep, self._timeout, self._before_publishing = keep, timeout, before_publishing
        self._folder = run_dir / CHECKPOINTS
        self._host: dict[str, torch.Tensor] = {}
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._published: Published | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                self._remove_stale_drafts()
        except OSError as error:
            raise _storage_error(error, self._folder) from error

    def save(self, step: int, state: ShardedState, data: DataPosition, user: Mapping[str, Any]) -> None:
        """Copies the state and begins to write it. All ranks call it, in the same order, with the same arguments but the state.

        Args:
            step: the next step to run.
            state: this rank's tensors, on any device; they may change as soon as this returns.
            data: where the run is in its data.
            user: anything else that a resumed run wants, as JSON.

        Raises: what the save before ended with (`wait`); CheckpointError where the state does not fit the plan or `user` is not JSON.
        """
        self._saves += 1  # first of all, so that ranks count alike whatever fails
        self.wait()
        try:
            canonical_json(dict(user))
        except PackageError as error:
            raise CheckpointError(f"the user's state is not JSON: {error.problem}") from error
        owned = owned_slices(state, self._plan, self._rank)
        wanted = {flat_key(*key): tensor for key, tensor in owned.items()}
        own: dict[str, tuple[str, ...]] = {}
        answered = self._answered()
        for bucket in answered:
            wanted |= {scalar_key(bucket.name, entry): tensor for entry, tensor in state.scalars.get(bucket.name, {}).items()}
            stacks = state.stacks.get(bucket.name, {})
            for number, slot in enumerate(bucket.slots if stacks else ()):
                wanted |= {own_key(slot.parameter, entry): stack[number] for entry, stack in stacks.items()}
                own[slot.parameter] = tuple(sorted(stacks))
        homes = self._buffer_ranks()
        wanted |= {buffer_key(name): tensor for name, tensor in state.buffers.items() if self._leads(homes.get(name, 0))}
        self._copy(wanted)
        entries = {bucket.name: tuple(sorted(state.flats[bucket.name])) for bucket in answered}
        scalars = {bucket.name: tuple(sorted(state.scalars.get(bucket.name, {}))) for bucket in answered}
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
        self._thread = threading.Thread(target=self._run, args=(index,), name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    def _leads(self, pipeline_index: int) -> bool:
        """Whether this rank's shard is the first of the run of a rank of the pipeline."""
        return self._plan.file_index(self._rank) == pipeline_index * self._plan.data_ranks * self._plan.tensor_ranks

    def _answered(self) -> list[Bucket]:
        """The buckets that this rank writes the scalars of."""
        return [b for b in self._plan.buckets if self._leads(self._plan.holders(b)[0])]

    def _buffer_ranks(self) -> dict[str, int]:
        pipeline = self._plan.pipeline
        return {} if pipeline is None else {name: pipeline.stage_ranks[stage] for name, stage in pipeline.buffers.items()}

    @property
    def writing(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Published | None:
        """Returns once the last save is published, on every rank: on rank 0 what was published, if it was not told before.

        Raises: StorageError where the disk is full (the draft is removed, earlier checkpoints stay); CheckpointError where it
        could not be written for another reason, or another rank did not write its part in time.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        published, self._published = self._published, None
        return published

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Brings the tensors to host memory that is used again for every save, pinned where they come from a GPU."""
        kept: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            host = self._host.get(name)
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            kept[name] = host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        self._host = kept
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()

    def _run(self, index: CheckpointIndex) -> None:
        began = time.perf_counter()
        draft = self._folder / f"{DRAFT}{folder_name(index.step)}-{self._attempt}"
        try:
            try:
                if self._rank == 0:
                    size = self._lead(draft, index)
                    self._published = Published(index.step, time.perf_counter() - began, size)
                else:
                    self._follow(draft, index)
            except OSError as error:
                raise _storage_error(error, draft) from error
        except BaseException as error:  # noqa: BLE001  # handed to the training thread, whose `save` or `wait` raises it
            self._failure = error

    def _lead(self, draft: Path, index: CheckpointIndex) -> int:
        """Returns: the bytes of all shards."""
        try:
            draft.mkdir(exist_ok=True)
            mine = write_shard(draft / shard_name(0, self._plan.world_size), self._host)
            written = [Written(file=mine, entries=index.entries, scalars=index.scalars, own=index.own), *self._collect(draft)]
            in_order = sorted(range(self._plan.world_size), key=self._plan.file_index)
            update: dict[str, Any] = {"files": tuple(written[rank].file for rank in in_order)}
            for name in ("entries", "scalars", "own"):
                update[name] = {key: value for each in written for key, value in getattr(each, name).items()}
            index = index.model_copy(update=update)
            _write_durably(draft / INDEX, encode_index(index))
            sync_folder(draft)
            self._before_publishing()
            self._publish(draft, self._folder / folder_name(index.step))
        except (OSError, TrainloadError) as error:
            with contextlib.suppress(OSError):  # without a notice the others run into their timeout
                (draft / shard_name(0, self._plan.world_size)).unlink(missing_ok=True)  # room for the notice on a full disk
                _write_mark(self._notice(), _mark_of(error, draft))
            shutil.rmtree(draft, ignore_errors=True)
            raise
        for notice in self._folder.glob(f"{DRAFT}failed-*"):  # of earlier saves: all ranks have gone on from those
            notice.unlink()
        with contextlib.suppress(OSError):  # what is left is deleted after the next one
            self._prune(index)
        return sum(file.size for file in index.files)

    def _follow(self, draft: Path, index: CheckpointIndex) -> None:
        shard = draft / shard_name(self._rank, self._plan.world_size)
        try:
            draft.mkdir(exist_ok=True)
            done = Written(file=write_shard(shard, self._host), entries=index.entries, scalars=index.scalars, own=index.own)
            _write_mark(draft / _done(self._rank), done.model_dump(mode="json"))
        except (OSError, TrainloadError) as error:
            if self._notice().is_file():  # rank 0 has removed the draft
                shutil.rmtree(draft, ignore_errors=True)
                raise _error_of(self._notice(), "rank 0") from error
            # Rank 0 need not wait for its timeout. Where even the mark cannot be written, it will.
            with contextlib.suppress(OSError):
                shard.unlink(missing_ok=True)
                _write_mark(draft / _failed(self._rank), _mark_of(error, draft))
            raise
        self._await_publication(draft, self._folder / folder_name(index.step))

    def _collect(self, draft: Path) -> list[Written]:
        """Waits for the other ranks' shards. Raises: CheckpointError, StorageError where one of them failed or is late."""
        deadline = time.monotonic() + self._timeout
        records: list[Written] = []
        for rank in range(1, self._plan.world_size):
            done, failed = draft / _done(rank), draft / _failed(rank)
            while not done.is_file():
                if failed.is_file():
                    raise _error_of(failed, f"rank {rank}")
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        "a rank did not write its part of the checkpoint",
                        where=str(draft),
                        expected=f"rank {rank} within {self._timeout:g} s",
                        cure="See that rank's log; the run's folder must be shared by all nodes.",
                    )
                time.sleep(_POLL_SECONDS)
            records.append(Written.model_validate(parse_canonical(done.read_bytes(), str(done))))
        for path in draft.glob("*.done"):
            path.unlink()
        return records

    def _publish(self, draft: Path, final: Path) -> None:
        """Makes a whole draft visible. One of the same step gives way: the run has gone back behind it, and reached it again."""
        replaced = self._folder / f"{DRAFT}replaced-{final.name}-{self._attempt}"
        if final.exists():
            final.rename(replaced)
        draft.rename(final)
        sync_folder(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _await_publication(self, draft: Path, final: Path) -> None:
        """Waits until rank 0 has published. Raises: CheckpointError, StorageError where it gave up; nothing is left of the draft then."""
        deadline = time.monotonic() + self._timeout
        while draft.exists() and not self._notice().is_file():
            if time.monotonic() > deadline:
                raise CheckpointError("rank 0 did not publish the checkpoint", where=str(draft), expected=f"within {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)
        if self._notice().is_file():
            shutil.rmtree(draft, ignore_errors=True)  # this rank may have come after rank 0 removed it
            raise _error_of(self._notice(), "rank 0")
        index = final / INDEX
        if not index.is_file() or decode_index(index.read_bytes(), str(index)).attempt != self._attempt:
            raise CheckpointError("rank 0 could not publish the checkpoint", where=str(final), cure="See rank 0's log.")

    def _notice(self) -> Path:
        """Where rank 0 says that it gave up on this save."""
        return self._folder / f"{DRAFT}failed-{self._saves:08}-{self._attempt}"

    def _prune(self, index: CheckpointIndex) -> None:
        """Deletes what is not to be kept of those up to the one just published, which stays. Whole ones only are ever visible."""
        paths = {at: path for at, path in published(self._run_dir).items() if at <= index.step}
        losses = {at: index.user.get(EVALUATION) if at == index.step else self._loss_of(path) for at, path in paths.items()}
        for at in self._keep.doomed(losses):
            doomed = self._folder / f"{DRAFT}deleted-{paths[at].name}-{self._attempt}"
            paths[at].rename(doomed)
            shutil.rmtree(doomed)

    def _loss_of(self, checkpoint: Path) -> float | None:
        """Of a checkpoint's evaluation; None where there was none, where it cannot be read, or where nobody asks for the best."""
        if not self._keep.best:
            return None
        try:
            path = checkpoint / INDEX
            loss: float | None = decode_index(path.read_bytes(), str(path)).user.get(EVALUATION)
        except (OSError, CheckpointError):
            return None
        return loss

    def _remove_stale_drafts(self) -> None:
        own = re.compile(re.escape(DRAFT) + r"step-[0-9]+-" + re.escape(self._attempt))
        for path in self._folder.iterdir():
            if path.is_dir() and path.name.startswith(DRAFT) and not own.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f"{DRAFT}failed-"):
                path.unlink()


def _done(rank: int) -> str:
    return f"rank-{rank:05}.done"


def _failed(rank: int) -> str:
    return f"rank-{rank:05}.failed"


def _write_mark(path: Path, value: Mapping[str, object]) -> None:
    """Writes a small file that is there whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(canonical_json(value))
    part.rename(path)


def _mark_of(error: OSError | TrainloadError, where: Path) -> dict[str, object]:
    """What other ranks are told about an error."""
    told = _storage_error(error, where) if isinstance(error, OSError) else error
    return {"problem": told.problem, "got": told.got, "full": isinstance(told, StorageError)}


def _error_of(mark: Path, who: str) -> StorageError | CheckpointError:
    """The error that another rank told of."""
    told = parse_canonical(mark.read_bytes(), str(mark))
    kind = StorageError if told["full"] else CheckpointError
    return kind(f"{who}: {told['problem']}", where=str(mark.parent), expected="all ranks' shards", got=told["got"])


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _storage_error(error: OSError, where: Path) -> StorageError | CheckpointError:
    if is_full(error):
        return StorageError(
            "the disk is full: the checkpoint was not written",
            where=str(where),
            expected="room for a checkpoint more than are kept",
            got=str(error),
            cure="Make room or keep fewer checkpoints; earlier ones are as they were.",
        )
    return CheckpointError("the checkpoint could not be written", where=str(where), got=str(error), expected="a folder to write to")
