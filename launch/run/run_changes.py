"""Changes to the settings of a run that has begun, which apply from its last checkpoint on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from trainload.core.errors import JobError
from trainload.launching.run.run_spec import Change, RunSpec
from trainload.launching.settings.info import info_of
from trainload.launching.settings.overrides import Overrides
from trainload.launching.settings.run_settings import RunSettings
from trainload.packaging.format.manifest_records import SettingsEntry


def changes_run(settings: RunSettings) -> bool:
    """Return True if any setting of a run was passed."""
    return bool(settings.model_fields_set & RunSettings.model_fields.keys())


def changed(spec: RunSpec, step: int, settings: RunSettings) -> RunSpec:
    """Return a run with other settings.

    Args:
        spec: the run before the change.
        step: step of its last checkpoint, from which the changes apply.
        settings: new settings. Fields that were set replace the run's, and the others keep their
            values; the same holds for each override.

    Raises:
        JobError: a setting cannot be changed in the middle of a run, or the run has already done
            the new number of steps.
    """
    new_values: dict[str, Any] = {
        name: getattr(settings, name)
        for name in settings.model_fields_set
        if name in RunSettings.model_fields
    }
    if new_values.get("steps", 0) is None:
        del new_values["steps"]
    overrides: Overrides = new_values.pop("overrides", Overrides())
    _check_changeable(Overrides, overrides.model_fields_set)
    _check_changeable(RunSettings, new_values)
    if new_values.get("steps", step + 1) <= step:
        raise JobError(
            "the run has already completed this many steps",
            where="steps",
            expected=f"more than {step}",
            got=str(new_values["steps"]),
        )
    update = {name: getattr(overrides, name) for name in overrides.model_fields_set}
    update["group_lr"] = {**spec.overrides.group_lr, **overrides.group_lr}
    change = Change(step=step, settings={**overrides.settings(), **new_values})
    return RunSpec.model_validate(
        {
            **dict(spec),
            **new_values,
            "overrides": spec.overrides.model_copy(update=update),
            "changes": (*_history(spec), change),
        }
    )


def _check_changeable(model: type[BaseModel], names: Mapping[str, Any] | set[str]) -> None:
    for name, field in model.model_fields.items():
        if name in names and (reason := info_of(field).fixed):
            raise JobError(
                f"{name} cannot be changed in the middle of a run: {reason}", where="resume"
            )


def settings_of(spec: RunSpec) -> tuple[SettingsEntry, ...]:
    """Return the training settings that a run's output package records."""
    entries = []
    for change in _history(spec):
        settings = {
            n: value
            for n, value in change.settings.items()
            if n == "steps" or n.partition(".")[0] in Overrides.model_fields
        }
        if settings:
            entries.append(SettingsEntry(step=change.step, settings=settings))
    return tuple(entries)


def _history(spec: RunSpec) -> tuple[Change, ...]:
    """Return all changes; the first one has the settings of the launch."""
    return spec.changes or (Change(step=0, settings=spec.overrides.settings()),)
