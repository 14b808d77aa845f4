"""Measure what sampling statistics costs a run: one step with `statistics`, one without, in turn.

    python benchmarks/statistics_cost.py

One process with two threads, compiled graphs, the same batches. `sample`: the time of a step that
is sampled over that of one that is not. `cost`: the part of a run's time that is spent for samples
every 100 steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
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
    """Return the seconds of steps with and without a sample."""
    import torch
    from safetensors.torch import load_file

    from trainload.launching.node.build import compile_build, load_build
    from trainload.launching.worker.calls import Microbatch
    from trainload.launching.worker.divergence import Search
    from trainload.launching.worker.engine import Draw, Engine
    from trainload.launching.worker.step_statistics import StepStatistics
    from trainload.packaging.package import open_package
    from trainload.sharding.plans.plan import read_plan

    package = open_package(prepare(JOBS[job], folder / "job", "single", 1, batches=8))
    plan, device = read_plan(folder / "job" / "single.json"), torch.device("cpu")
    cache = folder / "cache"
    built = compile_build(package, plan, device, cache, lambda *_: None, evaluates=False)
    engine = Engine(package, plan, 0, device, load_build(built, package, plan, cache))
    engine.held.load_package()
    nothing: Any = None
    search = Search(package, plan, 0, device, nothing, "", None)
    statistics = StepStatistics(search, search.build())
    batches = load_file(folder / "job" / "batches.safetensors")
    draws = [Draw([Microbatch({n: v[i] for n, v in batches.items()}, 0)]) for i in range(8)]
    found: dict[str, list[float]] = {"without": [], "with": []}
    for step in range(rounds):
        for name, seconds in found.items():
            began = time.perf_counter()
            if name == "with":
                with statistics.collecting(engine):
                    engine.step(step, [draws[step % 8]])
                statistics.collected()
            else:
                engine.step(step, [draws[step % 8]])
            if step > 1:
                seconds.append(time.perf_counter() - began)
    return found


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
        plain, sampled = median(seconds["without"]), median(seconds["with"])
        cost = (sampled - plain) / plain / EVERY
        rows.append([job, f"{1000 * plain:.1f}", f"{sampled / plain:.2f}", f"{100 * cost:.2f} %"])
    heads = ["job", "step, ms", "sample", f"cost, every {EVERY} steps"]
    screen().print(table("Statistics by module", heads, rows))
    save({"machine": at_start, "every": EVERY, "seconds": found}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
