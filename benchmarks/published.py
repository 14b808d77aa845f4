"""Compare the planner's estimates with published figures of torchtitan: Llama 3.1 8B on 8 H100.

    python benchmarks/published.py [--device h100]

torchtitan (benchmarks in its repository) reports 77.0 GiB and 6,667 tokens per second on each GPU
for full sharding over 8 GPUs, torch.compile, a local batch of 2 rows of 8,192 tokens, selective
recomputation, and computation in bfloat16 with float32 parameters. Those GPUs have 96 GB and 500 W.
Two packages of the same shapes are planned like this: float32 parameters with autocast, and
bfloat16 parameters.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, ROOT, machine, note, save, screen, table

PUBLISHED = {"gib": 77.0, "tokens_per_second": 6667}
RANKS, ROWS, LENGTH = 8, 2, 8192
GIB = 2**30
PACKAGES: dict[str, dict[str, Any]] = {
    "float32 under autocast": {"autocast": True},
    "bfloat16": {"dtype": torch.bfloat16},
}
EXPECTED = "float32 under autocast: 75 to 85 GiB, 6,000 to 8,000 tokens a second"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="h100", help="device, as for `trainload plan`")
    parser.add_argument("--out", type=Path, default=RESULTS / "published.json", help="output file")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import llama8b

    from trainload.sharding.planner.device import read
    from trainload.sharding.planner.make_plan import make_plan
    from trainload.sharding.planner.plan_source import Source
    from trainload.sharding.planner.search import costs_of
    from trainload.sharding.plans.plan import Cluster
    from trainload.sharding.plans.strategies import RECOMPUTES

    device, found = read(options.device), []
    with tempfile.TemporaryDirectory() as folder:
        for name, how in PACKAGES.items():
            source = Source(
                llama8b.freeze(
                    Path(folder) / f"{len(found)}.tl", length=LENGTH, model=llama8b.Plain, **how
                )
            )
            for recompute in RECOMPUTES:
                cluster = Cluster(devices_per_node=RANKS, device="cuda")
                plan = make_plan(
                    source, cluster, "zero3", global_batch=RANKS * ROWS, recompute=recompute
                )
                costs = costs_of(source, plan, device)
                memory, time = costs.memory, costs.time
                entry = {
                    "parameters": name,
                    "recompute": recompute,
                    "gib": memory.peak / GIB,
                    "at": memory.at,
                }
                entry |= {
                    f"{part}_gib": getattr(memory, part) / GIB
                    for part in ("parameters", "gradients", "optimizer", "reserved")
                }
                entry |= {
                    f"{part}_gib": getattr(memory, part) / GIB
                    for part in ("activations", "communication")
                }
                entry |= {
                    f"{part}_seconds": getattr(time, part)
                    for part in ("compute", "exposed", "update")
                }
                entry["tokens_per_second"] = costs.tokens_per_second(ROWS * LENGTH)
                found.append(entry)
                note(
                    f"{name}, {recompute}: {entry['gib']:.1f} GiB, {entry['tokens_per_second']:.0f}"
                    " tokens/s"
                )
            source.forget()
    rows = [
        [
            f"{e['parameters']}, {e['recompute']}",
            f"{e['gib']:.1f}",
            f"{e['activations_gib']:.1f}",
            f"{e['tokens_per_second']:,.0f}",
        ]
        for e in found
    ]
    rows.append(
        [
            "torchtitan, selective, as published",
            f"{PUBLISHED['gib']}",
            "",
            f"{PUBLISHED['tokens_per_second']:,}",
        ]
    )
    screen().print(
        table(
            f"each of {RANKS} {device.name}", ["plan", "GiB", "of it activations", "tokens/s"], rows
        )
    )
    save(
        {
            "expected": EXPECTED,
            "machine": machine(),
            "published": PUBLISHED,
            "device": device.name,
            "found": found,
        },
        options.out,
    )


if __name__ == "__main__":
    main()
