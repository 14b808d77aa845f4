"""Operators that take graphs: custom gradients, gradients in forward, vmap and checkpoints.

torch.export's own operators cannot express these. Each is called as target(*arguments). The
implementation is Python that calls torch, so it works on plain tensors, under AOT autograd and
under torch's tracers alike. `evaluate` does the same with another way to run the graphs, for
interpreters.

    trainload_backward(body, outputs, inputs, *tensors) -> tuple
        tensors: `outputs` values, then `inputs` values, then all other operands of body. Returns
        the outputs, whose gradient with respect to the inputs is body(*gradients of the outputs,
        *other operands). No other gradient flows, except through body if it is itself
        differentiated.
    trainload_backward_by_use(outputs, inputs, used, computed, *bodies, *tensors) -> tuple
        The same with one body for each entry of `used`: if gradients arrive at exactly the outputs
        that are bits of used[i], the gradients of the inputs that are bits of computed[i] are
        bodies[i](*arriving gradients, *other operands); other inputs get None.
    trainload_checkpoint(body, *operands) -> tuple
        body(*operands); backward recomputes the values inside instead of keeping them.
    trainload_selective_checkpoint(body, kept, *operands) -> tuple
        The same, except for the results of the operators listed in `kept` (see `selective.py`).
    trainload_func_grad(body, inputs, *operands) -> tuple
        Gradients of body's first result with respect to the first `inputs` operands, then all
        results of body.
    trainload_vmap(body, in_dims, out_dims, randomness, *operands) -> tuple
        body mapped over dim in_dims[i] of operand i (-1: not mapped); results are stacked at
        out_dims[i].
    trainload_autograd_grad(outputs, inputs, create_graph, *tensors) -> tuple
        tensors: `outputs` values, `inputs` values, a gradient for each output. Returns the gradient
        of each input; zeros where none flows.
    trainload_require_grad(tensor) -> (tensor,)
        The tensor itself if a gradient flows through it; otherwise the same values as a new leaf
        that requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from trainload.capture.operators import HIGHER_ORDER_OPERATOR, nodes_in
from trainload.core.errors import CaptureError

Call = Callable[[Any, Sequence[Any]], tuple[Any, ...]]
"""Runs a graph (a GraphModule) on operands."""


def _call(body: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(body(*operands))


class _Operator(HIGHER_ORDER_OPERATOR):  # type: ignore[misc]  # found by a public name, at run time
    """A higher-order operator that is implemented by a Python function, `meaning`."""

    def __init__(self, name: str, meaning: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__(name)
        self.meaning = meaning

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        return evaluate(self, args)


def is_ours(target: object) -> bool:
    """Return True if a node's target is one of this module's operators."""
    return isinstance(target, _Operator)


def evaluate(target: Any, args: Sequence[Any], call: Call = _call) -> tuple[Any, ...]:
    """Return the result of target(*args), with `call` running the graphs among the arguments."""
    result: tuple[Any, ...] = target.meaning(call, *args)
    return result


PullBack = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""(gradients of the outputs, other operands) -> gradients of the inputs."""


def _with_pull_back(
    outputs: int, inputs: int, tensors: Sequence[Any], materialize: bool, pull_back: PullBack
) -> tuple[Any, ...]:
    """Return the outputs, with gradients computed by `pull_back`.

    An output at which no gradient arrives has zeros as its gradient, or None if not `materialize`.
    """

    class Outputs(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*values: Tensor) -> Any:
            # not a view: what follows may write to it in place
            return tuple(v.clone() for v in values[:outputs])

        @staticmethod
        def setup_context(ctx: Any, values: tuple[Any, ...], _: Any) -> None:
            needed = values[outputs + inputs :]  # tensors, and sizes
            ctx.save_for_backward(*(v for v in needed if isinstance(v, Tensor)))
            ctx.rest = [None if isinstance(v, Tensor) else v for v in needed]
            ctx.set_materialize_grads(materialize)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            saved = iter(ctx.saved_tensors)
            rest = [next(saved) if v is None else v for v in ctx.rest]
            return (*[None] * outputs, *pull_back(gradients, rest), *[None] * len(rest))

    return tuple(Outputs.apply(*tensors))  # type: ignore[no-untyped-call]  # torch's own


def _backward(call: Call, body: Any, outputs: int, inputs: int, *tensors: Any) -> tuple[Any, ...]:
    return _with_pull_back(
        outputs, inputs, tensors, True, lambda gradients, rest: call(body, (*gradients, *rest))
    )


