"""A stack of matrices with AdamW's state, as the benchmarks of checkpoints save and load it.

Modules are imported in functions, since ranks are processes that import this module first.
"""

from __future__ import annotations

from typing import Any

ROWS = 16
ENTRIES = ("param", "exp_avg", "exp_avg_sq")


def make_model(width: int, layers: int) -> Any:
    """Return the stack of matrices."""
    from torch import nn

    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def make_job(width: int, layers: int) -> Any:
    """Return a job that trains it."""
    import torch

    import trainload

    return trainload.Job(
        model=make_model(width, layers),
        batch={"x": torch.randn(2, width)},
        loss=lambda m, b: m(b["x"]).square().mean(),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        steps=1,
        global_batch=ROWS,
    )


def random_state(plan: Any, rank: int) -> Any:
    """Return the state of a rank, with random values."""
    import torch

    from trainload.launching.checkpoints.sharded_state import ShardedState, held

    flats: dict[str, dict[str, torch.Tensor]] = {}
    for bucket in plan.buckets:
        sizes = {entry: held(plan, bucket, entry, rank) for entry in ENTRIES}
        flats[bucket.name] = {
            entry: torch.randn(stop - start) for entry, (start, stop) in sizes.items()
        }
    scalars = {bucket.name: {"step": torch.tensor(1.0)} for bucket in plan.buckets}
    return ShardedState(flats, scalars, {})


def begin_save(writer: Any, state: Any) -> None:
    """Copy a state, and start to write it as the checkpoint of the first step."""
    from trainload.launching.checkpoints.index import DataPosition

    writer.save(1, state, DataPosition(fingerprint="f" * 64, seed=0, position=ROWS), {})
