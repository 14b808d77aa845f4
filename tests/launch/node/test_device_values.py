"""Values reach a rank's device without the host waiting for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tests.house.source import ROOT

from trainload.launching.node.device_values import moved_to, scalar_on, vector_on

CPU = torch.device("cpu")
STEPS = ("calls", "engine", "evaluation", "pipeline_step")
"""Modules of launch/worker whose code runs between the kernels of a step."""


def test_a_scalar_is_exact() -> None:
    big = 2**62 + 1
    assert scalar_on(CPU, big, torch.int64).item() == big
    assert torch.equal(
        scalar_on(CPU, 1 / 3, torch.float32), torch.tensor(1 / 3, dtype=torch.float32)
    )


def test_a_vector_has_its_values() -> None:
    assert vector_on(CPU, [0.5, 0.25], torch.float32).tolist() == [0.5, 0.25]


def test_a_tensor_of_the_host_is_not_copied_on_a_cpu() -> None:
    value = torch.arange(3)
    assert moved_to(CPU, value) is value


def waiting_calls(source: str) -> list[str]:
    """Return calls by which the host would wait for the device."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (
            (
                ast.unparse(node.func) in ("torch.tensor", "torch.as_tensor")
                and any(keyword.arg == "device" for keyword in node.keywords)
            )
            or (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in ("to", "cuda")
                and not any(keyword.arg == "non_blocking" for keyword in node.keywords)
            )
        )
    ]


@pytest.mark.parametrize("module", STEPS)
def test_a_step_makes_no_value_for_which_the_host_waits(module: str) -> None:
    assert waiting_calls((Path(ROOT) / "launch" / "worker" / f"{module}.py").read_text()) == []


@pytest.mark.parametrize(
    "call", ["torch.tensor(1, device=device)", "batch.to(device)", "value.cuda()"]
)
def test_a_call_that_waits_is_seen(call: str) -> None:
    assert waiting_calls(call) == [call]
