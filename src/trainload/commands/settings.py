"""Settings of a run, and changes of what it trains, as the command line gives them: --set KEY=VALUE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import click

SETTINGS = (
    "eval_batches",
    "hang_timeout",
    "keep",
    "keep_best",
    "keep_every",
    "max_failures",
    "node_patience",
    "sinks",
    "start_timeout",
    "storage_patience",
    "weights",
)
"""Those fields of a `RunSpec` that --set names."""
OVERRIDES = ("lr", "schedule", "clip_norm", "clip_value", "frozen", "seed")
"""Those of `Overrides`; beside them lr.GROUP."""
BATCH = ("global_batch", "accumulate")
"""What a plan says, where none is given."""


class Settings:
    """What --set says.

    Attributes:
        run: name -> value, of `SETTINGS`.
        overrides: name -> value, of `Overrides`.
        batch: name -> number, of `BATCH`.
    """

    def __init__(self, given: Sequence[str]) -> None:
        from trainload.launch.overrides import Overrides
        from trainload.launch.spec import RunSpec

        self.run: dict[str, Any] = {}
        self.overrides: dict[str, Any] = {}
        self.batch: dict[str, int] = {}
        for text in given:
            name, equals, value = text.partition("=")
            if not equals:
                raise click.UsageError(f"--set {text}: give KEY=VALUE.")
            if name == "sinks":
                self.run[name] = _read(RunSpec.model_fields[name], text, tuple(value.split(",")))
            elif name in SETTINGS:
                self.run[name] = _read(RunSpec.model_fields[name], text, value)
            elif name == "frozen":
                self.overrides[name] = (*self.overrides.get(name, ()), *value.split(","))
            elif name.startswith("lr."):
                rate = _read(Overrides.model_fields["lr"], text, value)
                self.overrides["group_lr"] = {**self.overrides.get("group_lr", {}), name.removeprefix("lr."): rate}
            elif name in OVERRIDES:
                self.overrides[name] = _read(Overrides.model_fields[name], text, value)
            elif name in BATCH:
                if not value.isdecimal() or not 0 < int(value) < 2**31:
                    raise click.UsageError(f"--set {text}: give a number from 1 on.")
                self.batch[name] = int(value)
            else:
                raise click.UsageError(f"--set {text}: {_why_not(name)}.")


def _why_not(name: str) -> str:
    from trainload.launch.overrides import FIXED

    if name in FIXED:
        return f"{name} cannot be set at a launch: {FIXED[name]}"
    return f"there is no {name}; there are {', '.join(sorted((*SETTINGS, *OVERRIDES, 'lr.GROUP', *BATCH)))}"


def _read(field: Any, text: str, value: str | tuple[str, ...]) -> Any:
    """A value as a field of a record takes it."""
    from pydantic import TypeAdapter, ValidationError

    told: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    try:
        kind: TypeAdapter[Any] = TypeAdapter(told)
        return kind.validate_strings(value) if isinstance(value, str) else kind.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise click.UsageError(f"--set {text}: {problem}.") from error
