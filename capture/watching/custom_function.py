"""Traces an autograd function together with its backward, which torch.export alone would drop.

While torch traces, an operator of torch.library appears as an autograd function of torch's own, and
passes through here too.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainload.capture.diagnostics.blame import own_backward
from trainload.capture.watching import marks
from trainload.capture.watching.recorder import Recorder
from trainload.core.errors import CaptureError


class Context:
    """The `ctx` of forward and backward of an autograd function, as torch documents it."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.not_differentiable: tuple[Tensor, ...] = ()
        self.dirty: tuple[Tensor, ...] = ()
        self.gradient_dtypes: tuple[torch.dtype | None, ...] | None = None
        self.input_grad_buffers = (None,) * len(needs_input_grad)
        """Existing gradients that backward may add to: none, so it returns its own."""
        self.materialize = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        pass  # forward-mode differentiation is not captured

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.not_differentiable = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        self.dirty = tensors

    def set_output_grad_dtype(self, *dtypes: torch.dtype | None) -> None:
        self.gradient_dtypes = dtypes

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value


_NO_FORMULA = "no autograd formula was registered"
"""Part of torch's message when an operator without a derivative is differentiated."""
_MOST_OUTPUTS = 4
"""Largest number of outputs of a function whose backward checks which were used.

It is traced once for each set of used outputs.
"""


