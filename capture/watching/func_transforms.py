"""Replacements for torch.func and torch.autograd.grad in a traced model.

Each call becomes an operator of the graph.

What autograd itself runs (`torch.autograd.grad`, backward hooks, torch.func) takes place below
torch.export's tracer and is not recorded. The functions of torch.func are replaced by name, in all
modules but torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainload.capture.diagnostics.blame import own_backward
from trainload.capture.watching import marks
from trainload.capture.watching.nest import mapped, mapped_with
from trainload.capture.watching.recorder import Recorder
from trainload.capture.watching.scan import replacements


def transforms(watch: Recorder) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return a map from each function of torch.func to its replacement while tracing."""
    func, traced = torch.func, _Transforms(watch)
    return {
        func.vmap: traced.vmap,
        func.grad: traced.grad,
        func.grad_and_value: traced.grad_and_value,
        func.vjp: _vjp,
        func.jvp: _jvp,
        func.jacrev: traced.jacobian,
        func.jacfwd: traced.jacobian,  # the same values
        func.hessian: traced.hessian,
        func.linearize: _reject("linearize"),
        **replacements(traced.vmap),
    }


class _Transforms:
    """Transforms that become regions of the graph."""

    def __init__(self, watch: Recorder) -> None:
        self._watch = watch

    def grad(
        self,
        function: Callable[..., Any],
        argnums: int | tuple[int, ...] = 0,
        has_aux: bool = False,
    ) -> Callable[..., Any]:
        both = self.grad_and_value(function, argnums, has_aux)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            gradients, value = both(*args, **kwargs)
            return (gradients, value[1]) if has_aux else gradients

        return wrapper

    def grad_and_value(
        self,
        function: Callable[..., Any],
        argnums: int | tuple[int, ...] = 0,
        has_aux: bool = False,
    ) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            number = self._watch.region("func_grad")
            variables: list[Tensor] = []

            def variable(x: Tensor) -> Tensor:
                variables.append(self._watch.variable(x, number))
                return variables[-1]

            places = (argnums,) if isinstance(argnums, int) else tuple(argnums)
            inputs = [mapped(a, variable) if i in places else a for i, a in enumerate(args)]
            with torch.enable_grad():  # torch.func.grad differentiates under no_grad too
                result = function(*inputs, **kwargs)
                values: list[Tensor] = []
                mapped(result, values.append)
            marks.END(number)
            outputs = iter(marks.FUNC_GRAD(variables, values, number))
            gradients = tuple(mapped(inputs[i], lambda _: next(outputs)) for i in places)
            return gradients[0] if isinstance(argnums, int) else gradients, mapped(
                result, lambda _: next(outputs)
            )

        return wrapper

    def jacobian(
        self, function: Callable[..., Any], argnums: int | tuple[int, ...] = 0, **options: Any
    ) -> Callable[..., Any]:
        """Return a function that computes the Jacobian.

        It is the gradient of each entry of the result, by vmap over the unit vectors.

        The result has shape (*y.shape, *x.shape); for several argnums it is a tuple of such
        tensors.
        """

        def wrapper(*args: Any) -> Any:
            y = function(*args)
            if not isinstance(y, Tensor) or any(options.values()):
                raise own_backward(
                    "a Jacobian of several tensors, or with options, is not supported",
                    "Compute the Jacobian of each tensor separately.",
                )
            units = torch.eye(y.numel(), dtype=y.dtype, device=y.device).reshape(
                y.numel(), *y.shape
            )
            rows = self.vmap(
                lambda unit: self.grad(lambda *inner: (function(*inner) * unit).sum(), argnums)(
                    *args
                )
            )(units)
            return mapped(rows, lambda gradients: gradients.reshape(*y.shape, *gradients.shape[1:]))

        return wrapper

    def hessian(self, function: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
        """Return a function that computes the Jacobian of the gradient."""
        return self.jacobian(self.grad(function, argnums), argnums)

    def vmap(
        self,
        function: Callable[..., Any],
        in_dims: Any = 0,
        out_dims: Any = 0,
        randomness: str = "error",
        *,
        chunk_size: int | None = None,
    ) -> Callable[..., Any]:
        """Return a function that traces `function` once, on one slice.

        functorch is not used: its own marks of a vmap leave tensors behind that the tracer does not
        know. `chunk_size` concerns only memory, which a graph leaves to its compiler.
        """

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            number = self._watch.region("vmap", randomness)
            sources: list[tuple[Tensor, int]] = []

            def row(x: Tensor, dim: int | None) -> Tensor:
                if dim is None:
                    return x
                sources.append((x, dim % x.ndim))
                result: Tensor = marks.ROW(x, dim % x.ndim, number)
                return result

            row_args = mapped_with(args, in_dims, row)
            # as torch does: keyword arguments are mapped along dim 0
            row_kwargs = mapped_with(kwargs, 0, row)
            result = function(*row_args, **row_kwargs)
            values: list[Tensor] = []
            dims: list[int] = []

            def collect(x: Tensor, dim: int | None) -> None:
                values.append(x)
                dims.append((dim or 0) % (x.ndim + 1))

            mapped_with(result, out_dims, collect)
            marks.END(number)
            stacked = iter(marks.STACKED(values, dims, *sources[0], number))
            return mapped(result, lambda _: next(stacked))

        return wrapper


def autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...]:
    """Record torch.autograd.grad as one operator; an unused input's gradient is zeros."""
    if is_grads_batched:
        raise own_backward(
            "forward calls torch.autograd.grad with is_grads_batched, which is not supported",
            "Use torch.func.vmap.",
        )
    ends = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    starts = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    given_weights: list[Tensor | None] = [None] * len(ends)
    if grad_outputs is not None:
        given_weights = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs)
    weights = [
        torch.ones_like(end) if weight is None else weight
        for end, weight in zip(ends, given_weights, strict=True)
    ]
    return tuple(marks.AUTOGRAD_GRAD(ends, starts, weights, create_graph))


