"""Construct a job while the first values of its model are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from trainload.capture.initialization.construction_recorder import is_recordable, recording
from trainload.capture.initialization.construction_tape import Tape, TensorRef
from trainload.capture.job.definition import Job
from trainload.capture.source.source_place import place_of_error
from trainload.core.errors import JobError, TrainloadError, raised

NO_VALUES = (
    "While a model is constructed without weights, random tensors and those of more than 1 MiB have"
    " no values that code could read."
)


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

    Raises:
        JobError: the job cannot be constructed without values.
    """
    if isinstance(job, Job):
        return RecordedJob(job)
    if isinstance(job, nn.Module | type) or not callable(job):
        raise JobError(
            "this is not a job",
            where="job",
            expected="a trainload.Job, or a function without arguments that returns one",
            got=f"the class {job.__name__}" if isinstance(job, type) else type(job).__name__,
        )
    with recording(values=values) as recorder:
        try:
            constructed = job()
        except TrainloadError:
            raise
        except Exception as error:  # of the user's code
            if values:
                raise
            raise JobError(
                f"the job cannot be constructed without weights: {raised(error)}",
                where=str(place_of_error(error) or "job"),
                hint=NO_VALUES,
            ) from error
    if not isinstance(getattr(constructed, "model", None), nn.Module):
        return RecordedJob(constructed)
    tensors = {
        name: recorder.ref(tensor)
        for name, tensor in model_tensors(constructed).items()
        if is_recordable(tensor)
    }
    return RecordedJob(constructed, recorder.tape, tensors)


def model_tensors(job: Job) -> dict[str, Tensor]:
    """Return the parameters and buffers of a job's model; an alias is not repeated."""
    model = job.model
    return dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
