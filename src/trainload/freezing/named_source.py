"""The source of weights that a package names, and their names there."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.core.errors import JobError
from trainload.packaging.format.manifest_records import WeightSourceEntry


def weight_source(job: Job, program: Program, default: str | None) -> WeightSourceEntry | None:
    """Return where weights of a package are found; None if that needs no description.

    Args:
        job: the job, of whose model names in sources may differ.
        program: its program.
        default: the source of a launch that names none.

    Raises:
        JobError: `Job.weight_names` names unknown parameters, or one name twice.
    """
    names = _names(job, program)
    if default is None and not names:
        return None
    return WeightSourceEntry(default=default, names=names)


def _names(job: Job, program: Program) -> dict[str, str]:
    """Return parameter or buffer -> its name in sources, for those with another one there."""
    owners = {each.name: each.alias_of or each.name for each in program.parameters}
    owners |= {each.name: each.name for each in program.buffers}
    chosen = job.weight_names
    if chosen is None:
        return {}
    names: dict[str, Any]
    if callable(chosen):
        names = {name: chosen(name) for name in owners}
    else:
        unknown = sorted(chosen.keys() - owners.keys())
        if unknown:
            raise JobError(
                "a name is that of no parameter or buffer",
                where="Job.weight_names",
                expected="names of the model's state_dict()",
                got=", ".join(unknown[:5]),
            )
        names = {name: chosen.get(name, name) for name in owners}
    for name, there in names.items():
        if not isinstance(there, str) or not there:
            raise JobError(
                "a name in weights is no text",
                where=f"Job.weight_names, {name}",
                expected="a name",
                got=repr(there),
            )
    uses = Counter(there for there, _ in {(there, owners[name]) for name, there in names.items()})
    twice = sorted(there for there, count in uses.items() if count > 1)
    if twice:
        raise JobError(
            "several parameters have the same name in weights",
            where="Job.weight_names",
            expected="different names, except of tied parameters",
            got=", ".join(twice[:5]),
        )
    return {name: there for name, there in names.items() if there != name}
