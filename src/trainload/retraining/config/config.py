"""What a retraining is: a YAML or TOML file, read and checked before anything runs."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from trainload.core.errors import RequestError
from trainload.launching.settings.describe import settings_schema
from trainload.packaging.stores.releases import Line
from trainload.sharding.plans.strategies import Strategy

MOST_BYTES = 2**20
KEYS_ELSEWHERE = {"eval_batches": "evaluation.batches", "optimizer_from": "train.optimizer"}
"""Settings of a run that have a key of their own in the file."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"([0-9]{1,9}) ?([smhdw])")
_LONGEST = timedelta(days=36500)


def seconds_of(text: object) -> object:
    """The seconds of a text such as "90s", "30m", "6h", "7d" or "2w"; anything else as it is."""
    found = _SPAN.fullmatch(text) if isinstance(text, str) else None
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    return timedelta(seconds=seconds) if 0 < seconds <= _LONGEST.total_seconds() else text


def _check_span(value: object) -> object:
    if not isinstance(value, timedelta) or not timedelta(0) < value <= _LONGEST:
        raise ValueError("a number of seconds, minutes, hours, days or weeks, such as 90s, 30m, 6h, 7d or 2w; at most 36500d")
    return value


def _check_folder(path: str) -> str:
    if "://" in path:
        raise ValueError("a folder on storage that all machines share, not a URL")
    return path


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _as_span(span: timedelta) -> str:
    return f"{round(span.total_seconds())}s"


Span = Annotated[
    timedelta,
    BeforeValidator(_check_span),
    BeforeValidator(seconds_of),
    PlainSerializer(_as_span, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": f"^{_SPAN.pattern}$"}),
]
"""A time, written "6h"."""
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_several),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""One text or a list of them."""
Some = Annotated[Names, Field(min_length=1)]
"""The same, and not none."""
Folder = Annotated[str, AfterValidator(_check_folder)]
"""A path of this machine."""
Positive = Annotated[int, Field(ge=1, strict=True)]
MOST_ATTEMPTS = 20
"""How often a tick is begun at most."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Window(_Section):
    """Which of the data a tick has.

    Attributes:
        kind: "new": the files that no tick before has had; "path": those whose paths are of the last `span`, where `files` says how a path
            has the time, as in "events/{time:%Y/%m/%d}/*.parquet"; "column": the rows whose `column` is of the last `span`.
        span: how far back from the scheduled time, which is not part of it.
        column: of timestamps, or of seconds since 1970.
        since: "tick": files that an earlier tick has had are not new; "promoted": only those of the ticks that were promoted are not.
    """

    kind: Literal["new", "path", "column"] = "new"
    span: Span | None = None
    column: str | None = None
    since: Literal["tick", "promoted"] = "tick"

    @model_validator(mode="after")
    def _whole(self) -> Window:
        if (self.span is None) != (self.kind == "new"):
            raise ValueError("a span for the kinds path and column, and only for them")
        if (self.column is None) == (self.kind == "column"):
            raise ValueError("a column for the kind column, and only for it")
        if self.since == "promoted" and self.kind != "new":
            raise ValueError("since: promoted only for the kind new")
        return self


class Data(_Section):
    """The rows that a tick trains on.

    Attributes:
        files: paths, folders, patterns or fsspec URLs, as of `trainload launch --data`.
        window: which of them.
        bad: what happens to files that lack a column, cannot be read or hold a NaN: "refuse": the tick ends without a release; "skip":
            they are left out.
        least_rows: with fewer the tick ends as one without new data.
        drop: columns that are no inputs of the package.
        inspect_rows: rows, spread over the files, whose values are looked at for NaN and for the statistics of drift.
    """

    files: Some
    window: Window = Window()
    bad: Literal["refuse", "skip"] = "refuse"
    least_rows: Positive = 1
    drop: Names = ()
    inspect_rows: Positive = 1_000_000


class Slices(_Section):
    """Groups of the held-out rows that have a bar of their own.

    Attributes:
        column: whose values make the groups; it is no input of the package.
        require: the bar of each, an expression as `Gate.require`.
        values: which values; None: all that there are, at most 64.
        least_rows: with fewer a group is not judged.
    """

    column: str
    require: str
    values: tuple[str | int | bool, ...] | None = None
    least_rows: Positive = 1


class Evaluation(_Section):
    """The rows on which champion and challenger are compared.

    Attributes:
        files: held-out data, as `Data.files`; or
        hold_out: the share of the tick's own rows that are held out. Which ones follows from their places in their files.
        batches: at most so many global batches.
        slices: groups with bars of their own.
    """

    files: Some | None = None
    hold_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    batches: Positive | None = None
    slices: Slices | None = None

    @model_validator(mode="after")
    def _one(self) -> Evaluation:
        if (self.files is None) == (self.hold_out is None):
            raise ValueError("either files or hold_out")
        return self


