"""Our CTC loss operator has the values and gradients of torch's, and trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload
from trainload.capture.substitutes.ctc import ctc_loss
from trainload.launching.run.journal import losses, read_events

TARGETS = torch.tensor([[1, 2, 3, 1], [2, 2, 1, 1], [4, 3, 1, 1]])
FRAMES, LETTERS = torch.tensor([9, 8, 3]), torch.tensor([4, 2, 3])
JOINED = torch.cat([row[:length] for row, length in zip(TARGETS, LETTERS, strict=True)])
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "mean": ((TARGETS, FRAMES, LETTERS), {}),
    "sum": ((TARGETS, FRAMES, LETTERS), {"reduction": "sum"}),
    "none": ((TARGETS, FRAMES, LETTERS), {"reduction": "none"}),
    "joined targets": ((JOINED, FRAMES, LETTERS), {}),
    "lengths as lists": ((TARGETS, [9, 8, 3], [4, 2, 3]), {}),
    "another blank": ((TARGETS, FRAMES, LETTERS), {"blank": 5}),
    "an impossible row": (
        (TARGETS, torch.tensor([9, 8, 2]), LETTERS),
        {"zero_infinity": True, "reduction": "none"},
    ),
}


def log_probs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(9, 3, 6, generator=generator).log_softmax(-1).requires_grad_()


@pytest.mark.parametrize("name", sorted(CASES))
def test_values_and_gradients_are_torchs(name: str) -> None:
    args, options = CASES[name]
    ours, torchs = log_probs(), log_probs()
    found, expected = (
        ctc_loss(ours, *args, **options),
        functional.ctc_loss(torchs, *args, **options),
    )
    torch.testing.assert_close(found, expected)
    weights = torch.arange(1.0, 1.0 + found.numel()).view(found.shape)
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]  # torch's own
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, torchs.grad)


def test_one_sequence_without_a_batch_is_torchs() -> None:
    ours, torchs = (log_probs()[:, 0].detach().requires_grad_() for _ in range(2))
    args = (TARGETS[0], torch.tensor(9), torch.tensor(4))
    ctc_loss(ours, *args).backward()  # type: ignore[no-untyped-call]  # torch's own
    functional.ctc_loss(torchs, *args).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, torchs.grad)


def test_the_number_of_a_reduction_is_torchs() -> None:
    for number in range(3):
        args = (TARGETS, FRAMES, LETTERS, 0, number)
        torch.testing.assert_close(ctc_loss(log_probs(), *args), torch.ctc_loss(log_probs(), *args))


@pytest.mark.slow  # test_export.py freezes such a model, which compares its gradients with eager's
@pytest.mark.parametrize(
    "compiled", [pytest.param(True, id="compiled"), pytest.param(False, id="interpreted")]
)
def test_a_model_with_it_trains(compiled: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        result: Tensor = nn.CTCLoss()(scores, batch["y"], batch["frames"], batch["letters"])
        return result

    generator = torch.Generator().manual_seed(1)
    rows = {
        "x": torch.randn(16, 12, 8, generator=generator),
        "y": torch.randint(1, 6, (16, 4), generator=generator),
        "frames": torch.randint(9, 13, (16,), generator=generator),
        "letters": torch.randint(1, 5, (16,), generator=generator),
    }
    np.savez(tmp_path / "rows.npz", **{name: value.numpy() for name, value in rows.items()})  # type: ignore[arg-type]  # arrays
    torch.manual_seed(0)
    job = trainload.Job(
        nn.Linear(8, 6),
        {n: t[:4] for n, t in rows.items()},
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        loss,
        steps=3,
        global_batch=16,
    )
    package = trainload.freeze(job, tmp_path / "ctc.tl")
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(
        package,
        plan,
        tmp_path / "rows.npz",
        run_dir=tmp_path / "run",
        backend="local",
        compile=compiled,
    )
    expected = []
    optimizer = torch.optim.SGD(job.model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(job.model, rows)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(value.item())
    assert losses(read_events(tmp_path / "run")) == pytest.approx(expected, rel=1e-5)
