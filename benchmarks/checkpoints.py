"""Compare checkpoints with those of torch.distributed.checkpoint (DCP).

    python benchmarks/checkpoints.py [--width 2048] [--layers 12]

Two gloo ranks hold the same stack of matrices with AdamW's state: trainload as slices of flat
buckets (ZeRO-3), DCP as the tensors of FSDP2. Both save in the background to the same disk. Pause:
the time until the state may change again. Durable: the time until the checkpoint is complete and on
the disk. Loading is measured with the files in the page cache, on two ranks and on four, and for
trainload also with the verification of every digest, as a run does when it resumes. The first load
of a process touches new memory, where DCP fills the tensors of a model; the second one, "again",
does not. The systems alternate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matrix_stack import ROWS, begin_save, make_job, make_model, random_state
from measure import MIB, RESULTS, ROOT, machine, median, note, save, screen, table

SYSTEMS = ("trainload", "DCP, safetensors", "DCP, torch.save")
FIGURES = (
    "pause",
    "durable",
    "MiB",
    "load, same ranks",
    "again",
    "load, 4 ranks",
    "verify and load, same ranks",
)
SAVED_ON, OTHER = 2, 4


@contextmanager
def group(rank: int, world: int, port: int) -> Iterator[None]:
    """Be a rank of a gloo group within the context."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    try:
        yield
    finally:
        dist.barrier()
        dist.destroy_process_group()


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes, begun by all ranks together."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Ours:
    """trainload's checkpoints."""

    def __init__(self, folder: Path, width: int, layers: int, rank: int, world: int) -> None:
        import trainload

        self._folder, self._rank = folder, rank
        self._plan = trainload.plan(
            trainload.open(folder / "package.tl"),
            trainload.Cluster(devices_per_node=world),
            "zero3",
            global_batch=ROWS,
        )

    def save(self) -> tuple[float, float]:
        """Save. Returns the seconds of the pause, and those until it is durable."""
        from trainload.launching.checkpoints.checkpoint_place import place_of
        from trainload.launching.checkpoints.retention import Retention
        from trainload.launching.checkpoints.writer import CheckpointWriter

        state = random_state(self._plan, self._rank)
        writer = CheckpointWriter(
            place_of(self._folder / "run"), self._plan, self._rank, "written", keep=Retention(1)
        )
        pause = timed(lambda: begin_save(writer, state))
        began = time.perf_counter()
        writer.wait()
        return pause, pause + time.perf_counter() - began

    def load(self, *, verifies: bool = False) -> float:
        """Load, after a verification of all digests if `verifies`, each rank some of them.

        Returns the seconds.
        """
        import torch.distributed as dist

        from trainload.launching.checkpoints.checkpoint_place import place_of
        from trainload.launching.checkpoints.load import load_sharded
        from trainload.launching.checkpoints.reader import (
            Checkpoint,
            latest_checkpoint,
            usable_checkpoint,
        )

        place = place_of(self._folder / "run")

        def work() -> None:
            path = (
                usable_checkpoint(place, control=dist.group.WORLD).path
                if verifies
                else latest_checkpoint(place)
            )
            assert path is not None
            load_sharded(Checkpoint.open(path), self._plan, self._rank)

        return timed(work)


class Theirs:
    """DCP's checkpoints of an FSDP2 model; `safe`: in its safetensors format."""

    def __init__(self, folder: Path, width: int, layers: int, safe: bool) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._path, self._safe = str(folder / "checkpoint"), safe
        self._model = make_model(width, layers)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in self._model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._model(torch.randn(2, width)).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        """Return the tensors of the model and its optimizer, by name."""
        import torch
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer = get_state_dict(self._model, self._optimizer, options=flat)
        return {
            name: value
            for name, value in {**model, **optimizer}.items()
            if isinstance(value, torch.Tensor)
        }

    def save(self) -> tuple[float, float]:
        """Save. Returns the seconds of the pause, and those until it is durable."""
        import torch.distributed.checkpoint as dcp

        shutil.rmtree(self._path, ignore_errors=True)
        writer = (
            dcp.HuggingFaceStorageWriter(self._path, save_distributed=True)
            if self._safe
            else dcp.FileSystemWriter(self._path)
        )
        pending: list[Any] = []
        pause = timed(lambda: pending.append(dcp.async_save(self._state(), storage_writer=writer)))
        began = time.perf_counter()
        pending[0].result()
        return pause, pause + time.perf_counter() - began

    def load(self) -> float:
        """Load. Returns the seconds."""
        import torch.distributed.checkpoint as dcp

        reader = (
            dcp.HuggingFaceStorageReader(self._path)
            if self._safe
            else dcp.FileSystemReader(self._path)
        )
        state = self._state()
        return timed(lambda: dcp.load(state, storage_reader=reader))