class Train(_Section):
    """How a challenger is trained.

    Attributes:
        steps: updates; or
        epochs: how often all rows are trained on. Neither: the steps of the package.
        start: from which weights: those of the release that is "current", or those that the line's "first" release has.
        checkpoint_every: updates between two checkpoints; None: one at the end.
        optimizer: whether its state is that at the end of the run that made the release which it starts from: "kept"; or "fresh".
        settings: of the run and of what it trains, as of `trainload launch --set`.
    """

    steps: Positive | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    start: Literal["current", "first"] = "current"
    checkpoint_every: Positive | None = None
    optimizer: Literal["fresh", "kept"] = "fresh"
    settings: Annotated[dict[str, str | int | float | bool | tuple[str, ...]], WithJsonSchema(settings_schema(without=KEYS_ELSEWHERE))] = (
        Field(default_factory=dict, alias="set")
    )

    @model_validator(mode="after")
    def _one(self) -> Train:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps or epochs, not both")
        if self.optimizer == "kept" and self.start != "current":
            raise ValueError("optimizer: kept only with start: current")
        return self

    @property
    def given(self) -> tuple[str, ...]:
        """The settings as --set has them."""
        return tuple(f"{name}={_spelled(value)}" for name, value in sorted(self.settings.items()))


class Resources(_Section):
    """Where a challenger is trained and evaluated.

    Attributes:
        backend: "ray", or "local": one process.
        address: of a Ray cluster; None: a local one, for each run.
        nodes: of the cluster. workers: devices of each. device: of which kind.
        strategy: how the package is spread over them; None: as `trainload launch` chooses.
        plan: a plan that `trainload plan` wrote, in place of the others.
        compile: whether graphs are compiled.
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
    def _whole(self) -> Resources:
        if self.backend == "local" and (self.nodes, self.workers, self.address) != (1, 1, None):
            raise ValueError("no nodes, workers or address with backend: local, which is one process")
        return self


class Drift(_Section):
    """What is thought of data that is not like what the champion was trained on; 0: nothing, 0.1: a little, 0.25: much.

    Attributes:
        warn: a column from here on is warned of; None: none is.
        bar: a column from here on rejects the challenger; None: none does.
    """

    warn: Annotated[float, Field(gt=0)] | None = 0.2
    bar: Annotated[float, Field(gt=0)] | None = None


class Gate(_Section):
    """What a challenger must be like to be promoted.

    Attributes:
        require: an expression over the metrics of both: docs/retraining.md.
        drift: of its data.
    """

    require: str = "eval.loss <= champion.eval.loss"
    drift: Drift = Drift()


class Lease(_Section):
    """How ticks of one line keep out of each other's way.

    Attributes:
        seconds: how long a scheduler may be silent before another one takes its place.
        taken: what a tick does where another one is under way: "forbid": it ends at once; "queue": it waits; "replace": it asks that one
            to stop.
        patience: how long it waits.
    """

    seconds: Span = timedelta(seconds=60)
    taken: Literal["forbid", "queue", "replace"] = "forbid"
    patience: Span = timedelta(hours=6)


class Timing(_Section):
    """When ticks are due.

    Attributes:
        every: a time between two, from the beginning of 1970 in UTC on; or
        cron: a crontab's five fields, in the time `zone`.
        missed: times that have passed while nothing ran: "skip"; or "once": the last of them is run.
    """

    every: Span | None = None
    cron: str | None = None
    zone: str = "UTC"
    missed: Literal["skip", "once"] = "once"

    @model_validator(mode="after")
    def _one(self) -> Timing:
        if (self.every is None) == (self.cron is None):
            raise ValueError("either every or cron")
        if self.every is not None and self.zone != "UTC":
            raise ValueError("a zone only with cron: every counts from the beginning of 1970 in UTC")
        return self


class Retention(_Section):
    """What is kept.

    Attributes:
        runs: folders of the newest runs; that of the champion's run is kept beside them.
        releases: so many of the releases that were current keep their files, the newest ones, which `rollback` can go back to; None: all
            releases do. The newest challenger keeps them too, and the release that each training starts from. Other lines of the store are
            left alone.
    """

    runs: Positive = 3
    releases: Positive | None = None


class Handover(_Section):
    """What happens to a release when it is promoted, for those who serve it.

    Attributes:
        form: as of `trainload export`.
        place: a folder; each release is exported into it under its own name, and `current` there is a link to the newest one.
        graph: of pt2 and aoti: which of the package's graphs; None: the one for prediction.
        command: what is run afterwards: it gets the tick's record as JSON on its standard input, and the export's path as its last word.
        timeout: how long it may take.
    """

    form: Literal["pt2", "aoti", "huggingface"] = "huggingface"
    place: Folder
    graph: str | None = None
    command: Names = ()
    timeout: Span = timedelta(minutes=10)

    @model_validator(mode="after")
    def _whole(self) -> Handover:
        if self.form == "huggingface" and self.graph is not None:
            raise ValueError("a graph only with the forms pt2 and aoti: huggingface contains only weights")
        return self


class Hook(_Section):
    """A command that is told how a tick ended: it gets the tick's record as JSON on its standard input.

    Attributes:
        command: its words; no shell.
        outcomes: that it is told of.
        timeout: how long it may take.
    """

    command: Some
    outcomes: tuple[Literal["promoted", "rejected", "conflict", "bad data", "no data", "replaced", "failed"], ...] = (
        "promoted",
        "rejected",
        "conflict",
        "bad data",
        "failed",
    )
    timeout: Span = timedelta(seconds=60)


class Config(_Section):
    """A retraining.

    Attributes:
        store: where its releases and records are: a folder or an fsspec URL.
        line: of the store's releases.
        package: published as the line's first release where it has none: a folder, or STORE#LINE/N.
        runs: a folder for runs, on storage that all nodes share.
        attempts: how often a tick may fail before it is given up, 20 at most. One that is killed from outside is begun 20 times.
    """

    store: str
    line: Line
    package: str | None = None
    runs: Folder = "retraining"
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

    def to_json(self) -> dict[str, Any]:
        """As a record has it. Law: `Config.model_validate(c.to_json()) == c`."""
        return self.model_dump(mode="json", by_alias=True)


OWN = ("store", "runs", "cluster", "schedule", "lease", "retention", "handover", "notify")
"""The keys that are each machine's own. They come from its file alone: commands and folders that a record of the store names are not used,
since whoever may write to the store need not be allowed to run commands here."""


def read_config(path: Path) -> Config:
    """The retraining that a file describes. Relative paths in it start at its folder.

    Raises:
        RequestError: there is no such file, it is no YAML or TOML, or a key or value is not allowed: which, and what is.
    """
    if not path.is_file():
        raise RequestError("there is no such file", where=str(path), hint="Create one with `trainload retrain init FILE`.")
    data = path.read_bytes()
    if len(data) > MOST_BYTES:
        raise RequestError("the file is too large for a retraining configuration", where=str(path), expected=f"at most {MOST_BYTES} bytes")
    try:
        raw = tomllib.loads(data.decode()) if path.suffix == ".toml" else yaml.safe_load(data)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML"
        raise RequestError(f"this is not valid {kind}: {' '.join(str(error).split())}", where=str(path)) from error
    if not isinstance(raw, dict):
        raise RequestError(
            "the file does not contain a mapping", where=str(path), expected="keys and values: `trainload retrain init` writes them"
        )
    return _placed(checked(raw, str(path)), path.parent)


def checked(raw: Mapping[str, Any], where: str) -> Config:
    """A retraining of its keys and values.

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
        known = _keys(place[:-1])
        close = difflib.get_close_matches(place[-1], known, n=1)
        hint = f"Did you mean {close[0]}?" if close else "`trainload retrain init` writes a file with all keys."
        return RequestError("unknown key", where=at, expected=f"one of {', '.join(known)}", got=place[-1], hint=hint)
    if first["type"] == "missing":
        return RequestError("a key is missing", where=at, hint="`trainload retrain init` writes a file with all keys.")
    allowed = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return RequestError("a value is not allowed", where=at, expected=allowed, got=_spelled(first["input"])[:200])