def _backward_by_use(
    call: Call,
    outputs: int,
    inputs: int,
    output_sets: Sequence[int],
    computed: Sequence[int],
    *rest: Any,
) -> tuple[Any, ...]:
    bodies, tensors = rest[: len(output_sets)], rest[len(output_sets) :]

    def pull_back(gradients: Sequence[Any], needed: Sequence[Any]) -> Sequence[Any]:
        arrived = [g for g in gradients if g is not None]
        if not arrived:
            return [None] * inputs
        place = _place_of_use(
            output_sets, sum(1 << i for i, g in enumerate(gradients) if g is not None)
        )
        results = iter(call(bodies[place], (*arrived, *needed)))
        return [next(results) if computed[place] >> i & 1 else None for i in range(inputs)]

    return _with_pull_back(outputs, inputs, tensors, False, pull_back)


def _place_of_use(output_sets: Sequence[int], bits: int) -> int:
    if bits not in output_sets:
        raise CaptureError(
            "an autograd function receives gradients for a set of outputs for which its backward"
            " was not traced",
            where="trainload_backward_by_use",
            expected=f"sets of outputs {', '.join(map(bin, output_sets))}",
            got=bin(bits),
            hint=(
                "Make its backward accept None for each output that may be unused, or use all"
                " outputs in the loss."
            ),
        )
    return list(output_sets).index(bits)


def _checkpoint(call: Call, body: Any, *operands: Any) -> tuple[Any, ...]:
    return call(body, operands)


def _selective(call: Call, body: Any, _: str, *operands: Any) -> tuple[Any, ...]:
    return call(body, operands)


def _func_grad(call: Call, body: Any, inputs: int, *operands: Any) -> tuple[Any, ...]:
    def value(*variables: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        results = call(body, (*variables, *operands[inputs:]))
        return results[0], results

    gradients, results = torch.func.grad(value, tuple(range(inputs)), has_aux=True)(
        *operands[:inputs]
    )
    return (*gradients, *results)


def _vmap(
    call: Call,
    body: Any,
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    randomness: str,
    *operands: Any,
) -> tuple[Any, ...]:
    mapped = torch.func.vmap(
        lambda *values: call(body, values),
        tuple(None if d < 0 else d for d in in_dims),
        tuple(out_dims),
        randomness,
    )
    return tuple(mapped(*operands))


def _autograd_grad(
    _: Call, outputs: int, inputs: int, create_graph: bool, *tensors: Tensor
) -> tuple[Any, ...]:
    with torch.enable_grad():
        return torch.autograd.grad(
            tensors[:outputs],
            tensors[outputs : outputs + inputs],
            tensors[outputs + inputs :],
            create_graph=create_graph,
            retain_graph=True,
            materialize_grads=True,
        )


def _require_grad(_: Call, tensor: Tensor) -> tuple[Any, ...]:
    return (tensor if tensor.requires_grad else tensor.detach().requires_grad_(),)


BACKWARD: Any = _Operator("trainload_backward", _backward)
BACKWARD_BY_USE: Any = _Operator("trainload_backward_by_use", _backward_by_use)
CHECKPOINT: Any = _Operator("trainload_checkpoint", _checkpoint)
SELECTIVE: Any = _Operator("trainload_selective_checkpoint", _selective)
FUNC_GRAD: Any = _Operator("trainload_func_grad", _func_grad)
VMAP: Any = _Operator("trainload_vmap", _vmap)
AUTOGRAD_GRAD: Any = _Operator("trainload_autograd_grad", _autograd_grad)
REQUIRE_GRAD: Any = _Operator("trainload_require_grad", _require_grad)


def differentiates(module: GraphModule) -> bool:
    """Return True if a graph computes gradients with torch.autograd.grad."""
    return _calls(module, [AUTOGRAD_GRAD])


def has_checkpoints(module: GraphModule) -> bool:
    """Return True if a graph has parts that backward recomputes."""
    return _calls(module, [CHECKPOINT, SELECTIVE])


def has_branches(module: GraphModule) -> bool:
    """Return True if a graph calls torch.cond."""
    return _calls(module, [torch.ops.higher_order.cond])


def _calls(module: GraphModule, operators: list[Any]) -> bool:
    return any(node.target in operators for node in nodes_in(module))
