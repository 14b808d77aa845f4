"""Metrics of a run at the endpoints of its Ray cluster, where Prometheus scrapes them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.launch.commands import refused

import trainload
from trainload.deploy.grafana import board
from trainload.launching.api.launch import prepare
from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.sinks.measures import MEASURES, OF_NUMBERS, OWN, measure_of
from trainload.launching.sinks.sink import open_sinks
from trainload.packaging.package import Package

STEPS = 4
PATIENCE = 60.0
LINE = re.compile(r"(?P<name>ray_trainload_\w+)\{(?P<tags>[^}]*)\} (?P<value>\S+)")
Found = dict[tuple[str, str, str], float]
"""Metrics of a run: (name, run, metric) -> value."""


def scraped() -> list[tuple[str, dict[str, str], float]]:
    """Return name, tags and value of all run metrics that the cluster's node exports."""
    import ray

    node = ray.nodes()[0]  # type: ignore[no-untyped-call]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    return [
        (found["name"], dict(re.findall(r'(\w+)="([^"]*)"', found["tags"])), float(found["value"]))
        for found in LINE.finditer(text)
    ]


def of_run(run: str, ready: Callable[[Found], bool]) -> Found:
    """Return the metrics of a run, once `ready` accepts them or the time is up."""
    until = time.monotonic() + PATIENCE
    while True:
        found = {
            (name, tags["run"], tags.get("metric", "")): value
            for name, tags, value in scraped()
            if tags["run"] == run
        }
        if ready(found) or time.monotonic() > until:
            return found
        time.sleep(0.5)


def every_measure(step: int) -> list[Event]:
    """Return events with a value for every measure."""
    moment = time.time()
    numbers = {
        "loss": 0.5,
        "gradient_norm": 1.5,
        "loss_scale": 8.0,
        "seconds": 2.0,
        "data_wait": 0.5,
        "mfu": 0.25,
        "memory": 2**30,
    }
    numbers |= {"tokens_per_second": 100.0, "rows_per_second": 10.0}
    return [
        Event("step", {"step": step, "metrics": {"accuracy": 0.75}, **numbers}, moment),
        Event("eval", {"step": step + 1, "loss": 0.625, "metrics": {"accuracy": 0.875}}, moment),
        Event("checkpoint", {"step": step + 1, "seconds": 3.0, "bytes": 4096}, 1_790_000_000.0),
        Event(
            "statistics",
            {
                "step": step + 1,
                "activations": [],
                "parameters": [{"parameter": "head.weight", "ratio": 0.125}],
            },
            moment,
        ),
        Event("failure", {"message": "rank 1 died"}, moment),
        Event("warning", {"message": "slow"}, moment),
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "again_after",
    [0.0, pytest.param(25.0, marks=pytest.mark.slow, id="longer than Ray keeps a gauge")],
)
def test_prometheus_finds_every_measure_for_as_long_as_the_run_has_a_driver(
    ray_cluster: None, gpt: Package, tmp_path: Path, again_after: float
) -> None:
    from tests.report.made import made_run

    run = f"every-{again_after:g}"  # a new name: the cluster keeps old numbers for a while
    run_dir = made_run(tmp_path / run, [], digest=gpt.digest)
    with open_sinks(["prometheus"], run_dir, lambda event: None) as tell:
        for event in every_measure(6):
            tell(event)
        first = of_run(run, lambda found: len(found) == len(MEASURES))
        time.sleep(again_after)
        assert of_run(run, lambda found: len(found) == len(MEASURES)) == first
    values = {name: value for (name, _, _), value in first.items()}
    assert set(values) == {measure.exported for measure in MEASURES}
    expected = {
        "step": 7,
        "steps": 100,
        "running": 1,
        "loss": 0.5,
        "mfu_ratio": 0.25,
        "memory_bytes": 2**30,
        "failures": 1,
        "warnings": 1,
    }
    expected |= {
        "checkpoint_timestamp_seconds": 1_790_000_000,
        "checkpoint_step": 7,
        "step_seconds_total": 2,
        "data_wait_seconds_total": 0.5,
        "statistics": 0.125,
    }
    assert {name: values[f"ray_trainload_{name}"] for name in expected} == expected
    assert ("ray_trainload_metric", run, "accuracy") in first
    tags = next(tags for _, tags, _ in scraped() if tags["run"] == run)
    assert tags["package"] == gpt.digest[:12]
    assert of_run(run, lambda found: found.get(("ray_trainload_running", run, "")) == 0.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_ray_has_its_numbers_at_the_clusters_endpoints(
    ray_cluster: None, gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(gpt, trainload.Cluster(), "single")
    run_dir = tmp_path / "trained"
    trainload.launch(
        gpt, plan, gpt_data, run_dir=run_dir, steps=STEPS, compile=False, sinks=["prometheus"]
    )
    # the metrics appear at different times
    step, steps, loss = (
        (f"ray_trainload_{name}", "trained", "") for name in ("step", "steps", "loss")
    )
    found = of_run(
        "trained", lambda found: found.get(step) == STEPS and {steps, loss} <= found.keys()
    )
    assert found[loss] == pytest.approx(losses(read_events(run_dir))[-1])
    assert found[steps] == STEPS


def test_without_ray_it_is_said_before_anything_starts(
    gpt: Package, gpt_data: Path, tmp_path: Path, capsys: Any
) -> None:
    options: list[str | Path] = [
        "--run-dir",
        tmp_path / "run",
        "--backend",
        "local",
        "--set",
        "sinks=prometheus",
    ]
    line = refused(["launch", gpt.path, "--data", gpt_data, *options], tmp_path, capsys)
    assert (
        "prometheus requires Ray, whose endpoints serve the metrics (expected backend ray, got"
        " local)" in line
    )


def test_a_run_is_not_resumed_without_ray_either(
    gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(gpt, trainload.Cluster(), "single")
    run_dir = prepare(gpt, plan, gpt_data, run_dir=tmp_path / "run", sinks=["prometheus"])
    with pytest.raises(trainload.ClusterError, match="prometheus requires Ray"):
        trainload.resume(run_dir, backend="local")


def test_every_number_of_a_run_has_a_measure() -> None:
    numbers = {
        "metrics/accuracy": OWN["metrics/"],
        "evaluation/accuracy": OWN["evaluation/"],
        **OF_NUMBERS,
    }
    assert {
        name: found[0] for name in numbers if (found := measure_of(name)) is not None
    } == numbers


def test_the_board_asks_for_what_is_exported_and_for_all_of_it() -> None:
    asked = set(re.findall(r"ray_\w+", json.dumps(board())))
    assert asked == {measure.exported for measure in MEASURES}
