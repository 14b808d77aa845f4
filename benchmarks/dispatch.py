"""Compare the time to select the variant of a batch with the guard checks of torch.compile.

    python benchmarks/dispatch.py

Six inputs, four variants: text of any even length; with images; with a mask; with another flag.
trainload: `Dispatcher.pick`, which a run calls once per global batch, for lengths seen before and
for new lengths. torch.compile: the same four kinds of batch, passed to one compiled function of a
few additions (backend "eager", dynamic sizes) whose cache has an entry for each kind; the time of
the additions, measured by running them eagerly, is subtracted. The two sides alternate, and the
batches of each kind come in the same order.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measure import RESULTS, machine, median, note, save, screen, see_example, table

KINDS = ("text", "images", "masked", "ranked")
PEER = "torch.compile"
BUDGET = 20.0
"""Upper limit that the project guarantees, in microseconds."""


def batch(kind: str, length: int, rows: int = 8) -> dict[str, Any]:
    """Return a batch of one kind."""
    import torch

    found: dict[str, Any] = {
        "tokens": torch.zeros(rows, length, dtype=torch.int64),
        "labels": torch.zeros(rows, length, dtype=torch.int64),
        "positions": torch.zeros(rows, length, dtype=torch.int64),
        "weight": torch.ones(rows),
        "task": "rank" if kind == "ranked" else "predict",
    }
    if kind in ("images", "masked"):
        found["image"] = torch.zeros(rows, 3, 32, 32)
    if kind == "masked":
        found["mask"] = torch.ones(rows, length, length, dtype=torch.bool)
    return found


def package(folder: Path) -> Any:
    """Freeze a job with the four kinds as variants."""
    import torch
    from torch import nn
    from torch.export import Dim

    import trainload

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 8)
            self.image = nn.Linear(3, 8)

        def forward(
            self,
            tokens: Any,
            labels: Any,
            positions: Any,
            weight: Any,
            image: Any = None,
            mask: Any = None,
            task: str = "",
        ) -> Any:
            rows, length = tokens.shape
            x = (
                (self.embedding(tokens) + positions[..., None])
                .reshape(rows, length // 2, 2, 8)
                .mean(2)
            )
            if image is not None:
                x = x + self.image(image.mean((2, 3)))[:, None]
            if mask is not None:
                x = x * mask.float().mean((1, 2))[:, None, None]
            loss = ((x.mean((1, 2)) - labels.float().mean(1)) * weight).square().mean()
            return loss * 2 if task == "rank" else loss

    torch.manual_seed(0)
    auto = {
        "tokens": {1: Dim.AUTO},
        "labels": {1: Dim.AUTO},
        "positions": {1: Dim.AUTO},
        "mask": {1: Dim.AUTO, 2: Dim.AUTO},
    }
    job = trainload.Job(
        model=Model(),
        batch=batch("text", 16),
        variants={kind: batch(kind, 16) for kind in KINDS[1:]},
        dynamic=auto,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about variants that do not use all parameters
        return trainload.freeze(job, folder / "dispatch.tl")


def compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a compiled function of a batch with all kinds in its cache, and the uncompiled one."""
    import torch

    def function(batch: dict[str, Any]) -> Any:
        x = batch["weight"] + batch["tokens"].shape[1]
        if batch.get("image") is not None:
            x = x + batch["image"].shape[2]
        if batch.get("mask") is not None:
            x = x + batch["mask"].shape[1] + batch["labels"].shape[1] + batch["positions"].shape[1]
        return x * 2 if batch["task"] == "rank" else x

    made = torch.compile(function, backend="eager", dynamic=True)
    for kind, length in itertools.product(KINDS, (16, 18, 20)):
        made(batch(kind, length))
    return made, function


def microseconds(function: Callable[[Any], Any], batches: Iterator[Any], count: int) -> float:
    """Return the microseconds per call, in CPU time of this thread to exclude other load."""
    given = list(itertools.islice(batches, count))
    began = time.thread_time()
    for one in given:
        function(one)
    return (time.thread_time() - began) / count * 1e6


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=500, help="calls per kind and round")
    parser.add_argument("--out", type=Path, default=RESULTS / "dispatch.json")
    options = parser.parse_args()
    see_example()
    at_start = machine()
    with tempfile.TemporaryDirectory() as folder:
        frozen = package(Path(folder))
    dispatcher = frozen.dispatcher()
    made, plain = compiled()
    assert [dispatcher.pick(batch(kind, 24)) for kind in KINDS] == ["", *KINDS[1:]]
    known = {kind: batch(kind, 24) for kind in KINDS}
    found: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in KINDS} for name in ("seen", "new", PEER, "eager")
    }
    lengths = range(26, 66, 2)
    for number in range(options.rounds):
        note(f"round {number + 1} of {options.rounds}")
        for kind in KINDS:
            found["seen"][kind].append(
                microseconds(dispatcher.pick, itertools.repeat(known[kind]), options.calls)
            )
            new = frozen.dispatcher()  # without cached lengths
            found["new"][kind].append(
                microseconds(new.pick, (batch(kind, length) for length in lengths), len(lengths))
            )
            found[PEER][kind].append(
                microseconds(made, itertools.repeat(known[kind]), options.calls)
            )
            found["eager"][kind].append(
                microseconds(plain, itertools.repeat(known[kind]), options.calls)
            )
    rows = [
        [
            kind,
            f"{median(found['seen'][kind]):.1f}",
            f"{median(found['new'][kind]):.1f}",
            f"{median(found[PEER][kind]) - median(found['eager'][kind]):.1f}",
            f"{median(found['eager'][kind]):.1f}",
        ]
        for kind in KINDS
    ]
    heads = [
        "kind",
        "pick, length seen before, us",
        "pick, new length, us",
        f"{PEER}, less its work, us",
        "that work, us",
    ]
    screen().print(table("Finding the variant of a batch: 6 inputs, 4 variants", heads, rows))
    save({"machine": at_start, "budget_us": BUDGET, "microseconds": found}, options.out)
    return 0 if max(median(found["seen"][kind]) for kind in KINDS) < BUDGET else 1


if __name__ == "__main__":
    sys.exit(main())