def work(
    system: str,
    what: str,
    folder: str,
    width: int,
    layers: int,
    rank: int,
    world: int,
    port: int,
    out: str,
) -> None:
    """Be one rank of a system: save or load, and write the measurements of rank 0 to a file."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import warnings

    warnings.simplefilter("ignore")
    place = Path(folder) / system.replace(" ", "-")
    with group(rank, world, port):
        subject = (
            Ours(place, width, layers, rank, world)
            if system == SYSTEMS[0]
            else Theirs(place, width, layers, safe="safetensors" in system)
        )
        found: dict[str, float] = {}
        if what == "save":
            found["pause"], found["durable"] = subject.save()
        else:
            found["load"] = subject.load()
            found["again"] = subject.load()
            if isinstance(subject, Ours):
                found["verify"] = subject.load(verifies=True)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    os._exit(0)  # a thread of torch's may abort the interpreter's exit


def in_ranks(system: str, what: str, folder: str, options: Any, world: int) -> dict[str, float]:
    """Run `work` on `world` ranks and return the measurements of rank 0."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    out = str(Path(folder) / "found.json")
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(
            target=work,
            args=(system, what, folder, options.width, options.layers, rank, world, port, out),
        )
        for rank in range(world)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert not any(each.exitcode for each in ranks), f"{system}, {what}: a rank failed"
    found: dict[str, float] = json.loads(Path(out).read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2048, help="width of each matrix")
    parser.add_argument("--layers", type=int, default=12, help="number of matrices")
    parser.add_argument("--rounds", type=int, default=5, help="number of saves of each system")
    parser.add_argument("--out", type=Path, default=RESULTS / "checkpoints.json")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import trainload

    runs: dict[str, dict[str, list[float]]] = {name: {f: [] for f in FIGURES} for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / SYSTEMS[0]
        ours.mkdir()
        trainload.freeze(make_job(options.width, options.layers), ours / "package.tl")
        for number in range(options.rounds):
            for name in SYSTEMS:
                place = Path(folder) / name.replace(" ", "-")
                place.mkdir(exist_ok=True)
                shutil.rmtree(place / "run", ignore_errors=True)
                os.sync()
                saved = in_ranks(name, "save", folder, options, SAVED_ON)
                here = place / ("run" if name == SYSTEMS[0] else "checkpoint")
                size = sum(path.stat().st_size for path in here.rglob("*") if path.is_file())
                same = in_ranks(name, "load", folder, options, SAVED_ON)
                other = in_ranks(name, "load", folder, options, OTHER)
                figures = {
                    "pause": saved["pause"],
                    "durable": saved["durable"],
                    "MiB": size / MIB,
                    "load, same ranks": same["load"],
                    "again": same["again"],
                    "load, 4 ranks": other["load"],
                    **({"verify and load, same ranks": same["verify"]} if "verify" in same else {}),
                }
                for figure, value in figures.items():
                    runs[name][figure].append(value)
                note(f"{number + 1}: {name}: " + ", ".join(f"{v:.2f}" for v in figures.values()))
    medians = {
        name: {figure: median(values) for figure, values in of.items() if values}
        for name, of in runs.items()
    }
    rows = [
        (name, *(f"{of[figure]:.2f}" if figure in of else "" for figure in FIGURES))
        for name, of in medians.items()
    ]
    title = f"checkpoints of {SAVED_ON} ranks, seconds, medians of {options.rounds}"
    screen().print(table(title, ("system", *FIGURES), rows, marked=SYSTEMS[:1]))
    settings = {"width": options.width, "layers": options.layers, "rounds": options.rounds}
    save({"machine": machine(), **settings, "runs": runs, "medians": medians}, options.out)
    note(f"written: {options.out}")


if __name__ == "__main__":
    main()
