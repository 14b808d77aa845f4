"""Losses that restrict the sizes of their inputs, each at a marked line."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from tests.capture.jobs import Batch, job
from torch import nn

from trainload.capture.job.definition import Job


class Parts(nn.Module):
    """The layers and parameters of the losses below."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.positions = nn.Parameter(torch.zeros(16, 8))
        self.conv = nn.Conv1d(8, 8, 3, stride=2)


def reshaped(m: Any, b: Batch) -> Any:
    x = m.linear(b["x"])
    return x.reshape(x.shape[0], 6 * 8)  # the line


def branching(m: Any, b: Batch) -> Any:
    if b["x"].shape[1] > 16:  # the line
        return m.linear(b["x"]).relu()
    return m.linear(b["x"])


def asserting(m: Any, b: Batch) -> Any:
    assert b["x"].shape[0] % 2 == 0  # the line
    return m.linear(b["x"])


def positioned(m: Any, b: Batch) -> Any:
    return m.linear(b["x"]) + m.positions[: b["x"].shape[1]]  # the line


def whole_positions(m: Any, b: Batch) -> Any:
    return m.linear(b["long"]) + m.positions  # the line


def added(m: Any, b: Batch) -> Any:
    return m.linear(b["x"]) + b["y"]  # the line


def strided(m: Any, b: Batch) -> Any:
    return m.conv(b["x"].transpose(1, 2))  # the line


def strided_target(m: Any, b: Batch) -> Any:
    out = m.conv(b["x"].transpose(1, 2))
    return out - b["target"]  # the line


def free(m: Any, b: Batch) -> Any:
    return m.linear(b["x"])


INPUTS = {"x": (4, 6, 8), "y": (4, 6, 8), "long": (4, 16, 8), "target": (4, 8, 2)}


def asked(output: Callable[[Any, Batch], Any], *names: str, dynamic: Any = None) -> Job:
    torch.manual_seed(0)
    batch = {name: torch.randn(INPUTS[name]) for name in names or ("x",)}
    return job(
        Parts(), batch=batch, loss=lambda m, b: output(m, b).square().mean(), dynamic=dynamic or {}
    )


def line_of(output: Callable[..., Any]) -> tuple[str, str]:
    """Return the place and source of the line that is marked "the line"."""
    lines, first = inspect.getsourcelines(output)
    number = next(i for i, line in enumerate(lines) if "# the line" in line)
    return f"{os.path.relpath(str(inspect.getsourcefile(output)))}:{first + number}", lines[
        number
    ].strip()
