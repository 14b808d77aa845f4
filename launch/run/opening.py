"""Open the package of a run in its workers and its driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.fetching import fetched
from trainload.launching.node.libraries import open_for_run
from trainload.launching.run.given_weights import with_given
from trainload.launching.run.run_spec import RunSpec
from trainload.packaging.package import Package
from trainload.packaging.stores.references import is_reference


def frozen_package(spec: RunSpec) -> Package:
    """Open a run's package as it was frozen, with the weights that the run was given; the output of
    the run is based on it.

    A package in a store is fetched into this node's cache first. The errors are those of
    `open_for_run` and `fetched`.
    """
    path, source = Path(spec.package), None
    if is_reference(spec.package):
        assert spec.digest is not None  # runs have recorded it for longer than stores have existed
        path, source = fetched(spec.package, default_cache_dir(), spec.digest), spec.package
    package = open_for_run(
        path, spec.libraries, spec.policies, spec.digest, trust_extensions=spec.trust_extensions
    )
    return with_given(replace(package, source=source), spec.given, spec.policies)


def trained_package(spec: RunSpec) -> Package:
    """Open a run's package and apply the run's overrides: the package that is planned, compiled and
    trained.

    The errors are those of `frozen_package`.
    """
    package = spec.overrides.apply(frozen_package(spec), spec.steps)
    return with_given(package, spec.given, spec.policies)
