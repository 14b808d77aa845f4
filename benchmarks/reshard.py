"""Measure what a rank reads and allocates when a run resumes with another plan.

    python benchmarks/reshard.py [--width 2048] [--layers 12]

A checkpoint of a stack of matrices with AdamW's state is written with ZeRO-3 on four ranks. For
other plans, each rank is a process that loads it like a worker. Read: bytes read by the process
according to the kernel (rchar of /proc/self/io). Beside: the peak resident set while loading, minus
the resident set before and the tensors that remain. Seconds: the time to load files that are in the
page cache, an upper limit of what an in-memory copy of the checkpoint could save.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from matrix_stack import ROWS, begin_save, make_job, random_state
from measure import MIB, RESULTS, ROOT, PeakMemory, alone, machine, note, save, screen, table

PLANS: dict[str, tuple[int, str | None, dict[str, Any]]] = {
    "ZeRO-3 on 4, as it was written": (4, "zero3", {}),
    "ZeRO-3 on 8": (8, "zero3", {}),
    "tensor 2": (2, None, {"tensor_ranks": 2}),
    "one process": (1, "single", {}),
    "pipeline 2": (2, None, {"pipeline_ranks": 2}),
    "ZeRO-3 on 2 x tensor 2": (4, "zero3", {"tensor_ranks": 2}),
    "ZeRO-1 on 2": (2, "zero1", {}),
}
EXPECTED = (
    "reads within 1.1 of what a rank holds where shares are rows; beside it less than a bucket's"
    " 25 MiB"
)


def write(package: str, run: str) -> None:
    """Write the checkpoint, with all ranks in this process."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import trainload
    from trainload.launching.checkpoints.checkpoint_place import place_of
    from trainload.launching.checkpoints.retention import Retention
    from trainload.launching.checkpoints.writer import CheckpointWriter

    plan = trainload.plan(trainload.open(package), trainload.Cluster(devices_per_node=4), "zero3")
    writers = [
        CheckpointWriter(place_of(Path(run)), plan, rank, "written", keep=Retention(1))
        for rank in range(plan.world_size)
    ]
    for rank, writer in enumerate(writers):
        begin_save(writer, random_state(plan, rank))
    for writer in writers:
        writer.wait()


def load(package: str, run: str, case: dict[str, Any], rank: int, result: str) -> None:
    """Load one rank in this process, and write the measurements to a file."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import trainload
    from trainload.launching.checkpoints.checkpoint_place import place_of
    from trainload.launching.checkpoints.load import load_sharded
    from trainload.launching.checkpoints.reader import Checkpoint, latest_checkpoint

    plan = trainload.Plan.model_validate(case)
    path = latest_checkpoint(place_of(Path(run)))
    assert path is not None
    trainload.open(package)
    gc.collect()
    memory = PeakMemory()
    memory.reset()
    before, began, start = memory.now(), _read_so_far(), time.perf_counter()
    state = load_sharded(Checkpoint.open(path), plan, rank)
    seconds = time.perf_counter() - start
    peak, ended = memory.read()["peak"], _read_so_far()
    kept = sum(tensor.nbytes for entries in state.flats.values() for tensor in entries.values())
    Path(result).write_text(
        json.dumps(
            {
                "read": ended - began,
                "kept": kept,
                "beside": peak - before - kept,
                "seconds": seconds,
            }
        )
    )


def _read_so_far() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2048, help="width of each matrix")
    parser.add_argument("--layers", type=int, default=12, help="number of matrices")
    parser.add_argument("--out", type=Path, default=RESULTS / "reshard.json", help="output file")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import trainload

    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        package = trainload.freeze(
            make_job(options.width, options.layers), Path(folder) / "package.tl"
        )
        run, result = str(Path(folder) / "run"), str(Path(folder) / "result.json")
        alone(write, str(package.path), run)
        whole = sum(path.stat().st_size for path in Path(run).rglob("*.safetensors"))
        for name, (devices, strategy, more) in PLANS.items():
            plan = trainload.plan(
                package,
                trainload.Cluster(devices_per_node=devices),
                strategy,
                global_batch=ROWS,
                **more,
            )
            bucket = max(each.length * 4 for each in plan.buckets)
            for rank in range(plan.world_size):
                alone(load, str(package.path), run, plan.model_dump(mode="json"), rank, result)
                found.append(
                    {
                        "plan": name,
                        "rank": rank,
                        "bucket": bucket,
                        "whole": whole,
                        **json.loads(Path(result).read_text()),
                    }
                )
            note(f"{name}: {[round(e['read'] / e['kept'], 3) for e in found if e['plan'] == name]}")
    rows = []
    for name in PLANS:
        ranks = [each for each in found if each["plan"] == name]
        worst = max(ranks, key=lambda each: each["read"] / each["kept"])
        beside = max(each["beside"] for each in ranks)
        figures = (worst["kept"], worst["read"], beside, worst["bucket"])
        slowest = max(each["seconds"] for each in ranks)
        rows.append(
            [
                name,
                *(f"{n / MIB:.1f}" for n in figures),
                f"{worst['read'] / worst['kept']:.3f}",
                f"{slowest:.2f}",
            ]
        )
    titles = [
        "plan",
        "kept",
        "read",
        "beside at most",
        "largest bucket",
        "read / kept",
        "seconds at most",
    ]
    screen().print(
        table(f"MiB of the rank that reads most, of {whole / MIB:.0f} MiB", titles, rows)
    )
    settings = {"width": options.width, "layers": options.layers}
    save({"expected": EXPECTED, "machine": machine(), **settings, "found": found}, options.out)


if __name__ == "__main__":
    main()
