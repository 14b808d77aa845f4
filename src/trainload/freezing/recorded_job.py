"""Construct a job while the first values of its model are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from trainload.capture.initialization.construction_recorder import recording
from trainload.capture.initialization.construction_tape import Tape, TensorRef
from trainload.capture.job.definition import Job


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job, and how its model was constructed.

    Attributes:
        job: the job.
        tape: the calls that constructed it; None if it was constructed elsewhere.
        tensors: parameter or buffer -> its place on the tape.
    """

    job: Job
    tape: Tape | None = None
    tensors: Mapping[str, TensorRef] = field(default_factory=dict)


def recorded_job(job: Job | Callable[[], Job], *, values: bool) -> RecordedJob:
    """Return a job, constructed by a function or passed as it is.

    Args:
        job: the job, or a function that returns it.
        values: False to construct large tensors without values.
    """
    if isinstance(job, Job) or not callable(job):
        return RecordedJob(job)
    with recording(values=values) as recorder:
        constructed = job()
    model = getattr(constructed, "model", None)
    if not isinstance(model, nn.Module):
        return RecordedJob(constructed)
    named = dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
    tensors = {name: recorder.ref(tensor) for name, tensor in named.items()}
    return RecordedJob(constructed, recorder.tape, tensors)
