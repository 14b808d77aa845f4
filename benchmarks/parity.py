"""Compare the loss curves of the demo's GPT on one worker and on two, with every strategy.

    python benchmarks/parity.py

fp32, dropout on: one worker compared with two under ZeRO-0, -1 and -3, and the greatest relative
difference between the curves. bfloat16: the same, in relation to the difference that eager
DistributedDataParallel itself shows between one worker and two, with the same rows in the same
order. Dropout is then off on both sides, since eager's masks differ between ranks; trainload's do
not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import EXAMPLE, RESULTS, ROOT, machine, note, save, screen, see_example, table

HERE = Path(__file__).resolve().parent
STRATEGIES = ("zero0", "zero1", "zero3")
FP32_BAR = 1e-5
BF16_BAR = 3.0
"""Maximum, as a multiple of the difference of eager DDP."""


def curve(
    package: Path, data: Path, steps: int, scratch: Path, workers: int, strategy: str
) -> list[float]:
    """Run `trainload launch` and return the losses.

    A single worker runs in the process of the command, two run on a local Ray cluster.
    """
    from trainload.launching.run.journal import losses, read_events

    note(f"{package.stem}: {strategy} on {workers}")
    run_dir = scratch / f"{package.stem}-{strategy}-{workers}"
    options = [
        "--data",
        data,
        "--workers",
        workers,
        "--strategy",
        strategy,
        "--steps",
        steps,
        "--run-dir",
        run_dir,
    ]
    backend = "local" if workers == 1 else "ray"
    command = [
        sys.executable,
        "-m",
        "trainload",
        "launch",
        package,
        *options,
        "--backend",
        backend,
        "--json",
    ]
    subprocess.run(
        [str(part) for part in command], cwd=scratch, check=True, stdout=subprocess.DEVNULL
    )
    return losses(read_events(run_dir))


def eager_curve(data: Path, steps: int, scratch: Path, workers: int) -> list[float]:
    """Return the losses of eager DDP, or plain eager on one worker, on the same rows in order."""
    note(f"bf16: eager on {workers}")
    spawn = multiprocessing.get_context("spawn")
    folder = scratch / f"eager-{workers}"
    folder.mkdir()
    queue = spawn.SimpleQueue()
    processes = [
        spawn.Process(target=_eager, args=(rank, workers, data, steps, folder, queue))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("an eager worker failed; its traceback is above")
    found: list[float] = queue.get()
    return found


def _eager(rank: int, workers: int, data: Path, steps: int, folder: Path, queue: Any) -> None:
    import job as example
    import torch
    import torch.distributed as dist
    from parity_jobs import model
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from trainers import CLIP_NORM, Training

    from trainload.capture.program import InputSpec
    from trainload.launching.data.dataset import open_dataset
    from trainload.launching.data.sampler import rows

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=workers
    )
    gpt = model()
    dataset = open_dataset(
        data,
        [InputSpec("tokens", "uint8", ("batch", gpt.config.context + 1))],
        folder / f"cache-{rank}",
    )
    training: nn.Module = Training(gpt)
    if workers > 1:
        training = DistributedDataParallel(training)
    optimizer = example.optimizer(gpt)
    each = example.ROWS // workers
    losses = []
    for step in range(steps):
        batch = dataset.batch(rows(0, dataset.size, step * example.ROWS + rank * each, each))
        loss, _ = training(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), CLIP_NORM)
        for group in optimizer.param_groups:
            group["lr"] = example.PEAK_RATE * example.schedule(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / workers)
    dist.destroy_process_group()
    if rank == 0:
        queue.put(losses)


def difference(one: list[float], other: list[float]) -> float:
    """Return the greatest relative difference between two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(other, one, strict=True))


def freeze(spec: str, path: Path) -> Path:
    """Run `trainload freeze` and return the package's path."""
    subprocess.run(
        [sys.executable, "-m", "trainload", "freeze", spec, "-o", str(path)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return path


def main() -> int:
    """Run the benchmark. Returns 1 if a difference is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--precision", choices=["fp32", "bf16", "both"], default="both")
    parser.add_argument("--out", type=Path, default=RESULTS / "parity.json")
    arguments = parser.parse_args()
    began = time.perf_counter()
    see_example()
    import corpus
    from model import Config

    steps = arguments.steps
    console = screen()
    result: dict[str, Any] = {"machine": machine(), "steps": steps}
    missed = False
    with tempfile.TemporaryDirectory(prefix="trainload-parity-") as name:
        scratch = Path(name)
        os.environ.setdefault("TRAINLOAD_CACHE_DIR", str(scratch / "cache"))
        data = corpus.build(scratch / "corpus", Config().context).train

        def curves(package: Path) -> dict[str, list[float]]:
            one = {"single": curve(package, data, steps, scratch, 1, "single")}
            return one | {
                strategy: curve(package, data, steps, scratch, 2, strategy)
                for strategy in STRATEGIES
            }

        if arguments.precision != "bf16":
            found = curves(freeze(f"{EXAMPLE / 'job.py'}:job_fp32", scratch / "fp32.tl"))
            apart = {
                strategy: difference(found["single"], found[strategy]) for strategy in STRATEGIES
            }
            result["fp32"] = {
                "losses": found,
                "difference_from_one_worker": apart,
                "greatest": max(apart.values()),
                "bar": FP32_BAR,
            }
            missed |= max(apart.values()) > FP32_BAR
            lines = [
                (strategy, f"{value:.2e}", f"{found[strategy][-1]:.6f}")
                for strategy, value in apart.items()
            ]
            title = (
                f"fp32, dropout on, {steps} steps: two workers beside one (last loss"
                f" {found['single'][-1]:.6f})"
            )
            console.print(
                table(title, ("strategy", "greatest relative difference", "last loss"), lines)
            )
            console.print(
                f"greatest: {max(apart.values()):.2e}; the bar is {FP32_BAR:g}", highlight=False
            )
        if arguments.precision != "fp32":
            found = curves(freeze(f"{HERE / 'parity_jobs.py'}:bf16", scratch / "bf16.tl"))
            eager = {str(workers): eager_curve(data, steps, scratch, workers) for workers in (1, 2)}
            apart = {
                strategy: difference(found["single"], found[strategy]) for strategy in STRATEGIES
            }
            own = difference(eager["1"], eager["2"])
            result["bf16"] = {
                "losses": found,
                "eager_losses": eager,
                "difference_from_one_worker": apart,
                "eager_difference": own,
                "ratio": {strategy: value / own for strategy, value in apart.items()},
                "trainload_beside_eager": difference(eager["1"], found["single"]),
                "bar": BF16_BAR,
            }
            missed |= max(apart.values()) > BF16_BAR * own
            beside = [
                (strategy, f"{value:.2e}", f"{value / own:.2f}", f"{found[strategy][-1]:.6f}")
                for strategy, value in apart.items()
            ]
            beside.append(("eager DDP", f"{own:.2e}", "1.00", f"{eager['2'][-1]:.6f}"))
            columns = ("strategy", "greatest relative difference", "of eager DDP's", "last loss")
            console.print(
                table(f"bf16, dropout off, {steps} steps: two workers beside one", columns, beside)
            )
            console.print(f"the bar is {BF16_BAR:g} times eager DDP's own", highlight=False)
    result["seconds"] = time.perf_counter() - began
    save(result, arguments.out)
    note(f"written: {arguments.out}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
