"""The pages that `make browser` opens: of a run, a store, packages and plans."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.grid.models import llama
from tests.report.made import FAULTY, made_run
from tests.retraining.conftest import classifier, write_day
from tests.retraining.ticking import config_of, tick

import trainload
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.report.packages.graph_page import package_page
from trainload.report.plans.plan_page import plan_page
from trainload.report.runs.page import page_of
from trainload.report.runs.run_folder import read_run
from trainload.report.stores.line_page import store_page
from trainload.sharding.planner.device import read
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.search import search


def pages(folder: Path, layers: int) -> Iterator[tuple[str, str]]:
    """Yield (name, HTML) of each page.

    Args:
        folder: an empty folder.
        layers: layers of the large Llama whose graph page is among them.
    """
    yield "run", page_of(read_run(broken_run(folder / "killed")))
    yield "failing-run", page_of(read_run(made_run(folder / "failing", FAULTY, world=2)))
    store = retrained(folder / "retrained")
    yield "store", store_page(store, store.lines())[0]
    small = trainload.freeze(llama(), folder / "llama.tl")
    planned = trainload.plan(
        small,
        trainload.Cluster(devices_per_node=4),
        "zero3",
        tensor_ranks=2,
        recompute="full",
    )
    yield "graph-with-plan", package_page(small, planned)[0]
    yield from _plans(small)
    large = trainload.freeze(llama(layers), folder / "large.tl")
    yield f"graph-{layers}-layers", package_page(large)[0]


def _plans(package: Package) -> Iterator[tuple[str, str]]:
    device, source = read("h100"), Source(package, evaluates=False)
    cluster = trainload.Cluster(nodes=2, devices_per_node=4, device="cuda")
    found = search(source, cluster, device, global_batch=64, exact=6)
    assert found.best is not None
    yield "plan", plan_page(package, found.best.plan, device, found, source)
    many = trainload.Cluster(nodes=64, devices_per_node=8, device="cuda")
    pipelined = trainload.plan(
        package, many, "zero1", pipeline_ranks=2, tensor_ranks=2, accumulate=8, global_batch=1024
    )
    yield "plan-pipeline", plan_page(package, pipelined, device, source=source)
    plain = trainload.plan(package, trainload.Cluster(devices_per_node=4), "zero3")
    yield "plan-without-times", plan_page(package, plain, source=source)


def retrained(folder: Path) -> Store:
    """Create a store whose line had ticks that were promoted, without data, and rejected."""
    folder.mkdir()
    package = trainload.freeze(classifier(), folder / "small.tl")
    config = config_of(folder, package)
    write_day(folder / "data" / "0.arrow", rows=120)
    tick(config, 0)
    tick(config, 1)
    write_day(folder / "data" / "2.arrow", rows=120, seed=2, shift=0.6)
    tick(config, 2)
    write_day(folder / "data" / "3.arrow", rows=120, seed=3)
    tick(config_of(folder, package, gate={"require": "eval.loss < 0"}), 3)
    return Store(folder / "store")


def broken_run(folder: Path) -> Path:
    """Create a run of the law tests' GPT that is killed and resumed."""
    from tests.laws.gpt import gpt_job, write_rows

    folder.mkdir()
    trainload.freeze(gpt_job(), folder / "gpt.tl")
    data, held_out = (
        write_rows(folder / "train.npz", 91, seed=1),
        write_rows(folder / "held-out.npz", 21, seed=2),
    )
    run_dir = folder / "run"
    options = [
        "--steps",
        "120",
        "--checkpoint-every",
        "25",
        "--eval-every",
        "20",
        "--eval-data",
        held_out,
        "--run-dir",
        run_dir,
        "--set",
        "statistics=20",
    ]
    trainload_command = [sys.executable, "-m", "trainload"]
    launch = [
        *trainload_command,
        "launch",
        folder / "gpt.tl",
        "--data",
        data,
        "--backend",
        "local",
        "--no-compile",
        *options,
    ]
    process = subprocess.Popen(
        [str(part) for part in launch], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    journal = run_dir / "events.jsonl"
    while not journal.exists() or '"step":60,' not in journal.read_text():
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode}")
    process.kill()
    process.wait()
    subprocess.run(
        [*trainload_command, "resume", str(run_dir), "--backend", "local"],
        check=True,
        capture_output=True,
    )
    return run_dir
