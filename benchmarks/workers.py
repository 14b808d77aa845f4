"""Pairs of worker processes, one per system, that wait idle until they have to run steps."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from measure import PeakMemory
from systems import Place, System

WORLD_SIZE = 2
START_SECONDS = 900.0
STEP_SECONDS = 60.0
"""Timeout of a step."""


class WorkerError(Exception):
    """A worker failed; the message is its traceback."""


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of one rank in a round.

    Seconds of each step, the last step's loss, and memory in bytes (see `PeakMemory.read`).
    """

    seconds: list[float]
    loss: float
    memory: dict[str, int]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that are the same for all systems."""

    name: str
    job: str
    package: Path
    plans: Path
    scratch: Path
    rows: int
    steps: int


class Workers:
    """The two processes of one system, as a context manager that ends them on exit."""

    def __init__(self, system: System, settings: Settings) -> None:
        self.system = system
        scratch = settings.scratch / f"{settings.name}-{system.name}".replace(" ", "-")
        scratch.mkdir(parents=True)
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for rank in range(WORLD_SIZE):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(system, settings, rank, scratch, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the worker has already ended
                pipe.send(0)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()

    def wait_ready(self) -> dict[str, float]:
        """Wait until both ranks have built their trainer and run their first steps.

        Returns:
            Seconds to build and of the first step, from the slower rank; bytes that were resident
            before
            anything was built.
        """
        answers: list[dict[str, float]] = self._receive(START_SECONDS)
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def run(self, steps: int) -> list[Round]:
        """Run steps on both ranks; return one `Round` per rank."""
        for pipe in self._pipes:
            pipe.send(steps)
        return self._receive(STEP_SECONDS * steps)

    def _receive(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(
                        f"{self.system.name}: rank {rank} gave no answer in {timeout:.0f} s"
                    )
                answer = pipe.recv()
            except EOFError:
                raise WorkerError(f"{self.system.name}: rank {rank} has died") from None
            if isinstance(answer, str):
                raise WorkerError(f"{self.system.name}: rank {rank} failed:\n{answer}")
            answers.append(answer)
        return answers


def _serve(
    system: System, settings: Settings, rank: int, scratch: Path, pipe: Connection[Any, Any]
) -> None:
    """Run a worker: build its trainer, then run the number of steps in each message, until 0."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_CACHE_DIR=str(scratch / "inductor"),
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        _work(system, settings, rank, scratch, pipe)
    except BaseException:  # noqa: BLE001  # handed to the coordinator, which raises it
        pipe.send(traceback.format_exc())


def _work(
    system: System, settings: Settings, rank: int, scratch: Path, pipe: Connection[Any, Any]
) -> None:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from trainers import make_trainer

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch / 'rendezvous'}", rank=rank, world_size=WORLD_SIZE
    )
    whole = load_file(settings.plans / "batches.safetensors")
    mine = slice(rank * settings.rows, (rank + 1) * settings.rows)
    batches = [
        {name: value[number, mine].clone() for name, value in whole.items()}
        for number in range(settings.steps)
    ]
    del whole
    memory = PeakMemory()
    before = memory.now()
    began = time.perf_counter()
    place = Place(
        rank, WORLD_SIZE, settings.job, settings.package, settings.plans, scratch / "cache"
    )
    trainer = make_trainer(system, place)
    built = time.perf_counter()
    trainer.step(0, batches[0])
    first = time.perf_counter()
    trainer.step(1, batches[1])
    pipe.send(
        {
            "build_seconds": built - began,
            "first_step_seconds": first - built,
            "bytes_before": float(before),
        }
    )
    number = 2
    while steps := pipe.recv():
        dist.barrier()
        memory.reset()
        seconds = []
        loss = 0.0
        for _ in range(steps):
            began = time.perf_counter()
            loss = trainer.step(number, batches[number % len(batches)])
            seconds.append(time.perf_counter() - began)
            number += 1
        pipe.send(Round(seconds, loss, memory.read()))
    dist.destroy_process_group()