def _keys(place: Sequence[str]) -> list[str]:
    """The keys that are allowed at a place."""
    kind: Any = Config
    for part in place:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and part in kind.model_fields:
            kind = _section_of(kind.model_fields[part].annotation)
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return []
    return sorted(field.alias or name for name, field in kind.model_fields.items())


def _section_of(kind: Any) -> Any:
    """The section in a type such as `Slices | None`."""
    if get_origin(kind) in (Union, UnionType):
        return next((each for each in get_args(kind) if isinstance(each, type) and issubclass(each, BaseModel)), kind)
    return kind


def _spelled(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(_spelled(each) for each in value) if isinstance(value, (list, tuple)) else str(value)


def _placed(config: Config, folder: Path) -> Config:
    """With the paths that start at the file's folder."""

    def whole(path: str) -> str:
        return path if "://" in path or path.startswith("${") else str((folder / Path(path).expanduser()).absolute())

    def reference(path: str) -> str:
        url, sharp, rest = path.partition("#")
        return whole(url) + sharp + rest

    def all_of(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(whole(each) for each in paths)

    def command_of(words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(whole(word) if number == 0 and "/" in word else word for number, word in enumerate(words))

    evaluation, handover, cluster = config.evaluation, config.handover, config.cluster
    changed: dict[str, Any] = {
        "store": whole(config.store),
        "package": None if config.package is None else reference(config.package),
        "runs": whole(config.runs),
        "data": config.data.model_copy(update={"files": all_of(config.data.files)}),
    }
    if evaluation.files is not None:
        changed["evaluation"] = evaluation.model_copy(update={"files": all_of(evaluation.files)})
    if handover is not None:
        changed["handover"] = handover.model_copy(update={"place": whole(handover.place), "command": command_of(handover.command)})
    if config.notify is not None:
        changed["notify"] = config.notify.model_copy(update={"command": command_of(config.notify.command)})
    if cluster.plan is not None:
        changed["cluster"] = cluster.model_copy(update={"plan": whole(cluster.plan)})
    return config.model_copy(update=changed)
