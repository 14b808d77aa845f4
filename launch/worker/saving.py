"""Write a rank's checkpoints; if storage fails, training continues and the checkpoint is
retried.
"""

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
"""Time that a step waits for the previous checkpoint to be written when the next one is due."""


class Saver:
    """A rank's part of the checkpoints of a run. All ranks must call it in the same order.

    A failed checkpoint loses no steps: rank 0 warns, and requests another one soon (`wanted`). A
    checkpoint that is due while the previous one is still being written is deferred if that takes
    long. Only the end of a run waits for checkpoints.

    Args:
        writer: writer of checkpoints.
        contact: connection to the driver, which receives reports.
        control: group of all ranks, on a separate backend; None if there is one rank.
        leading: True for rank 0.
        patience: seconds that the end of a run waits for failing storage.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        contact: Contact,
        control: dist.ProcessGroup | None,
        *,
        leading: bool,
        patience: float,
    ):
        self._writer, self._contact, self._control, self._leading, self._patience = (
            writer,
            contact,
            control,
            leading,
            patience,
        )
        self._failures = 0
        self._again_at = 0.0
        self._deferred = False

    @property
    def wanted(self) -> bool:
        """True if it is time to retry a checkpoint that failed or was deferred, on this rank."""
        if self._writer.writing:
            return False
        self._finish_last_save()
        return (self._failures > 0 or self._deferred) and time.monotonic() >= self._again_at

    def save(
        self, step: int, state: ShardedState, data: DataPosition, user: dict[str, object]
    ) -> None:
        """Start a checkpoint once the previous one is written, or defer it.

        The arguments are those of `CheckpointWriter.save`.
        """
        began = time.perf_counter()
        if any(
            gathered(not self._writer.idle(0.0 if self._deferred else _HOLD_SECONDS), self._control)
        ):
            if self._leading and not self._deferred:
                message = (
                    f"the checkpoint of step {step} is delayed: the previous one is still being"
                    " written"
                )
                self._contact.write("warning", message=message)
            self._deferred = True
            return
        self._deferred = False
        self._finish_last_save()
        self._writer.save(step, state, data, user)
        if self._leading:
            self._contact.write(
                "stage", name="checkpoint", step=step, seconds=time.perf_counter() - began
            )

    def finish(self, save: Callable[[], None]) -> None:
        """Start the last checkpoint by calling `save`, and wait until it is published; retry if
        that fails.

        Raises:
            StorageError, CheckpointError: storage has failed for longer than `patience`; raised on
                every rank.
        """
        until = time.monotonic() + self._patience
        while True:
            self._finish_last_save()  # so that this checkpoint is not deferred
            gathered(None, self._control)
            save()
            failure = self._agree_on_failure(self._finish_last_save())
            if failure is None:
                return
            if self._agree_on_failure(failure if time.monotonic() > until else None) is not None:
                raise failure
            self._contact.aborted.wait(_pause(self._failures))

    def abort(self) -> bool:
        """End a save in progress without a checkpoint; return False if it does not end soon."""
        return self._writer.abort()

    def _agree_on_failure(self, failure: TrainloadError | None) -> TrainloadError | None:
        """Return, on all ranks, the failure of the first rank that has one."""
        return next((each for each in gathered(failure, self._control) if each is not None), None)

    def _finish_last_save(self) -> TrainloadError | None:
        """Wait for the last save, report its outcome, and return its error if it failed."""
        try:
            published = self._writer.wait()
        except (StorageError, CheckpointError) as error:
            self._failures += 1
            self._again_at = time.monotonic() + _pause(self._failures)
            if self._leading:
                self._contact.write(
                    "warning",
                    message=f"a checkpoint could not be written; the run continues: {error}",
                )
            return error
        if published is not None:
            self._failures = 0
            if self._leading:
                self._contact.write(
                    "checkpoint",
                    step=published.step,
                    seconds=published.seconds,
                    bytes=published.bytes,
                )
        return None


def _pause(failures: int) -> float:
    """Return the seconds to wait before the next attempt."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (failures - 1)) if failures else 0.0