def call_function(watch: Recorder, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `cls.apply(*args, **kwargs)`.

    Marks make its backward a part of the graph.

    Raises:
        CaptureError: if the function writes to a tensor that is not both an argument and a result,
            or if its backward returns the wrong number of gradients.
    """
    tracked = torch.is_grad_enabled()
    needs = tuple(tracked and isinstance(a, Tensor) and a.requires_grad for a in args)
    context = Context(needs)
    with torch.no_grad():
        inputs = (
            tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
            if _may_write(cls)
            else args
        )
        if cls.setup_context is not torch.autograd.Function.setup_context:
            result = cls.forward(*inputs, **kwargs)
            cls.setup_context(context, inputs, result)
        else:
            result = cls.forward(context, *inputs, **kwargs)
    connected = _connect(watch, cls, context, args, result)
    if not context.dirty:
        return connected
    return _write_back(cls, context, args, inputs, result, connected)


def _may_write(cls: Any) -> bool:
    """Return True if the function's code names mark_dirty.

    Such a function is run on copies of its inputs.
    """
    written = [inspect.unwrap(method) for method in (cls.forward, cls.setup_context)]
    return any(
        "mark_dirty" in method.__code__.co_names
        for method in written
        if hasattr(method, "__code__")
    )


def _write_back(
    cls: Any,
    context: Context,
    args: tuple[Any, ...],
    copies: tuple[Any, ...],
    result: Any,
    connected: Any,
) -> Any:
    """Copy what a function wrote to copies of its inputs into the inputs.

    They are returned in place of its outputs.
    """
    before, after = (list(r) if isinstance(r, tuple) else [r] for r in (result, connected))
    for dirty in context.dirty:
        sources = [i for i, g in enumerate(copies) if g is dirty and g is not args[i]]
        places = [i for i, value in enumerate(before) if value is dirty]
        if not sources or not places:
            raise own_backward(
                f"the autograd function {cls.__name__} marks a tensor as dirty that is not both an"
                " argument and a result",
                "Return a new tensor: work on input.clone().",
            )
        after[places[0]] = args[sources[0]].copy_(after[places[0]])
    return tuple(after) if isinstance(result, tuple) else after[0]


def _connect(
    watch: Recorder, cls: Any, context: Context, args: tuple[Any, ...], result: Any
) -> Any:
    """Return the outputs of forward, connected to the gradients that backward computes."""
    needs = context.needs_input_grad
    if not any(needs):
        return result
    values = list(result) if isinstance(result, tuple) else [result]
    fixed = {id(t) for t in context.not_differentiable}
    places = [
        i
        for i, v in enumerate(values)
        if isinstance(v, Tensor)
        and id(v) not in fixed
        and (v.is_floating_point() or v.is_complex())
    ]
    if not places:
        return result
    if context.materialize:
        try:
            number, gradients = _trace_backward(watch, cls, context, len(args), values, places)
        except RuntimeError as error:
            if _NO_FORMULA not in str(error):
                raise
            # An operator of torch.library without a derivative raises only where it is
            # differentiated, which may never happen.
            return result
        pairs = [
            (a, g)
            for a, g, needed in zip(args, gradients, needs, strict=False)
            if needed and g is not None
        ]
        connected = marks.CONNECT(
            [values[i] for i in places], [a for a, _ in pairs], [g for _, g in pairs], number
        )
    else:
        connected = _connect_by_use(watch, cls, context, args, values, places)
    for place, value in zip(places, connected, strict=True):
        values[place] = value
    return tuple(values) if isinstance(result, tuple) else values[0]


def _trace_backward(
    watch: Recorder,
    cls: Any,
    context: Context,
    arguments: int,
    values: list[Any],
    used_outputs: list[int],
) -> tuple[int, list[Tensor | None]]:
    """Trace a backward for gradients that arrive at the outputs `used_outputs`.

    Returns:
        The number of the region, and the gradient for each argument.
    """
    number = watch.number()
    tangents = {i: watch.tangent(values[i], number) for i in used_outputs}
    incoming = [
        (
            tangents[i]
            if i in tangents
            else torch.zeros_like(v)
            if isinstance(v, Tensor) and context.materialize
            else None
        )
        for i, v in enumerate(values)
    ]
    marks.BEGIN("backward", cls.__name__, number)
    dtypes = context.gradient_dtypes or (None,) * len(values)
    try:
        returned = cls.backward(
            context,
            *(
                g if dtype is None or g is None else g.to(dtype)
                for g, dtype in zip(incoming, dtypes, strict=True)
            ),
        )
    finally:
        marks.END(number)
    gradients = list(returned) if isinstance(returned, tuple) else [returned]
    if len(gradients) < arguments or any(g is not None for g in gradients[arguments:]):
        raise own_backward(
            f"the backward of the autograd function {cls.__name__} returns {len(gradients)}"
            f" gradients for {arguments} arguments",
            "Return one for each argument of forward, or None where there is no gradient.",
        )
    return number, gradients


def _connect_by_use(
    watch: Recorder,
    cls: Any,
    context: Context,
    args: tuple[Any, ...],
    values: list[Any],
    places: list[int],
) -> Sequence[Tensor]:
    """Return the outputs of a function whose backward receives None for unused outputs.

    Which outputs are used is known only when the graph is differentiated, so backward is traced
    once for each set of used outputs. A set for which backward raises gets no graph and raises
    then, as in eager mode.
    """
    if len(places) > _MOST_OUTPUTS:
        raise own_backward(
            f"the backward of the autograd function {cls.__name__} distinguishes which of"
            f" {len(places)} outputs are used",
            f"Return at most {_MOST_OUTPUTS} tensors, or omit set_materialize_grads(False), so that"
            " backward receives zeros.",
        )
    inputs = [i for i, needed in enumerate(context.needs_input_grad) if needed]
    traced: list[tuple[int, int, list[Tensor | None]]] = []
    failed: list[Exception] = []
    for bits in range(2 ** len(places) - 1, 0, -1):
        try:
            number, computed = _trace_backward(
                watch,
                cls,
                context,
                len(args),
                values,
                [p for i, p in enumerate(places) if bits >> i & 1],
            )
        except CaptureError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's backward may raise anything where what it needs goes unused
            failed.append(error)
        else:
            traced.append((bits, number, [computed[i] for i in inputs]))
    if not traced:
        raise failed[0]
    connected: Sequence[Tensor] = marks.CONNECT_USED(
        [values[i] for i in places],
        [args[i] for i in inputs],
        [g for _, _, gradients in traced for g in gradients if g is not None],
        [bits for bits, _, _ in traced],
        [
            sum(1 << i for i, g in enumerate(gradients) if g is not None)
            for _, _, gradients in traced
        ],
        [number for _, number, _ in traced],
    )
    return connected
