"""Descriptions of settings: for `trainload settings`, docs/reference/settings.md, JSON schemas."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from trainload.launching.settings.info import description_of
from trainload.launching.settings.parse import GROUP_LR, KEYS, Key, adapter_of
from trainload.launching.settings.run_settings import RunSettings


@dataclass(frozen=True, slots=True)
class Description:
    """A setting as people read it.

    Attributes:
        key: as `--set` names it.
        option: option of `trainload launch` that sets it; "" if there is none.
        default: "" if the package, the plan or the job decides.
        unit: of its value, or "".
        at_resume: True if `resume` can change it.
        of_run: True for a setting of the run, False for one of what is trained.
        text: what it does.
    """

    key: str
    option: str
    default: str
    unit: str
    at_resume: bool
    of_run: bool
    text: str

    @property
    def names(self) -> tuple[str, ...]:
        """The key, and the option if there is one."""
        return (self.key, self.option) if self.option else (self.key,)


def descriptions() -> tuple[Description, ...]:
    """Return all settings, in the order of their keys."""
    return tuple(_describe(KEYS[name]) for name in sorted(KEYS))


def _describe(key: Key) -> Description:
    default = key.field_info.get_default(call_default_factory=False)
    shown = (
        ""
        if key.field_info.is_required() or not isinstance(default, bool | int | float | str)
        else f"{default}".lower()
    )
    return Description(
        key=key.name,
        option=key.info.option,
        default=shown.removesuffix(".0"),
        unit=key.info.unit,
        at_resume=not key.info.fixed,
        of_run=key.model is RunSettings,
        text=description_of(key.field_info),
    )


def settings_schema(without: Collection[str] = ()) -> dict[str, Any]:
    """Return the JSON schema of an object with settings by key, as `train.set` of a retraining
    takes them.

    Args:
        without: keys that are excluded, beside those that have an option of their own.

    >>> settings_schema()["properties"]["keep"]["minimum"]
    1
    """
    properties = {
        name: _schema(key)
        for name, key in KEYS.items()
        if not key.info.option and name not in (GROUP_LR, *without)
    }
    group = {**_schema(KEYS["lr"]), "description": _describe(KEYS[GROUP_LR]).text}
    return {
        "type": "object",
        "properties": properties,
        "patternProperties": {r"^lr\..+": group},
        "additionalProperties": False,
    }


def _schema(key: Key) -> dict[str, Any]:
    schema = adapter_of(key.field_info).json_schema()
    # 1e-4 is a string in YAML 1.1
    if key.holds_several or "float" in str(key.field_info.annotation):
        schema = {"anyOf": [schema, {"type": "string"}]}
    return {**schema, "description": _describe(key).text}
