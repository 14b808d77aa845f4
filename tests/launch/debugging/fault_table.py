"""Plant ten faults, find each with one command, and print the table of docs/guides/debugging.md.

python -m tests.launch.debugging.fault_table
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.launch.debugging.planted_faults import (
    LAYERS,
    ROWS,
    WIDTH,
    Chain,
    chain_loss,
    freeze,
    linear,
    plain_batch,
    rolled_loss,
    root_loss,
    save,
)
from tests.launch.debugging.wrong_devices import train_with_a_flipped_bit, train_with_a_wrong_device
from tests.launch.planted import job, planted
from tests.launch.tiny import write_rows
from tests.laws.runs import Run, ranks
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import trainload
from trainload.cli.main import run
from trainload.core.errors import TrainloadError

STEPS = 6


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        name: description.
        plant: makes a package or a run in a folder, and returns the command that finds the fault.
        found: texts that the command must print.
    """

    name: str
    plant: Callable[[Path], Sequence[object]]
    found: Sequence[str]


def rows_of(folder: Path, *, steps: int = 1, **changed: Any) -> Path:
    x = np.random.default_rng(0).standard_normal((ROWS * steps, WIDTH), dtype=np.float32)
    for row, value in changed.pop("rows", {}).items():
        x[row] = value
    return save(folder / "rows.npz", x=x, **changed)


def launched(package: trainload.Package, data: Path, folder: Path, **options: Any) -> Path:
    """Launch a run in this process, which may fail."""
    plan = trainload.plan(package, trainload.Cluster(), "single")
    settings = {"compile": False, "backend": "local", "checkpoint_every": 2, **options}
    with contextlib.suppress(TrainloadError):
        trainload.launch(package, plan, data, run_dir=folder / "run", **settings)
    return folder / "run"


def on_two_ranks(
    package: trainload.Package, data: Path, folder: Path, act: Any, **options: Any
) -> Path:
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero0")
    settings = {"checkpoint_every": 2, "keep": STEPS, **options}
    with ranks(2, [Run(folder / "run", package, plan, data, settings)], folder, act=act) as started:
        for process in started:
            process.join(300)
    return folder / "run"


def attention_in_bf16(folder: Path) -> Sequence[object]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )
    model: Any = LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(model.model.layers[3].self_attn, name).weight *= 1e20

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = model(input_ids=batch["ids"], labels=batch["ids"]).loss
        return result

    package = freeze(folder, model, loss, {"ids": torch.randint(0, 64, (ROWS, 16))})
    ids = np.random.default_rng(0).integers(0, 64, (ROWS, 16))
    return ("debug", package.path, "--data", save(folder / "rows.npz", ids=ids))


