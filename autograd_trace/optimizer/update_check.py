"""Compare a captured update with the optimizer's own steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainload.autograd_trace.graphs import UpdateGraph
from trainload.autograd_trace.optimizer.bound_optimizer import bound, step
from trainload.autograd_trace.optimizer.optimizer_state import read_state
from trainload.autograd_trace.optimizer.update_graph import checked_shape
from trainload.capture.job.tensor_classes import has_values
from trainload.capture.operators import calls_in
from trainload.core.errors import CaptureError

_RATES = (0.1, 0.05, 0.2)
"""Different learning rates, so that a rate that was frozen into a graph is detected, and large
enough for an error to be visible.
"""

_STEPS_TOGETHER = 12
"""Number of steps after which parameters that are trained together are compared with those trained
alone.

Shared values may take a while to have an effect: D-Adaptation's distance is 1e-6 at first, and
moves nothing for three steps. For the same reason state is compared too, on its own scale.
"""


def check_update(
    update: UpdateGraph,
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    steps: int,
) -> None:
    """Replay `steps` steps of a parameter of `shape` through the real optimizer and through the
    graphs, and compare.

    An elementwise update runs on the flattened parameter, whole and in two parts; any other on the
    parameter as it is.

    Raises:
        CaptureError: they differ.
    """
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator).to(dtype)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]
    (real,), after = _run_optimizer(optimizer, group, [start], [[g] for g in gradients])
    flat = start if update.shape is not None else start.flatten()
    flat_gradients = [g.view(flat.shape) for g in gradients]
    graphs = update.first.module(), update.following.module()
    captured, state = _run_graphs(graphs, flat, flat_gradients)
    tolerance = _tolerance(dtype) * steps / len(_RATES)
    tolerance = max(
        tolerance,
        (
            _rounding_within(update, dtype) * float((real - start).abs().max())
            if start.numel()
            else 0.0
        ),
    )
    if not torch.allclose(captured.view(shape), real, rtol=tolerance, atol=tolerance):
        raise CaptureError(
            f"the captured update differs from the optimizer's own on a parameter of shape {shape}",
            where=f"{type(optimizer).__name__}, {update.group}",
            expected=f"at most {tolerance:g}",
            got=f"{float((captured.view(shape) - real).abs().max()):.2g} after {steps} steps",
            hint=(
                "The optimizer keeps something outside self.state[param], such as an attribute that"
                " step() changes."
            ),
        )
    real_state = read_state(after, real)
    different = next(
        (
            spec.name
            for spec, value in zip(update.state, state, strict=True)
            if not _is_close(real_state[spec.name], value, tolerance)
        ),
        None,
    )
    if different is not None:
        raise CaptureError(
            f"the captured update's {different!r} differs from the optimizer's own on a parameter"
            f" of shape {shape}",
            where=f"{type(optimizer).__name__}, {update.group}",
            expected=f"a relative difference of at most {tolerance:g}",
            hint=(
                "The optimizer keeps something outside self.state[param], such as an attribute that"
                " step() changes."
            ),
        )
    if update.elementwise and flat.numel() > 1:
        cut = flat.numel() // 3
        parts = torch.cat(
            [
                _run_graphs(graphs, flat[s], [g[s] for g in flat_gradients])[0]
                for s in (slice(0, cut), slice(cut, None))
            ]
        )
        if not torch.allclose(parts, captured, rtol=tolerance, atol=tolerance):
            raise CaptureError(
                "the update of a slice differs from the same part of the whole parameter's update",
                where=f"{type(optimizer).__name__}, {update.group}",
                hint="Make the update of an element depend on that element only.",
            )


def check_separate(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    """Check that the update of a parameter depends on no other parameter.

    Raises:
        CaptureError: it does.
    """
    generator = torch.Generator().manual_seed(2)
    params = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    gradients = [
        [torch.randn(shape, generator=generator).to(dtype) * (1 + 9 * i) for i in range(2)]
        for _ in range(_STEPS_TOGETHER)
    ]
    together, both = _run_optimizer(optimizer, group, params, gradients)
    tolerance = _tolerance(dtype) * _STEPS_TOGETHER / len(_RATES)
    for i in range(2):
        (alone,), one = _run_optimizer(optimizer, group, [params[i]], [[g[i]] for g in gradients])
        own, others = read_state(one, alone), read_state(both, together[i])
        differs = [name for name in own if not _is_close(own[name], others.get(name), tolerance)]
        if not differs and torch.allclose(together[i], alone, rtol=tolerance, atol=tolerance):
            continue
        raise CaptureError(
            "the update of a parameter depends on other parameters of its group",
            where=f"Job.optimizer: {type(optimizer).__name__}",
            expected="an update of (parameter, gradient, state)",
            got=(
                f"a different {differs[0]!r} when updated together with another parameter"
                if differs
                else "a different result when updated together with another parameter"
            ),
            hint=(
                "Update each parameter independently. To clip the norm over all gradients, use"
                " Job.clip_norm."
            ),
        )


def check_alike(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Check that an optimizer treats every parameter like any other tensor with the same group,
    values, gradient and state.

    Args:
        optimizer: the job's own. Afterwards its state and attributes are those of later steps.
        names: id of a parameter that gets a gradient -> its name.

    Raises:
        CaptureError: it distinguishes between parameters.
    """
    generator = torch.Generator().manual_seed(3)
    real = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(map(has_values, real)):
        return  # a job without values is checked on a smaller one that has them
    alone: dict[tuple[int, tuple[int, ...]], tuple[Tensor, list[Tensor], Tensor]] = {}
    trained: list[Tensor] = []
    expected: list[tuple[Tensor, list[Tensor], Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        for param in (p for p in group["params"] if id(p) in names):
            key = number, tuple(param.shape)
            if key not in alone:
                shape = key[1] if optimizer.state else checked_shape(key[1])
                start, *gradients = (
                    torch.randn(shape, generator=generator).to(param.device, param.dtype)
                    for _ in range(1 + len(_RATES))
                )
                (moved,), _ = _run_optimizer(optimizer, group, [start], [[g] for g in gradients])
                alone[key] = start, gradients, moved
            trained.append(param)
            expected.append(alone[key])
    if not trained:
        return
    before = [(p, p.data, p.grad, p.requires_grad) for p in real]
    options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    try:
        for param in real:
            param.grad = None
            # an optimizer with differentiable=True would write to a leaf that requires a gradient
            param.requires_grad = False
        for param, (start, _, _) in zip(trained, expected, strict=True):
            param.data = start.clone()
        _take_steps(
            optimizer, trained, list(zip(*(gradients for _, gradients, _ in expected), strict=True))
        )
        apart = [
            names[id(p)]
            for p, (_, _, moved) in zip(trained, expected, strict=True)
            if not torch.allclose(p, moved, rtol=_tolerance(p.dtype), atol=_tolerance(p.dtype))
        ]
    finally:
        for param, data, gradient, requires in before:
            param.data, param.requires_grad, param.grad = data, requires, gradient
        for group, saved_options in zip(optimizer.param_groups, options, strict=True):
            group |= saved_options
    if apart:
        raise CaptureError(
            "the optimizer updates a parameter differently from another tensor of the same shape"
            " and group",
            where=f"Job.optimizer: {type(optimizer).__name__}, {apart[0]}",
            expected="an update of (parameter, gradient, state, options of the group)",
            hint=(
                "Put it into a separate group, and distinguish groups by their options, not"
                " parameters by their names or attributes."
            ),
        )


def _rounding_within(update: UpdateGraph, dtype: torch.dtype) -> float:
    """Return the relative rounding error of the lowest dtype that an update computes in, if lower
    than the parameter's: Muon's bfloat16.
    """
    values = (node.meta.get("val") for node in calls_in(update.following.graph_module))
    kinds = {
        value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()
    }
    return max(
        (torch.finfo(kind).eps for kind in kinds if kind.itemsize < dtype.itemsize), default=0.0
    )


def _is_close(first: Any, second: Any, tolerance: float) -> bool:
    """Return True if two values of an optimizer's state are equal up to rounding. Small values are
    compared on their own scale.
    """
    if not isinstance(first, Tensor | int | float) or isinstance(first, bool):
        return True  # not a value that an update computes with
    if not isinstance(second, Tensor | int | float):
        return False
    one, other = (
        torch.as_tensor(value, dtype=torch.float64).flatten() for value in (first, second)
    )
    return torch.allclose(
        one, other, rtol=tolerance, atol=tolerance * float(one.abs().max()) if one.numel() else 0.0
    )


def _run_optimizer(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Return the parameters after the real optimizer's steps, at `_RATES`, and that optimizer."""
    params = [p.clone() for p in params]
    stepped = bound(optimizer, group, params, _RATES[0])
    _take_steps(stepped, params, gradients)
    return params, stepped


def _take_steps(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> None:
    """Make an optimizer take a step for each entry of `gradients`, at `_RATES` in turn. Gradients
    are in the order of `params`.
    """
    for step_gradients, rate in zip(gradients, itertools.cycle(_RATES)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for param, gradient in zip(params, step_gradients, strict=True):
            param.grad = gradient.clone()
        step(optimizer, tuple(params[0].shape))


def _tolerance(dtype: torch.dtype) -> float:
    return 8 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 5e-6


def _run_graphs(
    graphs: tuple[nn.Module, nn.Module], start: Tensor, gradients: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the parameter and the state after the captured steps. `graphs`: of the first step, and
    of those that follow.
    """
    first, following = graphs
    rates = [torch.tensor(_RATES[k % len(_RATES)]) for k in range(len(gradients))]
    param, *state = first(start, gradients[0], rates[0], ())
    for gradient, rate in zip(gradients[1:], rates[1:], strict=True):
        param, *state = following(param, gradient, rate, tuple(state))
    return param, state
