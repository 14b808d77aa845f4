"""Settings of a run, and changes of what it trains, as texts KEY=VALUE: `--set` of the command line, `train.set` of a retraining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from trainload.capture.errors import RequestError

if TYPE_CHECKING:
    from trainload.launching.overrides import Overrides

SETTINGS = (
    "checkpoints",
    "eval_batches",
    "hang_timeout",
    "keep",
    "keep_best",
    "keep_every",
    "max_failures",
    "node_patience",
    "optimizer_from",
    "require_compiled",
    "sinks",
    "start_timeout",
    "storage_patience",
    "weights",
)
"""Those fields of a `RunSpec` that --set names."""
OPTIONS = ("checkpoint_every", "eval_every", "steps")
"""Further ones, for which `launch` has options of their own."""
OVERRIDES = ("lr", "schedule", "clip_norm", "clip_value", "frozen", "precision", "seed")
"""Those of `Overrides`; beside them lr.GROUP."""
ADAPTERS = ("adapters.also", "adapters.alpha", "adapters.layers", "adapters.rank")
"""Those of `Adapters`, beside the others of `Overrides`."""
BATCH = ("global_batch", "accumulate")
"""What a plan says, where none is given."""


class Settings:
    """The settings that some texts give.

    Args:
        given: texts KEY=VALUE.
        resumed: whether they are for a run that is resumed, whose fields of `RunSpec` with options of their own can be set as well.

    Raises:
        RequestError: a text is malformed, a key is unknown, or a value is not of its type.

    Attributes:
        run: name -> value, of `SETTINGS`.
        overrides: name -> value, of `Overrides`.
        batch: name -> number, of `BATCH`.
    """

    def __init__(self, given: Sequence[str], *, resumed: bool = False) -> None:
        from trainload.launching.adapters import Adapters
        from trainload.launching.overrides import Overrides
        from trainload.launching.spec import RunSpec

        adapters: dict[str, Any] = {}
        self.run: dict[str, Any] = {}
        self.overrides: dict[str, Any] = {}
        self.batch: dict[str, int] = {}
        for text in given:
            name, equals, value = text.partition("=")
            if not equals:
                raise RequestError("give KEY=VALUE", where=f"--set {text}")
            if name == "sinks":
                self.run[name] = _read(RunSpec.model_fields[name], text, tuple(value.split(",")))
            elif name in SETTINGS or (resumed and name in OPTIONS):
                self.run[name] = _read(RunSpec.model_fields[name], text, value)
            elif name == "frozen":
                self.overrides[name] = (*self.overrides.get(name, ()), *value.split(","))
            elif name in ADAPTERS:
                field = name.removeprefix("adapters.")
                several = field in ("also", "layers")
                found = (*adapters.get(field, ()), *value.split(",")) if several else _read(Adapters.model_fields[field], text, value)
                adapters[field] = found
            elif name.startswith("lr."):
                rate = _read(Overrides.model_fields["lr"], text, value)
                self.overrides["group_lr"] = {**self.overrides.get("group_lr", {}), name.removeprefix("lr."): rate}
            elif name in OVERRIDES:
                self.overrides[name] = _read(Overrides.model_fields[name], text, value)
            elif name in BATCH:
                if not value.isdecimal() or not 0 < int(value) < 2**31:
                    raise RequestError("give a number from 1 on", where=f"--set {text}")
                self.batch[name] = int(value)
            else:
                raise RequestError(_why_not(name, resumed=resumed), where=f"--set {text}")
        if adapters:
            lacking = [f"adapters.{field}" for field in ("rank", "layers") if field not in adapters]
            if lacking:
                raise RequestError(f"give {' and '.join(lacking)} as well", where="--set adapters")
            self.overrides["adapters"] = Adapters(**adapters)

    @property
    def changes(self) -> Overrides:
        """What of a package's training is changed."""
        from trainload.launching.overrides import Overrides

        return Overrides(**self.overrides)


def _why_not(name: str, *, resumed: bool) -> str:
    from trainload.launching.overrides import FIXED

    if name in FIXED:
        return f"{name} cannot be set at a launch: {FIXED[name]}"
    if resumed:
        from trainload.launching.changes import CHANGEABLE, UNCHANGEABLE

        there = (*CHANGEABLE, "lr.GROUP", *(each for each in OVERRIDES if each not in UNCHANGEABLE))
        return f"there is no {name} to change; there are {', '.join(sorted(there))}"
    return f"there is no {name}; there are {', '.join(sorted((*SETTINGS, *OVERRIDES, *ADAPTERS, 'lr.GROUP', *BATCH)))}"


def _read(field: Any, text: str, value: str | tuple[str, ...]) -> Any:
    """A value as a field of a record takes it."""
    from pydantic import Field, TypeAdapter, ValidationError

    from trainload.launching.spec import RunSpec

    told: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    if field is RunSpec.model_fields["steps"]:  # a run of none only evaluates, and nobody asks for it like this
        told = Annotated[int, Field(ge=1)]
    try:
        kind: TypeAdapter[Any] = TypeAdapter(told)
        return kind.validate_strings(value) if isinstance(value, str) else kind.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise RequestError(problem, where=f"--set {text}") from error
