"""What of a run may be changed while it is under way, from its last checkpoint on; and what may not, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainload.capture.errors import JobError
from trainload.launching.overrides import Overrides
from trainload.launching.spec import Change, RunSpec
from trainload.packaging.manifest import SettingsEntry

CHANGEABLE = (
    "checkpoint_every",
    "eval_batches",
    "eval_every",
    "hang_timeout",
    "keep",
    "keep_best",
    "keep_every",
    "max_failures",
    "node_patience",
    "require_compiled",
    "sinks",
    "start_timeout",
    "steps",
    "storage_patience",
    "weights",
)
"""Those fields of a `RunSpec`; beside them what `Overrides` has and `UNCHANGEABLE` has not."""
_OTHER = "the run's checkpoints hold other parameters: launch a new run, from the package that this one writes"
_LAW = "every step's rows follow from it, and those of the steps that were done would be others: launch a new run"
UNCHANGEABLE: Mapping[str, str] = {
    "adapters": _OTHER,
    "precision": "the run's checkpoints are of its package in the precision that it began with: launch a new run",
    "frozen": "the run's checkpoints hold the optimizer's state of what was trained so far: launch a new run",
    "seed": _LAW,
    "global_batch": _LAW,
    "accumulate": "it is part of the plan: give another one of the run's global batch with --plan",
}
"""What may not be changed, and why."""


def changed(spec: RunSpec, step: int, overrides: Overrides, settings: Mapping[str, Any]) -> RunSpec:
    """The run as it goes on.

    Args:
        spec: as it was.
        step: from which the changes hold: its last checkpoint's.
        overrides: what of the package's training is changed; what it does not name stays as it is.
        settings: name -> value, of `CHANGEABLE`.

    Raises:
        JobError: something that cannot be changed now, or a number of steps that is reached already.
    """
    named = overrides.model_fields_set
    asked = [*(name for name in UNCHANGEABLE if name in named), *(name for name in settings if name not in CHANGEABLE)]
    if asked:
        why = UNCHANGEABLE.get(asked[0], "there is nothing of this name")
        raise JobError(f"{asked[0]} cannot be changed in the middle of a run: {why}", where="resume")
    if settings.get("steps", step + 1) <= step:
        raise JobError("the run has done so many steps already", where="steps", expected=f"more than {step}", got=str(settings["steps"]))
    given = {name: getattr(overrides, name) for name in named}
    given["group_lr"] = {**spec.overrides.group_lr, **overrides.group_lr}
    told = {**overrides.settings(), **settings}
    return RunSpec.model_validate(
        {
            **dict(spec),
            **settings,
            "overrides": spec.overrides.model_copy(update=given),
            "changes": (*_history(spec), Change(step=step, settings=told)),
        }
    )


def settings_of(spec: RunSpec) -> tuple[SettingsEntry, ...]:
    """What a package that a run has trained says of its settings: those that it is trained by."""
    found = []
    for change in _history(spec):
        settings = {n: value for n, value in change.settings.items() if n == "steps" or n.partition(".")[0] in Overrides.model_fields}
        if settings:
            found.append(SettingsEntry(step=change.step, settings=settings))
    return tuple(found)


def _history(spec: RunSpec) -> tuple[Change, ...]:
    """All changes so far; the first has what the run was launched with."""
    return spec.changes or (Change(step=0, settings=spec.overrides.settings()),)
