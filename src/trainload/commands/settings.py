"""Settings of a run, as the command line gives them: --set KEY=VALUE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import click

SETTINGS = (
    "eval_batches",
    "hang_timeout",
    "keep",
    "max_failures",
    "node_patience",
    "start_timeout",
    "storage_patience",
    "weights",
)
"""Those fields of a `RunSpec` that --set names."""


def settings(given: Sequence[str]) -> dict[str, Any]:
    """What --set says: name -> value, as `trainload.launch` takes it."""
    from pydantic import TypeAdapter, ValidationError

    from trainload.launch.spec import RunSpec

    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in SETTINGS or not equals:
            raise click.UsageError(f"--set {text}: give KEY=VALUE, where KEY is one of {', '.join(SETTINGS)}.")
        field = RunSpec.model_fields[name]
        told: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        kind: TypeAdapter[Any] = TypeAdapter(told)
        try:
            found[name] = kind.validate_strings(value)
        except ValidationError as error:
            raise click.UsageError(f"--set {text}: {error.errors()[0]['msg']}.") from error
    return found
