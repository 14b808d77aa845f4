"""Compare runs with faults on a Ray cluster of several nodes with an undisturbed run.

    python benchmarks/faults.py [NAME ...]

For each fault: seconds until the driver reports it, seconds until the next step, the longest time
without a step, the number of repeated steps, the number of lost checkpoints, and whether the losses
are equal to those of the undisturbed run. See fault_cluster.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fault_cluster import (
    FAULTS,
    HANG_TIMEOUT,
    HERE,
    Fault,
    Nodes,
    Run,
    disk,
    losses_by_step,
    set_up,
    time_said,
    write_rows,
)
from fault_s3 import FAULTS_IN_S3, run_in_s3
from faults_op import SWITCHES
from measure import RESULTS, machine, note, save, screen, table
from network_nodes import NetworkNodes

STEPS = 240
CHECKPOINT_EVERY = 20
BAR = 1e-5
AT = 70
"""Step at which the fault is injected."""
OPTIONS = (
    *("--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY)),
    *(
        "--set",
        f"hang_timeout={HANG_TIMEOUT}",
        "--set",
        "node_patience=120",
        "--set",
        "storage_patience=120",
        "--set",
        "global_batch=8",
    ),
)


def apply_fault(
    fault: Fault, package: Path, scratch: Path, reference: dict[int, float]
) -> dict[str, Any]:
    """Inject a fault into a run, and return a row of the table."""
    note(fault.name)
    for name in SWITCHES:
        Path(os.environ[name]).unlink(missing_ok=True)
    if fault.at_url:
        with (
            disk(scratch / "-".join(fault.name.split()), None) as place,
            run_in_s3(package, write_rows(scratch / "rows.npz"), place, fault.nodes) as run,
        ):
            disturb(fault, run, f"{run.url}.tl")
            return row(fault, run, reference)
    nodes = NetworkNodes(fault.nodes) if fault.networked else Nodes(fault.nodes)
    try:
        with disk(scratch / "-".join(fault.name.split()), fault.disk) as place:
            run = Run(place / "run", write_rows(scratch / "rows.npz"), nodes)
            disturb(fault, run, package)
            return row(fault, run, reference)
    finally:
        nodes.close()


def disturb(fault: Fault, run: Run, package: Path | str) -> None:
    """Launch a run, and inject a fault."""
    try:
        run.launch(package, "--nodes", fault.sizes, *OPTIONS)
        run.reach(AT)
        fault.act(run)
        status = run.join()
    finally:
        run.end()
    assert status == 0, "\n".join(text for _, text in run.lines[-20:])


def row(fault: Fault, run: Run, reference: dict[int, float]) -> dict[str, Any]:
    """Return the measurements of a run."""
    said = time_said(run, fault.said)
    assert said is not None, f"nobody said {fault.said}"
    message = next((event.data.get("message") for event in run.events if event.time == said), None)
    steps = [event for event in run.events if event.kind == "step"]
    after = [event for event in steps if event.time > said]
    starts = [event for event in run.events if event.kind == "start" and event.time > run.at]
    saves = (
        int(event.data["step"])
        for event in run.events
        if event.kind == "checkpoint" and event.time <= said
    )
    saved = max((step for step in saves if step not in run.destroyed), default=0)
    found = losses_by_step(run.events)
    differences = [
        abs(found[step] - loss) / abs(loss) for step, loss in reference.items() if step in found
    ]
    times = [run.at, *(event.time for event in steps if event.time > run.at)]
    return {
        "fault": fault.name,
        "seconds_to_notice": said - run.at,
        "seconds_to_next_step": after[0].time - run.at,
        "longest_pause": max(later - earlier for earlier, later in pairwise(times)),
        "lasted": run.cleared - run.at if run.cleared else None,
        "steps_done_again": len(steps) - len(found),
        "checkpoints_lost": sum(int(event.data["step"]) < saved for event in starts),
        "steps_missing": len(reference.keys() - found.keys()),
        "greatest_difference": max(differences),
        "equal": max(differences) <= BAR and set(found) == set(reference),
        "worlds": [int(event.data["world"]) for event in run.events if event.kind == "start"],
        "said": (message or fault.said.strip('"')).replace(str(run.folder), "RUN"),
    }


def measure(scratch: Path, names: Sequence[str]) -> dict[str, Any]:
    """Measure the faults whose names match, or all."""
    package = set_up(scratch)
    nodes = Nodes(2)
    try:
        run = Run(scratch / "undisturbed", write_rows(scratch / "rows.npz"), nodes)
        run.launch(package, "--nodes", "2", *OPTIONS)
        status = run.join()
        assert status == 0, "\n".join(text for _, text in run.lines[-20:])
    finally:
        nodes.close()
    reference = losses_by_step(run.events)
    assert len(reference) == STEPS
    faults = (*FAULTS, *FAULTS_IN_S3)
    chosen = [fault for fault in faults if not names or any(name in fault.name for name in names)]
    rows: list[dict[str, Any]] = []
    for fault in chosen:
        rows.append(apply_fault(fault, package, scratch, reference))
        note(f"{fault.name}: " + json.dumps(rows[-1]))  # if a later one fails, this is known
    return {"steps": STEPS, "hang_timeout": HANG_TIMEOUT, "rows": rows}


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    columns = (
        "fault",
        "s to notice",
        "s to next step",
        "longest pause",
        "lasted",
        "steps again",
        "checkpoints lost",
        "equal",
        "says",
    )
    lines = [
        (
            row["fault"],
            f"{row['seconds_to_notice']:.1f}",
            f"{row['seconds_to_next_step']:.1f}",
            f"{row['longest_pause']:.1f}",
            "" if row["lasted"] is None else f"{row['lasted']:.0f}",
            str(row["steps_done_again"]),
            str(row["checkpoints_lost"]),
            (
                f"{'yes' if row['equal'] else 'NO'}, {row['greatest_difference']:.0e},"
                f" {row['steps_missing']} missing"
            ),
            str(row["said"])[:60],
        )
        for row in result["rows"]
    ]
    screen().print(
        table(
            f"Fault tolerance of runs of {result['steps']} steps (hang timeout"
            f" {result['hang_timeout']:g} s)",
            columns,
            lines,
        )
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of fault names; default: all")
    parser.add_argument(
        "--output",
        type=Path,
        help="output file; default if all faults run: benchmarks/results/faults.json",
    )
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), arguments.names)
    show(result)
    if arguments.output is not None or not arguments.names:
        save({"machine": machine(), **result}, arguments.output or RESULTS / "faults.json")


if __name__ == "__main__":
    main()
