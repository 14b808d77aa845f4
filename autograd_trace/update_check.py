"""Compares a captured update with the optimizer's own steps, before it is believed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainload.autograd_trace.bound_optimizer import bound
from trainload.autograd_trace.graphs import UpdateGraph
from trainload.capture.errors import CaptureError

_RATES = (0.1, 0.05, 0.2)
"""Learning rates that differ, so that one that was frozen into a graph shows, and are large enough for an error to show."""


def check_update(
    update: UpdateGraph, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...], steps: int
) -> None:
    """Replays `steps` steps of a parameter of `shape` through the real optimizer and through the graphs: flat, whole and in two parts where
    the update is elementwise, as it is otherwise.

    Raises:
        CaptureError: they differ.
    """
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator).to(dtype)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]
    real = _stepped(optimizer, group, [start], [[g] for g in gradients])[0]
    flat = start if update.shape is not None else start.flatten()
    given = [g.view(flat.shape) for g in gradients]
    captured = _run(update, flat, given)
    tolerance = _tolerance(dtype) * steps / len(_RATES)
    if not torch.allclose(captured.view(shape), real, rtol=tolerance, atol=tolerance):
        raise CaptureError(
            f"the captured update differs from the optimizer's own on a parameter of shape {shape}",
            where=f"{type(optimizer).__name__}, {update.group}",
            expected=f"at most {tolerance:g}",
            got=f"{float((captured.view(shape) - real).abs().max()):.2g} after {steps} steps",
            cure="The optimizer keeps something outside self.state[param], such as an attribute that step() changes.",
        )
    if update.elementwise and flat.numel() > 1:
        cut = flat.numel() // 3
        parts = torch.cat([_run(update, flat[s], [g[s] for g in given]) for s in (slice(0, cut), slice(cut, None))])
        if not torch.allclose(parts, captured, rtol=tolerance, atol=tolerance):
            raise CaptureError(
                "the update of a slice is not that part of the whole parameter's update",
                where=f"{type(optimizer).__name__}, {update.group}",
                cure="Let the update of an element depend on that element alone.",
            )


def check_separate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Demands that the update of a parameter depends on no other parameter.

    Raises:
        CaptureError: it does.
    """
    generator = torch.Generator().manual_seed(2)
    params = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    gradients = [[torch.randn(shape, generator=generator).to(dtype) * (1 + 9 * i) for i in range(2)] for _ in _RATES]
    together = _stepped(optimizer, group, params, gradients)
    alone = [_stepped(optimizer, group, [params[i]], [[g[i]] for g in gradients])[0] for i in range(2)]
    tolerance = _tolerance(dtype)
    if not all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(together, alone, strict=True)):
        raise CaptureError(
            "the update of a parameter depends on other parameters of its group",
            where=f"Job.optimizer: {type(optimizer).__name__}",
            expected="an update of (parameter, gradient, state)",
            cure="Give each parameter an update of its own; the gradient's norm over all of them is clipped by Job.clip_norm.",
        )


def _stepped(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], params: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """The parameters after the real optimizer's steps, at `_RATES`."""
    params = [p.clone() for p in params]
    stepped = bound(optimizer, group, params, _RATES[0])
    for given, rate in zip(gradients, itertools.cycle(_RATES)):
        stepped.param_groups[0]["lr"] = rate
        for param, gradient in zip(params, given, strict=True):
            param.grad = gradient.clone()
        stepped.step()
    return params


def _tolerance(dtype: torch.dtype) -> float:
    return 8 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 5e-6


def _run(update: UpdateGraph, start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    rates = [torch.tensor(_RATES[k % len(_RATES)]) for k in range(len(gradients))]
    param, *state = update.first.module()(start, gradients[0], rates[0], ())
    following = update.following.module()
    for gradient, rate in zip(gradients[1:], rates[1:], strict=True):
        param, *state = following(param, gradient, rate, tuple(state))
    result: Tensor = param
    return result
