"""Reads settings from texts KEY=VALUE: `--set` of the command line, `train.set` of a retraining."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from trainload.core.arguments import nearest_literal
from trainload.core.errors import RequestError
from trainload.core.suggestions import did_you_mean
from trainload.launching.settings.adapters import Adapters
from trainload.launching.settings.info import SettingInfo, info_of
from trainload.launching.settings.overrides import FIXED, Overrides
from trainload.launching.settings.run_settings import BatchSettings, RunSettings

GROUP_LR = "lr.GROUP"
"""Key of the learning rate of a parameter group, by the group's name."""


@dataclass(frozen=True, slots=True)
class Key:
    """A setting as texts name it.

    Attributes:
        name: its key, such as "keep", "lr.GROUP" or "adapters.rank".
        model: the model that has it.
        field: the name of its field there.
    """

    name: str
    model: type[BaseModel]
    field: str

    @property
    def field_info(self) -> FieldInfo:
        """Pydantic's description of the field."""
        return self.model.model_fields[self.field]

    @property
    def info(self) -> SettingInfo:
        """Unit, option and whether `resume` may change it.

        An adapter's are those of all adapters.
        """
        return info_of(
            Overrides.model_fields["adapters"] if self.model is Adapters else self.field_info
        )

    @property
    def holds_several(self) -> bool:
        """True for a setting whose value has several parts, separated by commas."""
        return get_origin(self.field_info.annotation) in (tuple, Sequence)


def _keys() -> Iterator[Key]:
    for model in (RunSettings, Overrides, Adapters, BatchSettings):
        for field in model.model_fields:
            name = {"group_lr": GROUP_LR}.get(
                field, f"adapters.{field}" if model is Adapters else field
            )
            if field not in ("overrides", "adapters"):
                yield Key(name, model, field)


KEYS: Mapping[str, Key] = {key.name: key for key in _keys()}
"""All settings, by key."""


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """Settings that texts name.

    Attributes:
        run: fields of `RunSettings`, but for the overrides.
        overrides: changes of what is trained.
        batch: fields of `BatchSettings`.
    """

    run: Mapping[str, Any]
    overrides: Overrides
    batch: Mapping[str, Any]


def parse_settings(texts: Sequence[str], *, resuming: bool = False) -> GivenSettings:
    """Read settings.

    Args:
        texts: KEY=VALUE. Values of several parts are separated by commas, or given by several
            texts.
        resuming: they change a run that has begun. Otherwise settings that have an option of their
            own are excluded.

    Raises:
        RequestError: a text is malformed, its key is unknown or excluded, or its value is invalid.

    >>> parse_settings(["keep=3", "lr=1e-4"]).run
    {'keep': 3}
    """
    values: dict[type[BaseModel], dict[str, Any]] = {
        RunSettings: {},
        Overrides: {},
        Adapters: {},
        BatchSettings: {},
    }
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise RequestError("expected KEY=VALUE", where=f"--set {text}")
        group = name.removeprefix("lr.") if name.startswith("lr.") else None
        key = KEYS.get(name if group is None else GROUP_LR)
        _check_allowed(key, name, text, resuming=resuming)
        assert key is not None, "it is allowed"
        model = values[key.model]
        if group is not None:
            rate = _parse_value(Overrides.model_fields["lr"], text, value)
            model["group_lr"] = {**model.get("group_lr", {}), group: rate}
        elif key.holds_several:
            model[key.field] = _parse_value(
                key.field_info, text, (*model.get(key.field, ()), *value.split(","))
            )
        else:
            model[key.field] = _parse_value(key.field_info, text, value)
    if "source" in (adapters := values[Adapters]):
        values[Overrides]["adapters"] = _adapters_from(adapters)
    elif adapters:
        lacking = [
            f"adapters.{field}"
            for field, info in Adapters.model_fields.items()
            if info.is_required() and field not in adapters
        ]
        if "source_digest" in adapters:
            lacking = ["adapters.source"]
        if lacking:
            raise RequestError(
                f"{' and '.join(lacking)} must be set as well", where="--set adapters"
            )
        values[Overrides]["adapters"] = Adapters(**adapters)
    return GivenSettings(values[RunSettings], Overrides(**values[Overrides]), values[BatchSettings])


def _adapters_from(fields: Mapping[str, Any]) -> Adapters:
    """Return the adapters of a source, from the fields that were set."""
    if own := sorted(fields.keys() & {"rank", "layers", "alpha"}):
        raise RequestError(
            f"adapters.{own[0]} is the source's, and cannot be set as well", where="--set adapters"
        )
    return Adapters.from_peft(
        fields["source"], also=fields.get("also", ()), digest=fields.get("source_digest")
    )


def _check_allowed(key: Key | None, name: str, text: str, *, resuming: bool) -> None:
    problem = hint = ""
    if name in FIXED:
        problem = f"{name} cannot be set at a launch: {FIXED[name]}"
    elif key is None:
        available = [
            setting.name
            for setting in KEYS.values()
            if not (setting.info.fixed if resuming else setting.info.option)
        ]
        problem = (
            f"there is no setting {name}{' to change' if resuming else ''}; available:"
            f" {', '.join(sorted(available))}"
        )
        hint = did_you_mean(name, available)
    elif resuming and key.info.fixed:
        problem = f"{name} cannot be changed in the middle of a run: {key.info.fixed}"
    elif key.info.option and not resuming:
        problem = f"{name} is set with its own option, {key.info.option}"
    if problem:
        raise RequestError(problem, where=f"--set {text}", hint=hint)


def adapter_of(field: FieldInfo) -> TypeAdapter[Any]:
    """Return what validates a value of a field, and gives its JSON schema."""
    annotation: Any = (
        Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    )
    return TypeAdapter(annotation)


def _parse_value(field: FieldInfo, text: str, value: str | tuple[str, ...]) -> Any:
    """Convert a text to the type of a field."""
    kind = adapter_of(field)
    try:
        return (
            kind.validate_strings(value) if isinstance(value, str) else kind.validate_python(value)
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(
            first["msg"].removeprefix("Value error, "),
            where=f"--set {text}",
            hint=nearest_literal(first),
        ) from error
