"""Which parameters an optimizer trains, and in which of its groups."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from trainload.capture.errors import JobError
from trainload.capture.job import Job
from trainload.capture.program import Program


def group_parameters(job: Job, program: Program, param_groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The names of each group's trained parameters, sorted; a parameter that is shared has its owner's name.

    Warns of parameters that get a gradient and are in no group.

    Raises:
        JobError: a group holds what is no parameter of the model, or of another group, or nothing is trained.
    """
    names = {id(p): n for n, p in reversed(list(job.model.named_parameters(remove_duplicate=False)))}
    trainable = {p.name for p in program.parameters if p.trainable and p.alias_of is None}
    groups: list[list[str]] = []
    seen: set[str] = set()
    for number, group in enumerate(param_groups):
        found = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise JobError(
                    "holds a tensor that is no parameter of the model",
                    where=f"Job.optimizer: group {number}",
                    got=f"shape {tuple(parameter.shape)}",
                    cure="Build the optimizer from the model that the function is given.",
                )
            if name in seen:
                raise JobError("a parameter is in two groups", where=f"Job.optimizer: group {number}", got=name)
            if name in trainable and name not in found:
                found.append(name)
        seen.update(found)
        groups.append(sorted(found))
    left_out = sorted(trainable - seen)
    if left_out and seen:
        warnings.warn(
            f"{len(left_out)} parameters get a gradient and are not in the optimizer; they stay as they are: {', '.join(left_out)}",
            stacklevel=4,
        )
    if not seen:
        raise JobError("the optimizer trains no parameter", where="Job.optimizer", cure="Give it model.parameters().")
    return groups
