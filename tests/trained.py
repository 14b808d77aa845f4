"""Train a job as a package and in a loop of eager PyTorch, on the same rows, to compare the two."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.laws.runs import curve
from torch import Tensor

import trainload
from trainload import Job, Loss
from trainload.capture.job.inputs import leaves_of, rebuild
from trainload.capture.job.leading_rows import arranged
from trainload.launching.data.sampler import rows

UPDATES = 4
Draws = Callable[[Job, int, int], AbstractContextManager[Any]]
"""(job, step, rows of the batch) -> context manager in which eager PyTorch runs a step."""


def of_torch(job: Job, step: int, rows: int) -> AbstractContextManager[None]:
    """Let eager PyTorch draw its own random numbers."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Trained:
    """Loss of each of `UPDATES` updates, and the final parameters and buffers by name."""

    losses: list[float]
    state: dict[str, Tensor]


def assert_trains_as_eager(
    job: Job,
    data: Mapping[str, Any],
    folder: Path,
    tolerance: float = 1e-5,
    draws: Draws = of_torch,
    **options: Any,
) -> None:
    """Assert that a job's package trains to the losses and the state of eager PyTorch.

    The other arguments are those of `train_both`.
    """
    expected, got = train_both(job, data, folder, draws, **options)
    torch.testing.assert_close(
        torch.tensor(got.losses), torch.tensor(expected.losses), rtol=tolerance, atol=1e-7
    )
    for name, value in expected.state.items():
        torch.testing.assert_close(
            got.state[name], value, rtol=tolerance * 10, atol=1e-6, msg=f"{name} differs"
        )


def train_both(
    job: Job, data: Mapping[str, Any], folder: Path, draws: Draws = of_torch, **options: Any
) -> tuple[Trained, Trained]:
    """Train a job for `UPDATES` updates in eager PyTorch and as a package.

    Args:
        job: has one graph, no schedule and no clipping. Its optimizer factory is called twice, on
            two copies of the model.
        data: has the structure of `Job.batch`, without what all rows share. Rows are the first
            dimension; their number is a multiple of the global batch.
        folder: an empty folder.
        draws: source of eager PyTorch's random numbers.
        options: options of `launch`.

    Returns:
        Results of eager PyTorch, and of the package.
    """
    expected = train_eagerly(copy.deepcopy(job), data, draws)
    package = trainload.freeze(job, folder / "job.tl")
    columns: dict[str, Any] = {name: value.numpy() for name, value in leaves_of(data).items()}
    np.savez(folder / "rows.npz", **columns)
    plan = options.pop("plan", None) or trainload.plan(package, trainload.Cluster(), "single")
    given: dict[str, Any] = {"backend": "local", "compile": False, "steps": UPDATES, **options}
    result = trainload.launch(
        package,
        plan,
        folder / "rows.npz",
        run_dir=folder / "run",
        output=folder / "trained.tl",
        **given,
    )
    weights = trainload.open(folder / "trained.tl").weights
    return expected, Trained(
        curve(Path(result.run_dir)), {name: weights.tensor(name) for name in weights.names()}
    )


def train_eagerly(job: Job, data: Mapping[str, Any], draws: Draws = of_torch) -> Trained:
    """Train a job's own model in a plain loop, on the rows that a run would use.

    A model in training mode keeps the modes of its submodules.
    """
    job = arranged(job)
    model = job.model if job.model.training else job.model.train()
    assert job.optimizer is not None
    optimizer = job.optimizer(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    leaves = leaves_of(data)
    total = next(iter(leaves.values())).shape[0]
    size = job.global_batch or next(iter(leaves_of(job.batch).values())).shape[0]
    losses = []
    for step in range(UPDATES):
        chosen = torch.from_numpy(rows(job.seed, total, step * size, size))
        batch = rebuild(job.batch, {name: value[chosen] for name, value in leaves.items()})
        with draws(job, step, size):
            returned = model(**batch) if job.loss is None else job.loss(model, batch)
            loss = returned.value if isinstance(returned, Loss) else returned
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {
        name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    return Trained(losses, state)
