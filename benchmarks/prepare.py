"""Freeze a job and plan it in a process of its own.

Processes measured afterwards never import the job.

    python benchmarks/prepare.py examples/gpt/job.py:job_fp32 FOLDER --strategies zero0,zero3
    --workers 2

writes FOLDER/package.tl, FOLDER/zero0.json and FOLDER/zero3.json; with --batches 64 also
FOLDER/batches.safetensors: 64 random batches of the size of --batch, (batches, rows, ...) for each
input, integers in the range of the example's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from measure import ROOT, see_example


def prepare(
    spec: str,
    folder: Path,
    strategies: str,
    workers: int,
    *,
    device: str = "cpu",
    batch: int | None = None,
    batches: int = 0,
) -> Path:
    """Run this script in a process that sees no GPU. Returns the package's path.

    Args:
        spec: file.py:name of the job.
        folder: output folder; must not exist.
        strategies: comma-separated names.
        workers: world size of the plans, on one node.
        device: device type of the plans.
        batch: rows per update over all workers; None: the job's.
        batches: number of random batches to write.
    """
    command = [
        sys.executable,
        __file__,
        spec,
        str(folder),
        "--strategies",
        strategies,
        "--workers",
        str(workers),
        "--device",
        device,
    ]
    command += ["--batches", str(batches)]
    if batch is not None:
        command += ["--batch", str(batch)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return folder / "package.tl"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategies", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--batches", type=int, default=0)
    arguments = parser.parse_args()
    see_example()

    import torch
    from safetensors.torch import save_file

    import trainload
    from trainload.freezing.load_job import load_job

    arguments.folder.mkdir(parents=True)
    job = load_job(arguments.spec)
    package = trainload.freeze(job, arguments.folder / "package.tl")
    if arguments.batches:
        generator = torch.Generator().manual_seed(0)
        rows = arguments.batch or package.recipe.global_batch
        values = {}
        for name, example in job.batch.items():
            shape = (arguments.batches, rows, *example.shape[1:])
            if example.is_floating_point():
                value = torch.randn(shape, generator=generator)
            else:
                low, high = int(example.min()), int(example.max()) + 1
                value = torch.randint(low, high, shape, generator=generator)
            values[name] = value.to(example.dtype)
        save_file(values, arguments.folder / "batches.safetensors")
    cluster = trainload.Cluster(devices_per_node=arguments.workers, device=arguments.device)
    for strategy in arguments.strategies.split(","):
        made = trainload.plan(package, cluster, strategy, global_batch=arguments.batch)
        (arguments.folder / f"{strategy}.json").write_text(made.model_dump_json(indent=2) + "\n")


if __name__ == "__main__":
    main()
