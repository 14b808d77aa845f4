"""Measure the time and memory to simulate 64, 1,024 and 16,384 ranks of Llama 3.1 8B.

    python benchmarks/simulate.py [--length 8192] [--ranks 64 1024 16384]

An abstract package is planned, the graphs of its ranks are made, and the collectives of all ranks
are compared (trainload plan, trainload simulate): each number of ranks with ZeRO-3 alone, and with
ZeRO-3 x tensor 8 (x pipeline 4). Each case is a process of its own, so that its peak memory is
measured separately. Seconds are wall time; the freeze is measured separately.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import MIB, RESULTS, ROOT, PeakMemory, alone, machine, note, save, screen, table

PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"strategy": "zero3"},
    "zero3 x tensor 8": {"strategy": "zero3", "tensor_ranks": 8},
    "zero3 x tensor 8 x pipeline 4": {
        "strategy": "zero3",
        "tensor_ranks": 8,
        "pipeline_ranks": 4,
        "accumulate": 8,
    },
}
EXPECTED = "under 120 s and 4 GiB at 1,024 ranks; 16,384 no more than twice that"


def simulate_one(package_path: str, ranks: int, options: dict[str, Any], result: str) -> None:
    """Plan and simulate one case in this process."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import trainload
    from trainload.sharding.planner.make_plan import make_plan
    from trainload.sharding.planner.plan_source import Source
    from trainload.sharding.planner.simulate import simulate
    from trainload.sharding.plans.plan import Cluster

    began = time.perf_counter()
    source = Source(trainload.open(package_path))
    rows = ranks * options.get("accumulate", 1)
    plan = make_plan(
        source, Cluster(nodes=ranks // 8, devices_per_node=8), global_batch=rows, **options
    )
    planned = time.perf_counter()
    found = simulate(source, plan)
    ended = time.perf_counter()
    collectives = sum(
        count for operators in found.counts().values() for count in operators.values()
    )
    told = {
        "plan_seconds": planned - began,
        "simulate_seconds": ended - planned,
        "collectives": collectives,
    }
    told["peak_bytes"] = PeakMemory().read()["since_start"]
    Path(result).write_text(json.dumps(told))


def freeze(path: str, length: int, result: str) -> None:
    """Freeze the package in this process."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(Path(__file__).parent)]
    import llama8b

    began = time.perf_counter()
    package = llama8b.freeze(Path(path), length=length)
    parameters = sum(1 for p in package.parameters if p.alias_of is None)
    told = {
        "seconds": time.perf_counter() - began,
        "parameters": parameters,
        "peak_bytes": PeakMemory().read()["since_start"],
    }
    Path(result).write_text(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens per row")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[64, 1024, 16384],
        help="numbers of ranks, multiples of 32",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "simulate.json", help="output file")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        package, result = str(Path(folder) / "llama.tl"), Path(folder) / "result.json"
        alone(freeze, package, options.length, str(result))
        frozen = json.loads(result.read_text())
        note(f"frozen in {frozen['seconds']:.0f} s")
        for ranks in options.ranks:
            for name, plan in PLANS.items():
                alone(simulate_one, package, ranks, plan, str(result))
                entry = {"ranks": ranks, "plan": name, **json.loads(result.read_text())}
                found.append(entry)
                note(
                    f"{ranks} ranks, {name}:"
                    f" {entry['plan_seconds'] + entry['simulate_seconds']:.0f} s"
                )
    rows = [
        [
            f"{e['ranks']:,}",
            e["plan"],
            *(
                f"{s:.1f}"
                for s in (
                    e["plan_seconds"],
                    e["simulate_seconds"],
                    e["plan_seconds"] + e["simulate_seconds"],
                )
            ),
            f"{e['peak_bytes'] / MIB:.0f}",
            f"{e['collectives']:,}",
        ]
        for e in found
    ]
    screen().print(
        table(
            "Llama 3.1 8B",
            [
                "ranks",
                "plan",
                "planned, s",
                "gone through, s",
                "together, s",
                "MiB at most",
                "collectives",
            ],
            rows,
        )
    )
    save(
        {
            "expected": EXPECTED,
            "machine": machine(),
            "length": options.length,
            "freeze": frozen,
            "found": found,
        },
        options.out,
    )


if __name__ == "__main__":
    main()
