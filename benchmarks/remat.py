"""Measure the memory and time of a step with and without torch.utils.checkpoint in the model.

    python benchmarks/remat.py

Compares eager PyTorch with trainload. The model is a transformer of 12 layers (pre-norm, attention,
GELU) in fp32; a step is forward and backward, without the optimizer. Every system is a
single-threaded CPU process that has loaded only what it runs (other processes freeze and compile
the graphs). They wait on a pipe; one at a time runs a step, round after round.

Peak: the greatest amount of memory allocated by torch during a step on top of that before the step,
from torch's profiler; it is the same in every round and is taken in a separate, untimed step.
Resident: the kernel's high-water mark of the process during the timed steps. Norm: that of the
gradient; in a package's steps, that of rows x loss.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measure import (
    MIB,
    RESULTS,
    ROOT,
    PeakMemory,
    machine,
    median,
    note,
    save,
    screen,
    spread,
    table,
)

EXPECTED = {
    "eager": (
        "one value of (tokens, width) for each layer, and all of one layer: a fifth of the peak; a"
        " third more time"
    ),
    "uncompiled": "as eager: it calls the same kernels in the same order",
    "compiled": (
        "all kept, less than eager, since kernels are fused; with checkpoints as uncompiled, within"
        " a tenth; a quarter more time"
    ),
}
"""Expectations, written before the first measurement."""
LAYERS, HEADS, TIME = 12, 4, 128
KINDS = ("eager", "uncompiled", "compiled")


def system_name(kind: str, kept: bool) -> str:
    return f"{kind}, {'all kept' if kept else 'checkpoints'}"


def make_job(kept: bool, width: int, rows: int) -> Any:
    """Build the job; its weights and batch are the same in every process."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    from trainload.capture.job.definition import Job

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                self.qkv(self.first(x))
                .view(*x.shape[:2], 3, HEADS, -1)
                .permute(2, 0, 3, 1, 4)
                .unbind()
            )
            x = x + self.out(
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
                .transpose(1, 2)
                .reshape(x.shape)
            )
            y: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
            return y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) if kept else checkpoint(block, x, use_reentrant=False)
            return x

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value: Tensor = model(batch["x"]).square().mean()
        return value

    torch.manual_seed(0)
    model, batch = Net(), {"x": torch.randn(rows, TIME, width)}
    return Job(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )


def prepare(kept: bool, options: argparse.Namespace, folder: Path) -> None:
    """Freeze the job and compile its training graph, in a process of its own."""
    _begin(folder)
    import torch

    import trainload
    from trainload.launching.node.build import compile_build

    package = trainload.freeze(make_job(kept, options.width, options.rows), folder / f"{kept}.tl")
    built = compile_build(
        package, _plan(package), torch.device("cpu"), folder / "cache", lambda *_: None
    )
    (folder / f"{kept}.build").write_text(str(built))


def serve(
    kind: str, kept: bool, options: argparse.Namespace, folder: Path, pipe: Connection
) -> None:
    """Serve a system in a new process: run a step per message "time" or "peak", until "stop"."""
    _begin(folder)
    step = (
        _eager(make_job(kept, options.width, options.rows))
        if kind == "eager"
        else _packaged(kind, kept, folder)
    )
    from tests.autograd_trace.memory import peak_bytes

    norm = float(sum(g.double().square().sum() for g in step()[1]) ** 0.5)
    memory = PeakMemory()
    while (asked := pipe.recv()) != "stop":
        if asked == "peak":
            pipe.send({"peak": peak_bytes(step), "norm": norm})
            continue
        memory.reset()
        began = time.perf_counter()
        step()
        pipe.send({"seconds": time.perf_counter() - began, "resident": memory.read()["peak"]})


def _begin(folder: Path) -> None:
    os.environ["TRAINLOAD_STATE_DIR"] = str(folder / "state")
    for place in (ROOT / "src", ROOT):
        sys.path.insert(0, str(place))
    import torch

    torch.set_num_threads(1)


def _plan(package: Any) -> Any:
    import trainload
    from trainload.sharding.plans.plan import Cluster

    return trainload.plan(package, Cluster(devices_per_node=1), "single")


def _eager(job: Any) -> Callable[[], Any]:
    parameters = list(job.model.parameters())

    def step() -> Any:
        job.model.zero_grad(set_to_none=True)
        loss = job.loss(job.model, job.batch)
        loss.backward()
        return loss.detach(), [p.grad for p in parameters]

    return step


