"""The package of a run, as its workers and its driver open it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.fetching import fetched, is_reference
from trainload.launching.node.libraries import open_for_run
from trainload.launching.run.run_spec import RunSpec
from trainload.packaging.package import Package


def frozen_package(spec: RunSpec) -> Package:
    """A run's package as it was frozen: what trained weights are written into. One from a store is fetched into this node's cache first.

    Raises: as `open_for_run` and `fetched`.
    """
    path, source = Path(spec.package), None
    if is_reference(spec.package):
        assert spec.digest is not None  # what came later than stores has one
        path, source = fetched(spec.package, default_cache_dir(), spec.digest), spec.package
    package = open_for_run(path, spec.libraries, spec.policies, spec.digest, trust_extensions=spec.trust_extensions)
    return replace(package, source=source)


def trained_package(spec: RunSpec) -> Package:
    """A run's package with what was changed at its launch: what is planned, compiled and trained. Raises: as `frozen_package`."""
    return spec.overrides.apply(frozen_package(spec), spec.steps)
