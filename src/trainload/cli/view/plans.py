"""Results of the planner: the candidates side by side, and one of them node by node."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console

from trainload.cli.view.column_table import Columns
from trainload.core.errors import PlanError
from trainload.core.formatting import interval, size
from trainload.sharding.planner.plan_costs import Memory, StepTime
from trainload.sharding.planner.search import Candidate, Found
from trainload.sharding.planner.verdicts import TIMES, verdict_on

_MEMORY = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "buffers",
    "reserved",
)


def print_found(console: Console, result: Found, output: Path | None) -> None:
    """Print the candidates, the best first, and why it is the best."""
    device, best = result.device, result.best
    cluster = result.candidates[0].plan.cluster
    console.print(
        f"{cluster.nodes} x {cluster.devices_per_node} {device.name}, {size(device.memory_bytes)}"
        f" each; {result.candidates[0].plan.global_batch} rows per update; {result.judged} plans"
        f" evaluated, {len(result.candidates)} simulated",
        highlight=False,
    )
    titles = ("", "plan", "calls", "recompute", "memory", "time", "compute", "exposed", "bubble")
    table = Columns(titles, right={*titles} - {"plan", "recompute"})
    for number, candidate in enumerate(result.candidates, 1):
        choice, time = candidate.choice, candidate.costs.time
        shares = [
            f"{getattr(time, name) / time.seconds:.0%}" for name in ("compute", "exposed", "bubble")
        ]
        table.add(
            str(number),
            str(choice),
            str(choice.accumulate),
            choice.recompute,
            size(candidate.costs.memory.peak),
            interval(time.seconds),
            *shares,
        )
    console.print(table)
    for number, candidate in enumerate(result.candidates, 1):
        console.print(f"{number}: {verdict_on(result, candidate)}", highlight=False)
    if best is not None:
        console.print(f"memory of 1: {_format_memory(best.costs.memory)}", highlight=False)
        console.print(f"time of 1: {_format_time(best.costs.time)}", highlight=False)
    for each in result.refused:
        console.print(f"not made: {each.choice}: {each.reason}", highlight=False, soft_wrap=True)
    if output is not None and best is not None:
        console.print(f"plan: {output}", highlight=False)


def nothing_fits(result: Found, smallest: Candidate | None) -> PlanError:
    """Return the message if no candidate fits.

    `smallest` are the results for the smallest cluster on which one fits.
    """
    least = min(result.candidates, key=lambda candidate: candidate.costs.memory.peak)
    memory, available = least.costs.memory, result.device.memory_bytes
    hint = "Use another device, or a smaller model."
    if smallest is not None:
        cluster = smallest.plan.cluster
        hint = (
            f"It fits on {cluster.nodes} x {cluster.devices_per_node}: {smallest.choice},"
            f" {size(smallest.costs.memory.peak)}."
        )
    return PlanError(
        f"the package does not fit: {size(memory.peak - available)} too much",
        where=f"{least.choice}, recompute {least.choice.recompute}, {memory.at}",
        expected=f"{size(available)} on each {result.device.name}",
        got=f"{size(memory.peak)}: {_format_memory(memory)}",
        hint=hint,
    )


def _format_memory(memory: Memory) -> str:
    parts = [f"{name} {size(getattr(memory, name))}" for name in _MEMORY]
    on_host = f"; {size(memory.host)} on the host" if memory.host else ""
    return f"{', '.join(parts)} (at {memory.at}){on_host}"


def _format_time(time: StepTime) -> str:
    return (
        ", ".join(f"{name} {interval(getattr(time, name))}" for name in TIMES)
        + f"; {time.flops / time.seconds / 1e12:.3g} TFLOP/s a device"
    )


def as_record(result: Found) -> dict[str, Any]:
    """Return the results as JSON: sizes in bytes, times in seconds per update."""
    candidates = [
        {
            "plan": str(c.choice),
            "strategy": c.choice.strategy,
            "tensor": c.choice.tensor,
            "divide": c.choice.divide,
            "pipeline": c.choice.pipeline,
            "data": c.plan.data_ranks,
            "accumulate": c.choice.accumulate,
            "recompute": c.choice.recompute,
            "loss_chunks": c.choice.loss_chunks,
            "offload": c.choice.offload,
            "fits": result.fits(c),
            "peak_bytes": c.costs.memory.peak,
            "memory": {name: getattr(c.costs.memory, name) for name in _MEMORY},
            "peak_at": c.costs.memory.at,
            "host_bytes": c.costs.memory.host,
            "seconds": c.costs.time.seconds,
            "time": {name: getattr(c.costs.time, name) for name in TIMES},
            "flops": c.costs.time.flops,
            "beside_the_best": verdict_on(result, c),
        }
        for c in result.candidates
    ]
    refused = [{"plan": each.choice, "reason": each.reason} for each in result.refused]
    device = result.device.model_dump(mode="json", exclude={"collectives"})
    return {"device": device, "judged": result.judged, "candidates": candidates, "refused": refused}


def explained(candidate: Candidate) -> dict[str, Any]:
    """Return the nodes of each graph of a candidate."""
    return {
        graph: {
            "seconds": line.seconds,
            "exposed": line.exposed,
            "flops": line.flops,
            "nodes": [{name: getattr(row, name) for name in row.__slots__} for row in line.rows],
        }
        for graph, line in candidate.costs.timelines.items()
    }


def print_explained(console: Console, candidate: Candidate, most: int = 40) -> None:
    """Print the time of each graph of a candidate by operator, and its slowest nodes."""
    console.print(
        f"{candidate.choice}, recompute {candidate.choice.recompute}:"
        f" {_format_time(candidate.costs.time)}",
        highlight=False,
    )
    console.print(_format_memory(candidate.costs.memory), highlight=False)
    for graph, line in candidate.costs.timelines.items():
        console.print(
            "\n"
            f"{graph}: {line.seconds:.4g} s, {line.exposed:.4g} s exposed, {line.flops:.4g}"
            f" operations",
            highlight=False,
        )
        by_operator: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        for row in line.rows:
            entry = by_operator[row.operator, row.why]
            entry[0] += 1
            entry[1] += row.seconds
        ranked = sorted(
            ((seconds, count, *key) for key, (count, seconds) in by_operator.items() if seconds),
            reverse=True,
        )
        console.print(
            _rows(
                ("time", "nodes", "operator", "bound by"),
                [[interval(s), str(int(n)), *key] for s, n, *key in ranked[:12]],
            )
        )
        longest = sorted(line.rows, key=lambda row: -row.seconds)[:most]
        slowest = sorted((row for row in longest if row.seconds), key=lambda row: row.start)
        cells = [
            [
                interval(r.start),
                interval(r.seconds),
                r.node,
                r.operator,
                r.why,
                f"{r.bytes:.3g}",
                f"{r.flops:.3g}",
            ]
            for r in slowest
        ]
        console.print(
            _rows(("start", "time", "node", "operator", "bound by", "bytes", "operations"), cells)
        )


def _rows(titles: tuple[str, ...], rows: list[list[str]]) -> Columns:
    table = Columns(titles, right={*titles} - {"node", "operator", "bound by"})
    for row in rows:
        table.add(*row)
    return table
