"""Runs that are profiled while they run, for tests, and jobs whose profile is known."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tests.launch.debugging.planted_faults import freeze
from torch import Tensor, nn

import trainload
from trainload.core.errors import RunInterrupted
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import Event
from trainload.launching.run.working_copy import request
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

T = TypeVar("T")
MANY_STEPS = 10**6
"""Steps of runs that are stopped."""
ROWS, NARROW, WIDE = 8, 16, 512


def while_it_runs(
    ask: Callable[[], T],
    package: Package,
    plan: Plan,
    data: Path,
    run_dir: str | Path,
    *,
    when: Callable[[Event], bool] = lambda event: event.kind == "step",
    **options: Any,
) -> T:
    """Launch a run, call `ask` beside it, stop the run, and return the result of `ask`.

    Args:
        ask: function to call.
        package: package to train.
        plan: its plan.
        data: its data.
        run_dir: folder or URL of the run.
        when: `ask` is called at the first event for which this is true.
        **options: options of `trainload.launch`.
    """
    asked: list[Future[T]] = []

    def stop_after() -> T:
        try:
            return ask()
        finally:
            request(run_dir, Request.STOP)

    with ThreadPoolExecutor(1) as pool:

        def begin(event: Event) -> None:
            if not asked and when(event):
                asked.append(pool.submit(stop_after))

        with pytest.raises(RunInterrupted):
            trainload.launch(
                package,
                plan,
                data,
                run_dir=run_dir,
                on_event=begin,
                **{"steps": MANY_STEPS, "compile": False, **options},
            )
    return asked[0].result()


def ranges_of(trace: Path) -> list[str]:
    """Return the names of the ranges of a trace in Chrome's format, in the order of their times."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(ranges, key=lambda event: event["ts"])]


class Uneven(nn.Module):
    """Three layers, of which the one in the middle has almost all of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NARROW, WIDE)
        self.large = nn.Linear(WIDE, WIDE)
        self.last = nn.Linear(WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(8):
            x = self.large(x)  # the slow line
        scores: Tensor = self.last(x)
        return scores


def uneven_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"]).square().mean()
    return loss


def uneven_package(folder: Path) -> Package:
    """Freeze the job, with AdamW."""
    torch.manual_seed(0)
    return freeze(
        folder,
        Uneven(),
        uneven_loss,
        {"x": torch.randn(4, NARROW)},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        global_batch=ROWS,
    )


def uneven_rows(path: Path) -> Path:
    """Write a data set for the job."""
    np.savez(path, x=np.random.default_rng(0).standard_normal((64, NARROW), dtype=np.float32))
    return path
