"""A profile of a run whose records are at a URL."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.launch.profiling.profiled import while_it_runs
from tests.launch.run_at_url.local_runs import has_begun
from tests.waiting import wait_until

import trainload
from trainload.core.storage.open_files import open_files
from trainload.launching.api.profile_run import Profile
from trainload.packaging.package import Package


def test_its_files_are_at_the_url(tiny: Package, tiny_data: Path, url: str) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")

    def ask() -> Profile:
        wait_until(lambda: has_begun(url))
        return trainload.profile(url, steps=2)

    profile = while_it_runs(ask, tiny, plan, tiny_data, url, backend="local")
    assert profile.folder == f"{url}/profiles/{profile.step}"
    files = open_files(profile.folder)
    assert files.names("") == ["rank-0.json", "rank-0.trace.json.gz"]
    trace = files.read("rank-0.trace.json.gz", 2**24)
    assert trace is not None
    names = {event["name"] for event in json.loads(gzip.decompress(trace))["traceEvents"]}
    assert {f"step {profile.step}", f"step {profile.step + 1}"} <= names
    assert open_files(url).size("profile-now") is None
