"""Measure what watching a run costs: sampled statistics, and the check of updates.

    python benchmarks/statistics_cost.py

One process with two threads, compiled graphs, the same batches. Three kinds of steps alternate:
plain; sampled, with `statistics`; and unchecked, with an update that does not look whether the
gradient is finite. `sample`: the time of a sampled step over that of a plain one. `cost`: the part
of a run's time that is spent for samples every 100 steps. `check`: the time of a plain step over
that of an unchecked one, less 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import unittest.mock
from pathlib import Path
from typing import Any

from measure import EXAMPLE, RESULTS, machine, median, note, save, screen, see_example, table
from prepare import prepare

EVERY = 100
_OTHERS = Path(__file__).with_name("step_jobs.py")
JOBS = {
    "GPT fp32": f"{EXAMPLE / 'job.py'}:job_fp32",
    "GPT bf16": f"{EXAMPLE / 'job.py'}:job",
    "GPT 12 layers": f"{_OTHERS}:gpt_12_layers",
    "Llama": f"{_OTHERS}:llama",
    "ViT": f"{_OTHERS}:vit",
    "CNN": f"{_OTHERS}:cnn",
}


def measure(job: str, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of plain, sampled and unchecked steps."""
    import torch
    from safetensors.torch import load_file

    from trainload.launching.node.build import compile_build, load_build
    from trainload.launching.worker.calls import Microbatch
    from trainload.launching.worker.divergence import Search
    from trainload.launching.worker.engine import Draw, Engine
    from trainload.launching.worker.step_statistics import StepStatistics
    from trainload.packaging.package import open_package
    from trainload.sharding.plans.plan import read_plan
    from trainload.sharding.rewriting import rank_update

    package = open_package(prepare(JOBS[job], folder / "job", "single", 1, batches=8))
    plan, device = read_plan(folder / "job" / "single.json"), torch.device("cpu")

    def engine_of(cache: Path) -> Engine:
        built = compile_build(package, plan, device, cache, lambda *_: None, evaluates=False)
        engine = Engine(package, plan, 0, device, load_build(built, package, plan, cache))
        engine.held.load_package()
        return engine

    engine = engine_of(folder / "cache")
    with unittest.mock.patch.object(rank_update, "usable_norm", always_usable):
        unchecked = engine_of(folder / "unchecked")
    nothing: Any = None
    search = Search(package, plan, 0, device, nothing, "", None)
    statistics = StepStatistics(search, search.build())
    batches = load_file(folder / "job" / "batches.safetensors")
    draws = [Draw([Microbatch({n: v[i] for n, v in batches.items()}, 0)]) for i in range(8)]
    found: dict[str, list[float]] = {"plain": [], "sampled": [], "unchecked": []}
    for step in range(rounds):
        for name, seconds in found.items():
            began = time.perf_counter()
            if name == "sampled":
                with statistics.collecting(engine):
                    engine.step(step, [draws[step % 8]])
                statistics.collected()
            else:
                (engine if name == "plain" else unchecked).step(step, [draws[step % 8]])
            if step > 1:
                seconds.append(time.perf_counter() - began)
    return found


def always_usable(norm: Any, *_: Any) -> Any:
    """Return True, as a tensor, for any norm."""
    import torch

    return torch.ones_like(norm, dtype=torch.bool)


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "statistics_cost.json")
    options = parser.parse_args()
    see_example()
    found: dict[str, dict[str, list[float]]] = {}
    at_start = machine()
    for job in options.jobs.split(","):
        note(job)
        with tempfile.TemporaryDirectory() as folder:
            found[job] = measure(job, Path(folder), options.rounds)
    rows = []
    for job, seconds in found.items():
        plain, sampled = median(seconds["plain"]), median(seconds["sampled"])
        check = plain / median(seconds["unchecked"]) - 1
        cost = (sampled - plain) / plain / EVERY
        numbers = (f"{1000 * plain:.1f}", f"{sampled / plain:.2f}")
        rows.append([job, *numbers, f"{100 * cost:.2f} %", f"{100 * check:.1f} %"])
    heads = ["job", "step, ms", "sample", f"cost, every {EVERY} steps", "check"]
    screen().print(table("Watching a run", heads, rows))
    save({"machine": at_start, "every": EVERY, "seconds": found}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