def _variable(x: Tensor) -> Tensor:
    """Return a view of x that requires a gradient, to differentiate with respect to it alone."""
    return x.view_as(x).requires_grad_()


def _vjp(function: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    variables: list[Tensor] = []

    def make_variable(x: Tensor) -> Tensor:
        variables.append(_variable(x))
        return variables[-1]

    result = function(*mapped(primals, make_variable))
    output, *rest = result if has_aux else (result,)
    ends: list[Tensor] = []
    mapped(output, ends.append)

    def pull_back(cotangents: Any) -> Any:
        weights: list[Tensor] = []
        mapped(cotangents, weights.append)
        gradients = iter(marks.AUTOGRAD_GRAD(ends, variables, weights, True))
        return mapped(primals, lambda _: next(gradients))

    return (output, pull_back, *rest)


def _jvp(
    function: Callable[..., Any], primals: Any, tangents: Any, *, has_aux: bool = False
) -> Any:
    """Compute the derivative along `tangents`.

    It is the derivative of the pull-back, which is linear in its cotangents.
    """
    output, pull_back, *rest = _vjp(function, *primals, has_aux=has_aux)
    weights: list[Tensor] = []

    def weight(x: Tensor) -> Tensor:
        weights.append(_variable(torch.zeros_like(x)))
        return weights[-1]

    pulled: list[Tensor] = []
    mapped(pull_back(mapped(output, weight)), pulled.append)
    along: list[Tensor] = []
    mapped(tangents, along.append)
    derivatives = iter(marks.AUTOGRAD_GRAD(pulled, weights, along, True))
    return (output, mapped(output, lambda _: next(derivatives)), *rest)


def _reject(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise own_backward(
            f"forward calls torch.func.{name}, which is not supported",
            "Write it with torch.func.jvp.",
        )

    return refuse
