"""Traces an autograd function together with its backward, which torch.export would leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainload.capture import marks
from trainload.capture.blame import own_backward

if TYPE_CHECKING:
    from trainload.capture.watch import Watch


class Context:
    """What forward and backward of an autograd function are given as `ctx`, as torch documents it."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.not_differentiable: tuple[Tensor, ...] = ()
        self.dirty: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        pass  # forward-mode differentiation is not captured

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.not_differentiable = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        self.dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass  # backward always has a gradient for each output here: zeros where none flows


def call_function(watch: Watch, cls: Any, args: tuple[Any, ...]) -> Any:
    """What `cls.apply(*args)` returns, with marks by which its backward becomes a part of the graph.

    Raises:
        CaptureError: it writes to its inputs, or its backward returns what does not fit.
    """
    tracked = torch.is_grad_enabled()
    needs = tuple(tracked and isinstance(a, Tensor) and a.requires_grad for a in args)
    context = Context(needs)
    with torch.no_grad():
        if cls.setup_context is not torch.autograd.Function.setup_context:
            result = cls.forward(*args)
            cls.setup_context(context, args, result)
        else:
            result = cls.forward(context, *args)
    if context.dirty:
        raise own_backward(
            f"the autograd function {cls.__name__} writes to its inputs (mark_dirty)", "Return a new tensor: work on input.clone()."
        )
    if not any(needs):
        return result
    values = list(result) if isinstance(result, tuple) else [result]
    fixed = {id(t) for t in context.not_differentiable}
    places = [i for i, v in enumerate(values) if isinstance(v, Tensor) and id(v) not in fixed and (v.is_floating_point() or v.is_complex())]
    if not places:
        return result
    number = watch.number()
    tangents = {i: watch.tangent(values[i], number) for i in places}
    given = [tangents[i] if i in tangents else torch.zeros_like(v) if isinstance(v, Tensor) else None for i, v in enumerate(values)]
    marks.BEGIN("backward", cls.__name__, number)
    found = cls.backward(context, *given)
    marks.END(number)
    gradients = list(found) if isinstance(found, tuple) else [found]
    if len(gradients) < len(args) or any(g is not None for g in gradients[len(args) :]):
        raise own_backward(
            f"the backward of the autograd function {cls.__name__} returns {len(gradients)} gradients for {len(args)} arguments",
            "Return one for each argument of forward, None where there is none.",
        )
    pairs = [(a, g) for a, g, needed in zip(args, gradients, needs, strict=False) if needed and g is not None]
    connected = marks.CONNECT([values[i] for i in places], [a for a, _ in pairs], [g for _, g in pairs], number)
    for place, value in zip(places, connected, strict=True):
        values[place] = value
    return tuple(values) if isinstance(result, tuple) else values[0]
