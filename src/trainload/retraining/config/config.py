"""The configuration of a retraining: a YAML or TOML file, read and checked before anything runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from trainload.core.arguments import nearest_literal
from trainload.core.errors import RequestError
from trainload.core.redaction import HIDDEN, REFERENCE, redacted
from trainload.core.suggestions import did_you_mean
from trainload.launching.settings.describe import settings_schema
from trainload.packaging.stores.releases import Line
from trainload.sharding.plans.strategies import Strategy

MOST_BYTES = 2**20
KEYS_ELSEWHERE = {"eval_batches": "evaluation.batches", "optimizer_from": "train.optimizer"}
"""Settings of a run that have their own key in the file."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"([0-9]{1,9}) ?([smhdw])")
_LONGEST = timedelta(days=36500)


def seconds_of(text: object) -> object:
    """Convert a text such as "90s", "30m", "6h", "7d" or "2w" to a timedelta; return anything else
    unchanged.
    """
    match = _SPAN.fullmatch(text) if isinstance(text, str) else None
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    return timedelta(seconds=seconds) if 0 < seconds <= _LONGEST.total_seconds() else text


def _check_span(value: object) -> object:
    if not isinstance(value, timedelta) or not timedelta(0) < value <= _LONGEST:
        raise ValueError(
            "a number of seconds, minutes, hours, days or weeks, such as 90s, 30m, 6h, 7d or 2w; at"
            " most 36500d"
        )
    return value


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _format_span(span: timedelta) -> str:
    return f"{round(span.total_seconds())}s"


