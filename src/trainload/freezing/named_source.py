"""The source of weights that a package names, and their names there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.core.errors import JobError
from trainload.core.suggestions import did_you_mean
from trainload.packaging.format.manifest_records import WeightSourceEntry


def weight_source(
    names: Mapping[str, str], program: Program, default: str | None
) -> WeightSourceEntry | None:
    """Return where weights of a package are found; None if that needs no description.

    Args:
        names: result of `names_in_sources`.
        program: the package's program.
        default: the source of a launch that names none.
    """
    known = {each.name for each in program.parameters} | {each.name for each in program.buffers}
    renamed = {name: there for name, there in names.items() if name in known and name != there}
    return (
        None
        if default is None and not renamed
        else WeightSourceEntry(default=default, names=renamed)
    )


def names_in_sources(job: Job) -> dict[str, str]:
    """Return the name in sources of weights of each parameter and buffer of a job's model.

    Raises:
        JobError: `Job.weight_names` names unknown parameters, or one name twice.
    """
    state: dict[str, torch.Tensor] = {
        **dict(job.model.named_parameters(remove_duplicate=False)),
        **dict(job.model.named_buffers(remove_duplicate=False)),
    }
    chosen = job.weight_names
    names: dict[str, Any]
    if callable(chosen):
        names = {name: chosen(name) for name in state}
    else:
        unknown = sorted((chosen or {}).keys() - state.keys())
        if unknown:
            raise JobError(
                "a name is that of no parameter or buffer",
                where="Job.weight_names",
                expected="names of the model's state_dict()",
                got=", ".join(unknown[:5]),
                hint=did_you_mean(unknown[0], state),
            )
        names = {name: name for name in state} | dict(chosen or {})
    for name, there in names.items():
        if not isinstance(there, str) or not there:
            raise JobError(
                "a name in weights is no text",
                where=f"Job.weight_names, {name}",
                expected="a name",
                got=repr(there),
            )
    tensors = {(there, id(state[name])) for name, there in names.items()}
    uses = Counter(there for there, _ in tensors)
    twice = sorted(there for there, count in uses.items() if count > 1)
    if twice:
        raise JobError(
            "several parameters have the same name in weights",
            where="Job.weight_names",
            expected="different names, except of tied parameters",
            got=", ".join(twice[:5]),
        )
    return names