def _packaged(kind: str, kept: bool, folder: Path) -> Callable[[], Any]:
    import torch
    from safetensors.torch import load_file

    import trainload
    from trainload.autograd_trace.graphs import Role
    from trainload.launching.node.build import load_build, uncompiled_build
    from trainload.sharding.rewriting.rewrite import Phase

    package = trainload.open(folder / f"{kept}.tl")
    plan = _plan(package)
    if kind == "compiled":
        built = load_build(
            Path((folder / f"{kept}.build").read_text()), package, plan, folder / "cache"
        )
    else:
        built = uncompiled_build(package, plan, torch.device("cpu"))
    graph = built.train["train"][Phase.ONLY]
    program = package.program()
    batch = load_file(folder / "batch.safetensors")
    flats = {}
    for bucket in plan.buckets:
        flats[bucket.name] = torch.zeros(bucket.length)
        for slot in bucket.slots:
            flats[bucket.name][slot.offset : slot.offset + slot.length] = program.state[
                slot.parameter
            ].flatten()
    scalars = {Role.SEED: 0, Role.STEP: 0, Role.ROW: 0, Role.SCALE: 1.0}
    arguments = [
        (
            flats[p.name]
            if p.role is Role.BUCKET
            else batch[p.name]
            if p.role is Role.BATCH
            else torch.tensor(scalars[p.role])
        )
        for p in graph.inputs
    ]
    gradients = [i for i, p in enumerate(graph.outputs) if p.role is Role.BUCKET_GRADIENT]

    def step() -> Any:
        with torch.no_grad():
            results = graph.call(*arguments)
        return results[0], [results[i] for i in gradients]

    return step


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Return system -> measurements."""
    context = multiprocessing.get_context("spawn")
    for kept in (True, False):
        note(f"freezing and compiling, {'all kept' if kept else 'checkpoints'}")
        child = context.Process(target=prepare, args=(kept, options, folder))
        child.start()
        child.join()
        if child.exitcode != 0:
            raise SystemExit("the job could not be prepared")
    pipes: dict[str, Connection] = {}
    for kind in KINDS:
        for kept in (True, False):
            near, far = context.Pipe()
            context.Process(
                target=serve, args=(kind, kept, options, folder, far), daemon=True
            ).start()
            far.close()
            pipes[system_name(kind, kept)] = near

    def ask(name: str, what: str) -> dict[str, Any]:
        pipes[name].send(what)
        answer: dict[str, Any] = pipes[name].recv()
        return answer

    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in pipes}
    for number in range(options.rounds + 1):  # the first round is warmup
        for name in pipes:
            found = ask(name, "time")
            if number:
                rounds[name].append(found)
        note(f"round {number} of {options.rounds}")
    figures: dict[str, dict[str, Any]] = {}
    for name, found in rounds.items():
        seconds = [f["seconds"] for f in found]
        figures[name] = {
            **ask(name, "peak"),
            "seconds": seconds,
            "median": median(seconds),
            "spread": spread(seconds),
            "resident": max(f["resident"] for f in found),
        }
        pipes[name].send("stop")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument(
        "--rows", type=int, default=32, help=f"sequences of {TIME} positions per batch"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed steps per system")
    parser.add_argument("--out", type=Path, default=RESULTS / "remat.json", help="output file")
    options = parser.parse_args()
    about = machine()
    sys.path.insert(0, str(ROOT / "src"))
    with tempfile.TemporaryDirectory() as scratch:
        from safetensors.torch import save_file

        save_file(
            make_job(True, options.width, options.rows).batch, Path(scratch) / "batch.safetensors"
        )
        figures = measure(options, Path(scratch))
    settings = {
        "layers": LAYERS,
        "heads": HEADS,
        "time": TIME,
        "width": options.width,
        "rows": options.rows,
        "rounds": options.rounds,
    }
    save(
        {"machine": about, "settings": settings, "expected": EXPECTED, "systems": figures},
        options.out,
    )
    rows = []
    for kind in KINDS:
        base = figures[system_name(kind, True)]
        for kept in (True, False):
            name = system_name(kind, kept)
            found = figures[name]
            cells = [
                f"{found['peak'] / MIB:.0f}",
                f"{found['peak'] / base['peak']:.2f}",
                f"{found['resident'] / MIB:.0f}",
            ]
            cells += [
                f"{found['median'] * 1e3:.0f}",
                f"{found['median'] / base['median']:.2f}",
                f"{found['spread'] or 0:.0%}",
            ]
            rows.append([name, *cells, f"{found['norm']:.9g}"])
    columns = [
        "",
        "peak MiB",
        "of all kept",
        "resident MiB",
        "ms",
        "of all kept",
        "+-",
        "gradient norm",
    ]
    screen().print(table("One step, forward and backward", columns, rows))
    print(json.dumps(EXPECTED, indent=2))


if __name__ == "__main__":
    main()
