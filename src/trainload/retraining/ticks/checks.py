"""Checks of a retraining's configuration file: by itself, and against the package that it
trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainload.core.credentials import resolve
from trainload.retraining.config.config import Config
from trainload.retraining.config.expression import Expression, parse
from trainload.retraining.data.windows import check_window
from trainload.retraining.ticks.model_registry import check_mlflow
from trainload.retraining.ticks.webhooks import headers_of, url_of

if TYPE_CHECKING:
    from trainload.packaging.package import Package

_COMMON_NAMES = ("eval.steps", "train.loss", "data.rows", "drift.greatest")


def check_config(config: Config) -> None:
    """Check a file's expressions, schedule, window, settings, and libraries and secrets for
    announcements.

    Raises:
        RequestError: one is invalid; names the key, the value and the allowed values.
        StorageError: MLflow is not installed, or a webhook's URL or secret is not set here, or
            malformed.
    """
    from trainload.retraining.ticks.tick_times import schedule_of
    from trainload.retraining.ticks.training import settings_of

    expressions(config)
    check_window(config)
    if config.schedule is not None:
        schedule_of(config.schedule)
    settings_of(config)
    if config.mlflow is not None:
        check_mlflow()
    for hook in config.webhooks:
        url_of(hook)
        if hook.secret is not None:
            headers_of("", b"", resolve(hook.secret), 0)


def expressions(config: Config) -> dict[str, Expression]:
    """Parse the expressions of a file, by their keys. Raises RequestError if one is invalid."""
    texts = {"gate.require": config.gate.require}
    if config.evaluation.slices is not None:
        texts["evaluation.slices.require"] = config.evaluation.slices.require
    return {key: parse(text, key) for key, text in texts.items()}


def known_names(package: Package, *, sliced: bool) -> set[str]:
    """Return the names that expressions about a package may use; with `sliced`, including those for
    slices.
    """
    metrics = _metrics(package)
    scores = {
        f"{prefix}.{name}" for prefix in ("eval", "champion.eval") for name in ("loss", *metrics)
    }
    return {
        *_COMMON_NAMES,
        *scores,
        *(f"drift.{name}" for name in package.manifest.data_inputs()),
        *(("slice.rows",) if sliced else ()),
    }


def _metrics(package: Package) -> list[str]:
    """Return the names of the metrics of a package's evaluation."""
    names: list[str] = []
    for graph in dict.fromkeys(turn.graph for turn in package.recipe.turns):
        metrics = [
            output.name
            for output in package.manifest.graphs[graph].outputs
            if output.role == "metric"
        ]
        names += (
            metrics
            if graph == package.recipe.main
            else [f"{graph}.{name}" for name in ("loss", *metrics)]
        )
    return names


def check_known_names(config: Config, package: Package) -> None:
    """Raise RequestError if a file's expressions use names that are unknown for a package."""
    for key, expression in expressions(config).items():
        expression.check(known_names(package, sliced=key != "gate.require"))
