"""The package of a run, as its workers and its driver open it."""

from __future__ import annotations

from pathlib import Path

from trainload.launch.libraries import open_for_run
from trainload.launch.spec import RunSpec
from trainload.packaging.read import Package


def frozen_package(spec: RunSpec) -> Package:
    """A run's package as it was frozen: what trained weights are written into. Raises: as `open_for_run`."""
    return open_for_run(Path(spec.package), spec.libraries, spec.policies, spec.digest, trust_extensions=spec.trust_extensions)


def trained_package(spec: RunSpec) -> Package:
    """A run's package with what was changed at its launch: what is planned, compiled and trained. Raises: as `frozen_package`."""
    return spec.overrides.apply(frozen_package(spec), spec.steps)
