"""When a rank writes checkpoints, and what it does where storage fails: it trains on, and tries again."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from trainload.core.errors import CheckpointError, StorageError, TrainloadError
from trainload.launching.checkpoints.index import DataPosition
from trainload.launching.checkpoints.sharded_state import ShardedState
from trainload.launching.checkpoints.writer import CheckpointWriter
from trainload.launching.node.process_groups import gathered
from trainload.launching.run.contact import Contact

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_HOLD_SECONDS = 30.0
"""How long a step waits for the checkpoint before to be written, when another one is due."""


class Saver:
    """A rank's part in the checkpoints of a run. All ranks call it in the same order.

    A checkpoint that could not be written costs no step: rank 0 warns, and asks for another one soon (`wanted`). One that is due while
    the one before is still being written is put off until that is done, where it takes long. Only at the end of a run are they waited for.

    Args:
        writer: writes them.
        contact: what is told of them.
        control: all ranks, on a backend of its own; None where there is one rank.
        leading: whether this is rank 0.
        patience: seconds that the end of a run waits for storage that fails.
    """

    def __init__(self, writer: CheckpointWriter, contact: Contact, control: dist.ProcessGroup | None, *, leading: bool, patience: float):
        self._writer, self._contact, self._control, self._leading, self._patience = writer, contact, control, leading, patience
        self._failures = 0
        self._again_at = 0.0
        self._put_off = False

    @property
    def wanted(self) -> bool:
        """Whether it is time to try again after a checkpoint that could not be written, or was put off. Of this rank alone."""
        if self._writer.writing:
            return False
        self._settle()
        return (self._failures > 0 or self._put_off) and time.monotonic() >= self._again_at

    def save(self, step: int, state: ShardedState, data: DataPosition, user: dict[str, object]) -> None:
        """Begins a checkpoint, once the one before is done with; or puts it off. Arguments: as of `CheckpointWriter.save`."""
        began = time.perf_counter()
        if any(gathered(not self._writer.idle(0.0 if self._put_off else _HOLD_SECONDS), self._control)):
            if self._leading and not self._put_off:
                message = f"the checkpoint of step {step} is put off: the one before is still being written"
                self._contact.write("warning", message=message)
            self._put_off = True
            return
        self._put_off = False
        self._settle()
        self._writer.save(step, state, data, user)
        if self._leading:
            self._contact.write("stage", name="checkpoint", step=step, seconds=time.perf_counter() - began)

    def finish(self, save: Callable[[], None]) -> None:
        """Begins the last checkpoint by `save`, and waits until it is published; again, where it cannot be written.

        Raises: StorageError or CheckpointError on every rank, where storage fails for longer than `patience`.
        """
        until = time.monotonic() + self._patience
        while True:
            self._settle()  # so that this one is not put off
            gathered(None, self._control)
            save()
            failure = self._agreed(self._settle())
            if failure is None:
                return
            if self._agreed(failure if time.monotonic() > until else None) is not None:
                raise failure
            time.sleep(_pause(self._failures))

    def _agreed(self, failure: TrainloadError | None) -> TrainloadError | None:
        """The failure of the first rank that has one, on all of them."""
        return next((each for each in gathered(failure, self._control) if each is not None), None)

    def _settle(self) -> TrainloadError | None:
        """What the last save came to."""
        try:
            published = self._writer.wait()
        except (StorageError, CheckpointError) as error:
            self._failures += 1
            self._again_at = time.monotonic() + _pause(self._failures)
            if self._leading:
                self._contact.write("warning", message=f"a checkpoint could not be written, the run goes on: {error}")
            return error
        if published is not None:
            self._failures = 0
            if self._leading:
                self._contact.write("checkpoint", step=published.step, seconds=published.seconds, bytes=published.bytes)
        return None


def _pause(failures: int) -> float:
    """Seconds until the next try."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (failures - 1)) if failures else 0.0
