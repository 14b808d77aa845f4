"""Builds for the runs of a retraining, so that a tick on a fresh machine compiles nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainload.core.errors import RequestError
from trainload.core.storage.interface import NO_OPTIONS
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config
from trainload.retraining.ticks.training import plan_of, settings_of, training_plan

if TYPE_CHECKING:
    from trainload.packaging.package import Package
    from trainload.packaging.stores.stored_builds import BuildPushReport
    from trainload.sharding.plans.plan import Plan


def push_builds(
    config: Config,
    open_package: Callable[[str], Package],
    key: Path,
    password: bytes | None = None,
    on_stage: Callable[[str, float], None] = lambda *_: None,
) -> list[BuildPushReport]:
    """Make, sign and publish the builds for the runs of a retraining: one for its training, and
    another for its evaluation if settings of the training change graphs.

    The line's later releases have the same program, so the builds serve them too.

    Args:
        config: the retraining.
        open_package: function that opens a package by its name in a store.
        key: PEM file with the private key of a maker of builds.
        password: password of an encrypted key.
        on_stage: called with (part, seconds) when each part of a build is done.

    Raises:
        RequestError: the line has no current release, or a setting is not allowed.
        SignatureError: the key cannot be used.
        TrainloadError: as for `build` and `push_build`.
    """
    from trainload.launching.api.make_build import build
    from trainload.publishing.stores import push_build
    from trainload.publishing.trust import sign

    if Store(config.store, NO_OPTIONS).current(config.line) is None:
        raise RequestError(
            "the line has no current release",
            where=f"{config.store}, line {config.line}",
            hint="Publish the first package: trainload push.",
        )
    reports = []
    targets = set[str]()
    for package, plan, deterministic in _runs(
        config, open_package(f"{config.store}#{config.line}")
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "build"
            report = build(package, plan, path, deterministic=deterministic, on_stage=on_stage)
            if report.target.key in targets:
                continue
            targets.add(report.target.key)
            sign(path, key, password=password)
            reports.append(push_build(path, config.store))
    return reports


def _runs(config: Config, package: Package) -> list[tuple[Package, Plan, bool]]:
    """Return what a tick trains and what it evaluates, each with its plan, and True if it must be
    deterministic.
    """
    from trainload.launching.settings.overrides import Overrides

    settings = settings_of(config)
    trained = settings.overrides.apply(package, config.train.steps)
    evaluated = Overrides(precision=settings.overrides.precision).apply(package, None)
    return [
        (trained, training_plan(config, package), bool(settings.run.get("deterministic", True))),
        (evaluated, plan_of(config, evaluated, settings.batch), True),
    ]