Span = Annotated[
    timedelta,
    BeforeValidator(_check_span),
    BeforeValidator(seconds_of),
    PlainSerializer(_format_span, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": f"^{_SPAN.pattern}$"}),
]
"""A duration, written as "6h"."""
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""A text or a list of texts."""
Some = Annotated[Names, Field(min_length=1)]
"""A text or a non-empty list of texts."""
Outcome = Literal["promoted", "rejected", "conflict", "bad data", "no data", "replaced", "failed"]
"""Outcome of a tick. conflict: another release was made current manually meanwhile, and the
challenger remains a candidate.
replaced: a later tick requested a stop. failed: the maximum number of attempts was reached."""
Positive = Annotated[int, Field(ge=1, strict=True)]
MOST_ATTEMPTS = 20
"""Maximum number of attempts of a tick."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Window(_Section):
    """Selection of a tick's data.

    Attributes:
        kind: "new": files that no earlier tick has used; "path": files whose paths have a time
            within the last `span`, where `files` describes the time in a path, as in
            "events/{time:%Y/%m/%d}/*.parquet"; "column": rows whose `column` is within the last
            `span`.
        span: length of the window before the scheduled time, which is excluded.
        column: column with timestamps, or seconds since 1970.
        since: "tick": files that any earlier tick has used are not new; "promoted": only files of
            promoted ticks are not new.
    """

    kind: Literal["new", "path", "column"] = "new"
    span: Span | None = None
    column: str | None = None
    since: Literal["tick", "promoted"] = "tick"

    @model_validator(mode="after")
    def _check_consistent(self) -> Window:
        if (self.span is None) != (self.kind == "new"):
            raise ValueError("a span for the kinds path and column, and only for them")
        if (self.column is None) == (self.kind == "column"):
            raise ValueError("a column for the kind column, and only for it")
        if self.since == "promoted" and self.kind != "new":
            raise ValueError("since: promoted only for the kind new")
        return self


class Data(_Section):
    """Training data of a tick.

    Attributes:
        files: paths, folders, patterns or fsspec URLs, as for `trainload launch --data`.
        window: selection among them.
        bad: treatment of files that lack a column, cannot be read or contain NaN: "refuse": the
            tick ends without a release; "skip": they are left out.
        least_rows: minimum number of rows; with fewer rows, there is no new data.
        drop: columns that are not inputs of the package.
        inspect_rows: number of rows, spread over the files, that are inspected for NaN and for the
            statistics of drift.
    """

    files: Some
    window: Window = Window()
    bad: Literal["refuse", "skip"] = "refuse"
    least_rows: Positive = 1
    drop: Names = ()
    inspect_rows: Positive = 1_000_000


class Slices(_Section):
    """Groups of held-out rows with their own requirement.

    Attributes:
        column: column by whose values rows are grouped. It is not an input of the package.
        require: expression that must hold for each group, as `Gate.require`.
        values: values of the column; None for all values, at most 64.
        least_rows: groups with fewer rows are not judged.
    """

    column: str
    require: str
    values: tuple[str | int | bool, ...] | None = None
    least_rows: Positive = 1


class Evaluation(_Section):
    """Held-out rows on which champion and challenger are compared.

    Attributes:
        files: held-out data, as `Data.files`. Alternatively,
        hold_out: fraction of the tick's rows that are held out. They are selected by their
            positions in their files.
        batches: maximum number of global batches.
        slices: groups with their own requirement.
    """

    files: Some | None = None
    hold_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    batches: Positive | None = None
    slices: Slices | None = None

    @model_validator(mode="after")
    def _check_exclusive_keys(self) -> Evaluation:
        if (self.files is None) == (self.hold_out is None):
            raise ValueError("either files or hold_out")
        return self


class Train(_Section):
    """Training of a challenger.

    Attributes:
        steps: number of updates. Alternatively,
        epochs: number of passes over all rows. If neither is given, the package's steps apply.
        start: initial weights: those of the "current" release, or of the line's "first" release.
        checkpoint_every: updates between two checkpoints; None for one at the end.
        optimizer: initial optimizer state: "kept" from the end of the run that created the release
            from which it starts, or "fresh".
        settings: settings of the run and of the training, as for `trainload launch --set`.
    """

    steps: Positive | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    start: Literal["current", "first"] = "current"
    checkpoint_every: Positive | None = None
    optimizer: Literal["fresh", "kept"] = "fresh"
    settings: Annotated[
        dict[str, str | int | float | bool | tuple[str, ...]],
        WithJsonSchema(settings_schema(without=KEYS_ELSEWHERE)),
    ] = Field(default_factory=dict, alias="set")

    @model_validator(mode="after")
    def _check_exclusive_keys(self) -> Train:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps or epochs, not both")
        if self.optimizer == "kept" and self.start != "current":
            raise ValueError("optimizer: kept only with start: current")
        return self

    @property
    def given(self) -> tuple[str, ...]:
        """Settings in the form of --set."""
        return tuple(
            f"{name}={_format_value(value)}" for name, value in sorted(self.settings.items())
        )


class Resources(_Section):
    """Resources for training and evaluation.

    Attributes:
        backend: "ray", or "local" for one process.
        address: address of a Ray cluster; None for a local one, started for each run.
        nodes: number of nodes.
        workers: number of devices of each node.
        device: kind of the devices.
        strategy: parallelism strategy; None for the one that `trainload launch` chooses.
        plan: path of a plan that `trainload plan` wrote, which replaces the other keys.
        compile: True to compile the graphs.
    """

    backend: Literal["ray", "local"] = "ray"
    address: str | None = None
    nodes: Positive = 1
    workers: Positive = 1
    device: Literal["cpu", "cuda"] = "cpu"
    strategy: Strategy | None = None
    plan: str | None = None
    compile: bool = True

    @model_validator(mode="after")
    def _check_consistent(self) -> Resources:
        if self.backend == "local" and (self.nodes, self.workers, self.address) != (1, 1, None):
            raise ValueError(
                "no nodes, workers or address with backend: local, which is one process"
            )
        return self


class Drift(_Section):
    """Thresholds for drift from the champion's training data. 0 means no drift, 0.1 little, 0.25
    much.

    Attributes:
        warn: drift of a column from which there is a warning; None for no warnings.
        bar: drift of a column from which the challenger is rejected; None to reject none.
    """

    warn: Annotated[float, Field(gt=0)] | None = 0.2
    bar: Annotated[float, Field(gt=0)] | None = None


class Gate(_Section):
    """Requirements for the promotion of a challenger.

    Attributes:
        require: expression over the metrics of champion and challenger (docs/guides/retraining.md).
        drift: thresholds for the drift of its data.
    """

    require: str = "eval.loss <= champion.eval.loss"
    drift: Drift = Drift()


class Lease(_Section):
    """Mutual exclusion of the ticks of a line.

    Attributes:
        seconds: time without a renewal after which another scheduler may take the lease.
        taken: behavior of a tick while another one runs: "forbid": it ends immediately; "queue": it
            waits; "replace": it requests the other one to stop.
        patience: maximum time that it waits.
    """

    seconds: Span = timedelta(seconds=60)
    taken: Literal["forbid", "queue", "replace"] = "forbid"
    patience: Span = timedelta(hours=6)


class Timing(_Section):
    """Schedule of the ticks.

    Attributes:
        every: interval between ticks, counted from the beginning of 1970 in UTC. Alternatively,
        cron: five fields of a crontab.
        zone: time zone of the crontab.
        missed: treatment of times that passed while nothing ran: "skip" skips them, "once" runs the
            last of them.
    """

    every: Span | None = None
    cron: str | None = None
    zone: str = "UTC"
    missed: Literal["skip", "once"] = "once"

    @model_validator(mode="after")
    def _check_exclusive_keys(self) -> Timing:
        if (self.every is None) == (self.cron is None):
            raise ValueError("either every or cron")
        if self.every is not None and self.zone != "UTC":
            raise ValueError(
                "a zone only with cron: every counts from the beginning of 1970 in UTC"
            )
        return self


class Retention(_Section):
    """Retention of runs and releases.

    Attributes:
        runs: number of the newest runs whose folders are kept, in addition to the champion's.
        releases: number of the newest releases that were current whose files are kept, so that
            `rollback` can use them; None to keep all. The files of the newest challenger, and of
            the release from which each training starts, are kept as well. Other lines of the store
            are not affected.
    """

    runs: Positive = 3
    releases: Positive | None = None


class Handover(_Section):
    """Handover of a promoted release to serving.

    Attributes:
        form: format of the export, as for `trainload export`.
        place: folder or URL to which each release is exported under its own name. In a folder the
            link `current` points to the newest one, at a URL the file `current` contains its name.
        graph: graph of the package, for pt2 and aoti; None for the prediction graph.
        command: command that is run afterwards. It receives the tick's record as JSON on standard
            input, and the export's path as its last argument.
        timeout: maximum duration of the command.
    """

    form: Literal["pt2", "aoti", "huggingface"] = "huggingface"
    place: str
    graph: str | None = None
    command: Names = ()
    timeout: Span = timedelta(minutes=10)

    @model_validator(mode="after")
    def _check_consistent(self) -> Handover:
        if self.form == "huggingface" and self.graph is not None:
            raise ValueError(
                "a graph only with the forms pt2 and aoti: huggingface contains only weights"
            )
        return self


class Hook(_Section):
    """A command that is notified of the end of a tick. It receives the tick's record as JSON on
    standard input.

    Attributes:
        command: the command and its arguments, run without a shell.
        outcomes: outcomes for which it is run.
        timeout: maximum duration of the command.
    """

    command: Some
    outcomes: tuple[Outcome, ...] = (
        "promoted",
        "rejected",
        "conflict",
        "bad data",
        "failed",
    )
    timeout: Span = timedelta(seconds=60)


class Mlflow(_Section):
    """MLflow's model registry, at MLFLOW_REGISTRY_URI or MLFLOW_TRACKING_URI. The line's current
    release is registered there as a version of a model, to which an alias points.

    Attributes:
        model: name of the registered model; None for the name of the line.
        alias: alias of the version that is current.
        timeout: maximum duration of an update of the registry.
    """

    model: Annotated[str, Field(pattern=r"^[^/:'\"`]{1,256}$")] | None = None
    alias: str = "champion"
    timeout: Span = timedelta(seconds=60)


class Webhook(_Section):
    """An HTTP server that is notified of what happens to a line. Each event is delivered at least
    once.

    Attributes:
        url: its URL, or a reference to it such as ${env:HOOK_URL}.
        secret: reference to the secret with which messages are signed, such as ${env:HOOK_SECRET};
            None for unsigned messages.
        events: events of which it is notified: outcomes of ticks, and "rolled back" if an earlier
            release is made current again. Manual promotions are "promoted" too.
        timeout: maximum duration of one attempt to deliver an event.
        attempts: attempts within a tick. An event that could not be delivered is delivered in the
            next one.
    """

    url: Annotated[str, Field(pattern=r"^(https?://|\$\{)")]
    secret: Annotated[str, Field(pattern=rf"^{REFERENCE.pattern}$")] | None = None
    events: tuple[Outcome | Literal["rolled back"], ...] = (
        "promoted",
        "rejected",
        "rolled back",
        "failed",
    )
    timeout: Span = timedelta(seconds=10)
    attempts: Annotated[Positive, Field(le=10)] = 3

    @model_validator(mode="after")
    def _check_no_credentials(self) -> Webhook:
        if HIDDEN in redacted(self.url):
            raise ValueError("a URL without credentials: refer to it as ${env:NAME}")
        return self


class Config(_Section):
    """Configuration of a retraining.

    Attributes:
        store: folder or fsspec URL of the store for its releases and records.
        line: line of the store's releases.
        package: package that is published as the line's first release if it has none: a folder, or
            STORE#LINE/N.
        runs: folder for runs, on storage that all nodes share, or its URL.
        attempts: number of failures after which a tick is given up, at most 20. A tick that is
            killed from outside is begun up to 20 times.
    """

    store: str
    line: Line
    package: str | None = None
    runs: str = "retraining"
    data: Data
    evaluation: Evaluation
    train: Train = Train()
    cluster: Resources = Resources()
    gate: Gate = Gate()
    schedule: Timing | None = None
    lease: Lease = Lease()
    attempts: Annotated[Positive, Field(le=MOST_ATTEMPTS)] = 3
    retention: Retention = Retention()
    handover: Handover | None = None
    notify: Hook | None = None
    mlflow: Mlflow | None = None
    webhooks: Annotated[tuple[Webhook, ...], Field(max_length=20)] = ()

    @field_validator("webhooks")
    @classmethod
    def _check_distinct_urls(cls, webhooks: tuple[Webhook, ...]) -> tuple[Webhook, ...]:
        urls = [hook.url for hook in webhooks]
        if len(set(urls)) < len(urls):  # the records of deliveries are those of a URL
            raise ValueError("each URL once, with all of its events")
        return webhooks

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON data. Law: `Config.model_validate(c.to_json()) == c`."""
        return self.model_dump(mode="json", by_alias=True)


OWN = (
    "store",
    "runs",
    "cluster",
    "schedule",
    "lease",
    "retention",
    "handover",
    "notify",
    "mlflow",
    "webhooks",
)
"""Keys that each machine reads from its own file only. Commands and folders in records of the store
are not used, since write access to the store must not imply permission to run commands here.
"""


def checked(raw: Mapping[str, Any], where: str) -> Config:
    """Build a configuration from keys and values.

    Raises:
        RequestError: a key or value is not allowed; names the key, the value and what is allowed.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [str(part) for part in first["loc"]]
        raise _refusal(first, place, where) from error


def _refusal(first: Any, place: Sequence[str], where: str) -> RequestError:
    key = ".".join(place)
    at = f"{where}, {key}" if key else where
    if first["type"] == "extra_forbidden":
        keys = _keys(place[:-1])
        hint = did_you_mean(
            place[-1], keys, "`trainload retrain init` writes a file with all keys."
        )
        return RequestError(
            "unknown key", where=at, expected=f"one of {', '.join(keys)}", got=place[-1], hint=hint
        )
    if first["type"] == "missing":
        return RequestError(
            "a key is missing",
            where=at,
            hint="`trainload retrain init` writes a file with all keys.",
        )
    allowed = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return RequestError(
        "a value is not allowed",
        where=at,
        expected=allowed,
        got=_format_value(first["input"])[:200],
        hint=nearest_literal(first),
    )


def _keys(place: Sequence[str]) -> list[str]:
    """Return the keys that are allowed at a place."""
    kind: Any = Config
    for part in place:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and part in kind.model_fields:
            kind = _section_of(kind.model_fields[part].annotation)
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return []
    return sorted(field.alias or name for name, field in kind.model_fields.items())


def _section_of(kind: Any) -> Any:
    """Return the section in a type such as `Slices | None` or `tuple[Webhook, ...]`."""
    if get_origin(kind) in (Union, UnionType, tuple):
        return next(
            (
                each
                for each in get_args(kind)
                if isinstance(each, type) and issubclass(each, BaseModel)
            ),
            kind,
        )
    return kind


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return (
        ",".join(_format_value(each) for each in value)
        if isinstance(value, (list, tuple))
        else str(value)
    )