def logarithm(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss with the logarithm of 0 for a row of zeros."""
    result: Tensor = -model(batch["x"]).square().sum(1).log().mean()
    return result


def logarithm_of_zero(folder: Path) -> Sequence[object]:
    package = freeze(folder, linear(), logarithm, plain_batch(), steps=STEPS)
    data = rows_of(folder, steps=STEPS, rows={13: 0.0})
    return ("debug", launched(package, data, folder))


def division_in_backward(folder: Path) -> Sequence[object]:
    package = freeze(folder, linear(), root_loss, plain_batch(), steps=STEPS)
    return ("debug", launched(package, rows_of(folder, steps=STEPS, rows={4: 0.0}), folder))


def bad_index(folder: Path) -> Sequence[object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["word"]), batch["next"])

    words = {"word": torch.arange(ROWS), "next": torch.arange(ROWS)}
    package = freeze(folder, model, loss, words, steps=1)
    word = np.arange(ROWS)
    word[5] = 99
    data = save(folder / "rows.npz", word=word, next=np.arange(ROWS))
    return ("debug", package.path, "--data", data)


def wrong_kernel(folder: Path) -> Sequence[object]:
    package = trainload.freeze(job(), folder / "job.tl")
    data = write_rows(folder / "rows.npz", 40)
    return ("debug", package.path, "--data", data, "--against", "compiled")


def flipped_bit(folder: Path) -> Sequence[object]:
    package = freeze(folder, linear(), rolled_loss, plain_batch(), steps=STEPS)
    data = rows_of(folder, steps=STEPS)
    run_dir = on_two_ranks(package, data, folder, train_with_a_flipped_bit, statistics=1)
    return ("debug", run_dir, "--compare")


def sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), rate)


def diverging_optimizer(folder: Path) -> Sequence[object]:
    package = freeze(
        folder, linear(), rolled_loss, plain_batch(), steps=200, optimizer=sgd(rate=30.0)
    )
    run_dir = launched(package, rows_of(folder, steps=STEPS), folder, statistics=10)
    return ("debug", run_dir, "--step", 3, "--statistics")


class Gated(nn.Module):
    """A rectified layer; x (rows, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.relu(self.hidden(x)))
        return result


def dead_units(folder: Path) -> Sequence[object]:
    torch.manual_seed(0)
    model = Gated()
    nn.init.constant_(model.hidden.bias, -100)
    package = freeze(folder, model, rolled_loss, plain_batch())
    return ("debug", package.path, "--data", rows_of(folder), "--statistics")


def large_update(folder: Path) -> Sequence[object]:
    torch.manual_seed(0)
    model = Gated()
    with torch.no_grad():
        model.out.weight *= 1e-4
    package = freeze(folder, model, rolled_loss, plain_batch(), optimizer=sgd(rate=0.1))
    return ("debug", package.path, "--data", rows_of(folder), "--statistics")


def corrupted_activation(folder: Path) -> Sequence[object]:
    torch.manual_seed(0)
    batch = plain_batch() | {"layer": torch.full((ROWS,), LAYERS)}
    package = freeze(folder, Chain(), chain_loss, batch, steps=STEPS)
    data = rows_of(folder, steps=STEPS, layer=np.full(ROWS * STEPS, LAYERS))
    act = train_with_a_wrong_device
    return ("debug", on_two_ranks(package, data, folder, act, statistics=1), "--compare")


FAULTS = (
    Fault(
        "overflow in the attention of layer 3, bf16",
        attention_in_bf16,
        ["makes a", "forward of model.layers.3.self_attn", "modeling_llama.py"],
    ),
    Fault("log of 0 in the loss for one row", logarithm_of_zero, ["aten.log", "13 of", ".log()"]),
    Fault("division in backward", division_in_backward, ["backward", "4 of", "sqrt()"]),
    Fault("bad index in the data", bad_index, ["row 5"]),
    Fault("wrong compiled kernel", wrong_kernel, ["aten.relu.default", "functional.relu"]),
    Fault(
        "flipped bit in a rank's parameters",
        flipped_bit,
        ["departs at step 4", "ranks 0 and ranks 1 hold unequal copies of weight"],
    ),
    Fault("diverging optimizer", diverging_optimizer, ["% of the parameter"]),
    Fault("dead ReLUs", dead_units, ["100 % of its units are dead"]),
    Fault("exploding ratio of an update", large_update, ["out.weight", "% of the parameter"]),
    Fault(
        "corrupted activation on one of two ranks",
        corrupted_activation,
        ["layers.0 tanh departs at step 4", "torch.tanh(self.linear(x))"],
    ),
)
HEALTHY = (
    ("--data", "{data}"),
    ("--data", "{data}", "--statistics"),
    ("--data", "{data}", "--against", "float64"),
    ("--data", "{data}", "--against", "compiled"),
)


def shown(command: Sequence[object]) -> tuple[str, float]:
    """Return what a command prints, and its seconds."""
    printed = io.StringIO()
    began = time.perf_counter()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        run([str(part) for part in command])
    return printed.getvalue(), time.perf_counter() - began


def find(fault: Fault, folder: Path) -> bool:
    """Plant a fault and find it; print what was found."""
    command = fault.plant(folder)
    with (
        planted("forward, a wrong kernel")
        if fault.plant is wrong_kernel
        else contextlib.nullcontext()
    ):
        text, seconds = shown(command)
    flat = " ".join(text.split())
    missing = [each for each in fault.found if each not in flat]
    words = " ".join(Path(str(part)).name for part in command)
    print(f"\n## {fault.name}: {seconds:.1f} s\n\n$ trainload {words}\n{text}", flush=True)
    for each in missing:
        print(f"NOT FOUND: {each}")
    return not missing


def healthy(folder: Path) -> bool:
    """Return True if nothing is found in a job without a fault."""
    torch.manual_seed(0)
    package = freeze(folder, Gated(), rolled_loss, plain_batch(), steps=STEPS)
    data = rows_of(folder, steps=STEPS)
    results = []
    for options in HEALTHY:
        filled = [data if each == "{data}" else each for each in options]
        text, seconds = shown(["debug", package.path, *filled])
        notes = [each for each in ("% of", "saturated\n") if each in text]
        results.append("nothing" in text and not notes)
        print(f"healthy {' '.join(options[2:])}: {results[-1]}, {seconds:.1f} s", flush=True)
    run_dir = launched(package, data, folder, statistics=2)
    text, seconds = shown(["debug", run_dir, "--compare"])
    results.append("nothing: the run equals its steps" in text)
    print(f"healthy --compare: {results[-1]}, {seconds:.1f} s", flush=True)
    return all(results)


def main() -> int:
    """Find all faults; return 0 if all were found."""
    missed = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRAINLOAD_CACHE_DIR"] = cache
        for fault in FAULTS:
            with tempfile.TemporaryDirectory() as folder:
                if not find(fault, Path(folder)):
                    missed.append(fault.name)
        os.environ["TRAINLOAD_CACHE_DIR"] = str(Path(cache) / "other")
        with tempfile.TemporaryDirectory() as folder:
            if not healthy(Path(folder)):
                missed.append("healthy")
    print(f"\n{len(FAULTS) + 1 - len(missed)} of {len(FAULTS) + 1}; missed: {missed}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
