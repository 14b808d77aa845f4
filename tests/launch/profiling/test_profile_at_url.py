"""A profile of a run whose records are at a URL."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tests.launch.profiling.profiled import while_it_runs
from tests.launch.run_at_url.local_runs import has_begun
from tests.waiting import wait_until

import trainload
from trainload.cli import main as cli
from trainload.core.storage.open_files import open_files
from trainload.packaging.package import Package


def test_its_files_are_at_the_url(
    tiny: Package, tiny_data: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")

    def ask() -> int:
        wait_until(lambda: has_begun(url))
        return cli.run(["profile", url, "--steps", "2", "--json"])

    assert while_it_runs(ask, tiny, plan, tiny_data, url, backend="local") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == f"{url}/profiles/{found['step']}"
    files = open_files(found["folder"])
    assert files.names("") == ["rank-0.json", "rank-0.trace.json.gz"]
    trace = files.read("rank-0.trace.json.gz", 2**24)
    assert trace is not None
    names = {event["name"] for event in json.loads(gzip.decompress(trace))["traceEvents"]}
    assert {f"step {found['step']}", f"step {found['step'] + 1}"} <= names
    assert open_files(url).size("profile-now") is None
