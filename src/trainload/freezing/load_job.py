"""Load a job from a command line spec: `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import TYPE_CHECKING

from trainload.core.errors import JobError, TrainloadError
from trainload.core.suggestions import nearest
from trainload.core.user_code import FORMS, describe, load_module, user_line

if TYPE_CHECKING:
    from trainload.capture.job.definition import Job
    from trainload.freezing.recorded_job import RecordedJob


def load_job(spec: str) -> Job:
    """Load the job that `spec` names, with values; see `load_recorded_job`."""
    return load_recorded_job(spec, values=True).job


def load_recorded_job(spec: str, *, values: bool) -> RecordedJob:
    """Load the job that `spec` names: a `Job`, or a function without arguments that returns one.

    The first values of a model that the function constructs are recorded.

    As when Python runs a script, the file's folder (for a module: the current folder) is put first
    on `sys.path` and stays there, so that the job's own imports work, late ones included.

    Args:
        spec: the name.
        values: False to construct large tensors without values.

    Raises:
        JobError: the spec is malformed, its file or module is missing or does not import, it has no
            such name, or the name is not a job. The message names the line of the user's file.
    """
    from trainload.capture.job.definition import Job
    from trainload.freezing.recorded_job import recorded_job

    location, _, name = spec.rpartition(":")
    if not location or not name.isidentifier():
        raise JobError("this does not name a job", where=spec, expected=FORMS, got=repr(spec))
    module = load_module(location)
    if not hasattr(module, name):
        candidates = _candidates(module, Job)
        close = nearest(name, candidates)
        hint = (
            f"Did you mean {location}:{close}?"
            if close is not None
            else f"It has: {', '.join(candidates)}."
            if candidates
            else ""
        )
        raise JobError(f"there is no {name!r} in it", where=location, hint=hint)
    value = getattr(module, name)
    recorded = recorded_job(value, values=values) if isinstance(value, Job) else None
    if inspect.isroutine(value):
        try:
            recorded = recorded_job(value, values=values)
        except TrainloadError:
            raise
        except (Exception, SystemExit) as error:
            raise JobError(
                f"{name}() failed: {describe(error)}",
                where=user_line(error, module),
            ) from error
        value = recorded.job
        where = f"{location}:{name}()"
    else:
        where = f"{location}:{name}"
    if recorded is None or not isinstance(value, Job):
        got = f"the class {value.__name__}" if inspect.isclass(value) else type(value).__name__
        raise JobError(
            "this is not a job",
            where=where,
            expected="a trainload.Job, or a function without arguments that returns one",
            got=got,
        )
    return recorded


def _candidates(module: ModuleType, job: type) -> list[str]:
    """Return the names in `module` that could be meant: its jobs and the functions that it
    defines.
    """
    names = (
        name
        for name, value in vars(module).items()
        if isinstance(value, job)
        or (inspect.isfunction(value) and value.__module__ == module.__name__)
    )
    return sorted(name for name in names if not name.startswith("_"))
