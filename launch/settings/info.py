"""Properties of a setting that its type does not express: unit, command-line option, and whether
`resume` may change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """Annotation of a field that is a setting.

    Attributes:
        unit: of its value, such as "s"; "" for a value without one.
        option: option of `trainload launch` that sets it; "" for a setting that `--set` gives.
        fixed: why `resume` cannot change it; "" for a setting that it can.
    """

    unit: str = ""
    option: str = ""
    fixed: str = ""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add unit and option to the field's JSON schema."""
        schema = handler(core_schema)
        extra = {"x-unit": self.unit, "x-option": self.option, "x-fixed-at-resume": self.fixed}
        return {**schema, **{name: value for name, value in extra.items() if value}}


def description_of(field: FieldInfo) -> str:
    """Return the description of a field in one line."""
    return " ".join((field.description or "").split())


def info_of(field: FieldInfo) -> SettingInfo:
    """Return the annotation of a field, or the default one if it has none."""
    return next((each for each in field.metadata if isinstance(each, SettingInfo)), SettingInfo())
