"""What can be known of a retraining before anything runs: of the file alone, and of the file with its store, package and data."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from trainload.capture.errors import DataError, MissingDataError, RequestError
from trainload.retraining.config import Config
from trainload.retraining.expression import Expression, parse
from trainload.retraining.windows import check_window

if TYPE_CHECKING:
    from trainload.packaging.read import Package
    from trainload.retraining.stages import Stages

_FILES = 10
"""How many files are looked at: the last ones."""
_ALWAYS = ("eval.steps", "train.loss", "data.rows", "drift.greatest")


def check_config(config: Config) -> None:
    """Check a file's expressions, schedule, window and settings.

    Raises:
        RequestError: one is not: names the key, the value and what is allowed.
    """
    from trainload.retraining.schedule import schedule_of
    from trainload.retraining.training import settings_of

    expressions(config)
    check_window(config)
    if config.schedule is not None:
        schedule_of(config.schedule)
    settings_of(config)


def expressions(config: Config) -> dict[str, Expression]:
    """The expressions of a file, by their keys. Raises: RequestError where one is none."""
    found = {"gate.require": config.gate.require}
    if config.evaluation.slices is not None:
        found["evaluation.slices.require"] = config.evaluation.slices.require
    return {key: parse(text, key) for key, text in found.items()}


def known_names(package: Package, *, sliced: bool) -> set[str]:
    """What expressions may name, of a package. sliced: those of slices may name more."""
    metrics = _metrics(package)
    scores = {f"{whose}.{name}" for whose in ("eval", "champion.eval") for name in ("loss", *metrics)}
    return {*_ALWAYS, *scores, *(f"drift.{name}" for name in package.manifest.data_inputs()), *(("slice.rows",) if sliced else ())}


def _metrics(package: Package) -> list[str]:
    """What an evaluation of a package gives beside the loss."""
    found: list[str] = []
    for graph in dict.fromkeys(turn.graph for turn in package.recipe.turns):
        own = [output.name for output in package.manifest.graphs[graph].outputs if output.role == "metric"]
        found += own if graph == package.recipe.main else [f"{graph}.{name}" for name in ("loss", *own)]
    return found


def check_known_names(config: Config, package: Package) -> None:
    """Check that a file's expressions name values that a package has. Raises: RequestError."""
    for key, expression in expressions(config).items():
        expression.check(known_names(package, sliced=key != "gate.require"))


def check(config: Config, stages: Stages) -> dict[str, Any]:
    """Everything that can be known of a retraining without running it. Returns: what there is to say.

    Raises:
        RequestError: something is wrong in the file.
        TrainloadError: the store, the package or the data cannot be used.
    """
    from trainload.packaging.stores.store import Store
    from trainload.retraining.training import training_plan

    check_config(config)
    try:
        store: Store | None = Store(config.store)
    except RequestError:
        store = None
    current = None if store is None else store.current(config.line)
    if current is None and config.package is None:
        raise RequestError("the line has no current release", where=f"{config.store}, line {config.line}", cure="Give the key package.")
    package = stages.open(f"{config.store}#{config.line}" if current is not None else str(config.package))
    check_known_names(config, package)
    plan = training_plan(config, package)
    return {
        "package": package.digest,
        "current": "none yet" if current is None else current.release,
        "plan": f"{plan.strategy} on {plan.world_size}",
        "steps": config.train.steps or package.recipe.steps,
        "data": _data(config, package),
    }


def _data(config: Config, package: Package) -> str:
    """What there is to say of the data of a tick that would be due now.

    Raises:
        DataError: none of the last files can be trained on.
    """
    from trainload.retraining.snapshot import newest

    try:
        count, last = newest(config, datetime.now(UTC), package, _FILES)
    except MissingDataError as error:
        return f"none yet: {error}"
    bad = [file for file in last if file.problem]
    if len(bad) == len(last):
        raise DataError("no file of the data can be trained on", where="data.files", got=bad[-1].problem)
    text = f"files: {count}; rows of the last {len(last)}: {sum(file.rows for file in last):,}"
    return text + (f"; bad: {len(bad)}, the last one: {bad[-1].problem}" if bad else "")
