"""`make grid`: compare 50 steps of every strategy and kind of model with one process.

    python -m tests.grid.run [--models TEXT] [--steps N] [--outlined]

Writes docs/measurements/grid.md. A cell is the greatest relative difference between a loss and that
of one process, or the reason why there is no such plan. With --outlined, deeper models are trained,
and the ranks call outlined graphs.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.grid.models import DEEP, MODELS, STEPS, Model
from tests.grid.outlined import NOTED, train_outlined
from tests.house.commits import head_commit
from tests.laws.runs import TOLERANCE, Run, curve, difference, train
from tests.laws.worker import train_as_rank

import trainload
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.plans.strategies import BatchNorm, Strategy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "grid.md"
HEAD = f"""# Every strategy with every kind of model

Each model (`tests/grid/models.py`) is trained for {STEPS} steps in float32, by gloo processes on
CPUs under each plan and by one process. A cell is the largest relative difference between their
losses; {TOLERANCE:g} is allowed. `make grid` writes this page, here at commit COMMIT.

The model with batch norms is planned with `--batch-norm synchronised`. A batch norm computes its
statistics over the rows of one call, so pipelines, which have four microbatches, are compared with
one process that has four microbatches.

"""


BESIDE = """The same for plans that divide the positions of a row, or experts, among ranks, and for
plans whose loss is computed in three chunks of rows, or which keep activations on the host. A
number in brackets stands for a plan that is rejected with the message below the table."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Options of a plan, and its numbers of nodes and devices."""

    strategy: Strategy | None
    nodes: int = 1
    devices: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def plan(self, package: Package, *, normalised: bool) -> trainload.Plan:
        cluster = trainload.Cluster(nodes=self.nodes, devices_per_node=self.devices)
        statistics: BatchNorm = "synchronised" if normalised else "averaged"
        return trainload.plan(
            package,
            cluster,
            self.strategy,
            bucket_bytes=6_000,
            batch_norm=statistics,
            **self.options,
        )


PIPED = {"pipeline_ranks": 2, "accumulate": 4}
CHUNKED = {"loss_chunks": 3}
STRATEGIES = {
    "ZeRO-0": Axes("zero0"),
    "ZeRO-1": Axes("zero1"),
    "ZeRO-2": Axes("zero2"),
    "ZeRO-3": Axes("zero3"),
    "hybrid": Axes("hybrid", nodes=2),
    "TP 2": Axes(None, options={"tensor_ranks": 2}),
    "PP 2": Axes(None, options=PIPED),
    "ZeRO-3 x TP 2": Axes("zero3", devices=4, options={"tensor_ranks": 2}),
    "PP 2 x data 2": Axes("zero0", devices=4, options=PIPED),
}
SHARED = {
    "TP 2, sequence": Axes(None, options={"tensor_ranks": 2, "divide": "sequence"}),
    "context 2": Axes(None, options={"tensor_ranks": 2, "divide": "context"}),
    "experts 2": Axes(None, options={"tensor_ranks": 2, "divide": "expert"}),
    "ZeRO-3, chunks": Axes("zero3", options=CHUNKED),
    "TP 2, chunks": Axes(None, options={"tensor_ranks": 2, **CHUNKED}),
    "ZeRO-3, offload": Axes("zero3", options={"offload": 1.0}),
    "TP 2, offload": Axes(None, options={"tensor_ranks": 2, "offload": 0.5}),
    "PP 2 x context 2": Axes(
        None, devices=4, options={**PIPED, "tensor_ranks": 2, "divide": "context"}
    ),
}
"""Plans whose ranks divide the positions of a row, or experts.

Graphs that have none of these are rejected.
"""
COLUMNS = STRATEGIES | SHARED


def row(
    model: Model,
    steps: int,
    folder: Path,
    strategies: Sequence[str] = tuple(COLUMNS),
    *,
    outlined: bool = False,
) -> dict[str, float | str]:
    """Return the cells of a model: differences, or reasons.

    The graphs of the plans, but not those of the single process, are outlined if `outlined` is
    True.
    """
    act = train_outlined if outlined else train_as_rank
    package, data = model.freeze(folder)
    cells: dict[str, float | str] = {}
    runs: dict[str, Run] = {}
    singles: dict[int, list[float]] = {}
    for name in strategies:
        try:
            plan = COLUMNS[name].plan(package, normalised=model.normalised)
        except PlanError as error:
            cells[name] = str(error)
            continue
        runs[name] = Run(folder / f"run{len(runs)}", package, plan, data, {"steps": steps})
    for microbatches in {
        run.plan.accumulate if model.normalised else 1
        for run in runs.values()
        if run.plan is not None
    }:
        alone = trainload.plan(package, trainload.Cluster(), "single", accumulate=microbatches)
        (singles[microbatches],) = train(
            1,
            [Run(folder / f"single{microbatches}", package, alone, data, {"steps": steps})],
            folder,
        )
    for world in (2, 4):
        together = {
            name: run
            for name, run in runs.items()
            if run.plan is not None and run.plan.world_size == world
        }
        train(world, list(together.values()), folder, act=act)
        for name, run in together.items():
            assert run.plan is not None
            cells[name] = difference(
                singles[run.plan.accumulate if model.normalised else 1], curve(run.run_dir)
            )
    return {name: cells[name] for name in strategies}


def page(rows: dict[str, dict[str, float | str]]) -> str:
    """Return the page for the rows by model."""
    reasons: dict[str, int] = {}

    def spelled(cell: float | str) -> str:
        return (
            f"[{reasons.setdefault(cell, len(reasons) + 1)}]"
            if isinstance(cell, str)
            else f"{cell:.1e}"
        )

    def table(columns: Sequence[str]) -> list[str]:
        head = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        return head + [
            f"| {model} | " + " | ".join(spelled(cells[name]) for name in columns) + " |"
            for model, cells in rows.items()
        ]

    lines = [*table(list(STRATEGIES)), "", BESIDE, "", *table(list(SHARED))]
    told = [f"{number}. {reason}" for reason, number in reasons.items()]
    head = HEAD.replace("COMMIT", head_commit())
    return head + "\n".join(lines) + "\n" + ("\n" + "\n".join(told) + "\n" if told else "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--models",
        default="",
        help="only models whose names contain this text; the page is then not written",
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--outlined",
        action="store_true",
        help="deeper models, whose layers are calls of one body; the page is then not written",
    )
    arguments = parser.parse_args()
    rows: dict[str, dict[str, float | str]] = {}
    began = time.monotonic()
    for name, model in (DEEP if arguments.outlined else MODELS).items():
        if re.search(arguments.models, name):
            with tempfile.TemporaryDirectory() as folder:
                rows[name] = row(model, arguments.steps, Path(folder), outlined=arguments.outlined)
                noted = Path(folder) / NOTED
                regions = noted.read_text().count("\n") if noted.exists() else 0
            told = f", {regions} regions" if arguments.outlined else ""
            print(f"{name}{told}: {rows[name]}", flush=True)
    cells = [cell for found in rows.values() for cell in found.values()]
    far = [cell for cell in cells if isinstance(cell, float) and cell > TOLERANCE]
    print(
        f"{len(cells)} cells, {sum(isinstance(c, str) for c in cells)} refused, {len(far)} too far;"
        f" {time.monotonic() - began:.0f} s"
    )
    if not (arguments.models or arguments.outlined) and arguments.steps == STEPS:
        PAGE.write_text(page(rows), encoding="utf-8")
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    main()
