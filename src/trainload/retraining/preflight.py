"""The preflight check of a retraining: its file together with its store, package and data.

Nothing is run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from trainload.core.errors import DataError, MissingDataError, RequestError
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config
from trainload.retraining.data.snapshot import newest
from trainload.retraining.ticks.checks import check_config, check_known_names
from trainload.retraining.ticks.tick_stages import Stages
from trainload.retraining.ticks.training import training_plan

_FILES = 10
"""Number of the latest files whose rows are read."""


def check(config: Config, stages: Stages) -> dict[str, Any]:
    """Check everything about a retraining that can be checked without running it, and return a
    summary.

    Raises:
        RequestError: something is wrong in the file.
        TrainloadError: the store, the package or the data cannot be used.
    """
    check_config(config)
    try:
        store: Store | None = Store(config.store)
    except RequestError:
        store = None
    current = None if store is None else store.current(config.line)
    if current is None and config.package is None:
        raise RequestError(
            "the line has no current release",
            where=f"{config.store}, line {config.line}",
            hint="Set the key `package`.",
        )
    package = stages.open(
        f"{config.store}#{config.line}" if current is not None else str(config.package)
    )
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
    """Describe the data of a tick that would be due now.

    Raises:
        DataError: none of the last files can be trained on.
    """
    try:
        count, last = newest(config, datetime.now(UTC), package, _FILES)
    except MissingDataError as error:
        return f"none yet: {error}"
    bad = [file for file in last if file.problem]
    if len(bad) == len(last):
        raise DataError(
            "none of the data files can be used for training",
            where="data.files",
            got=bad[-1].problem,
        )
    text = f"files: {count}; rows of the last {len(last)}: {sum(file.rows for file in last):,}"
    return text + (f"; bad: {len(bad)}, the last one: {bad[-1].problem}" if bad else "")
