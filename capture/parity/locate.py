"""Finds the module at which a captured graph starts to differ from eager mode, for errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from trainload.capture.job.ambient import outside_dtype
from trainload.capture.operators import nodes_in

_HOP = torch.ops.higher_order
Distance = Callable[[Tensor, Tensor], float]


class _Matcher(Interpreter):
    """Runs a captured graph and keeps the values that equal modules' eager outputs."""

    def __init__(
        self,
        module: GraphModule,
        outputs: dict[str, Tensor],
        matched: dict[str, Tensor],
        distance: Distance,
        most: float,
    ) -> None:
        super().__init__(module)
        self._parts = (outputs, matched, distance, most)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        outputs, matched, distance, most = self._parts
        for candidate in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(candidate, Tensor):
                continue
            for path, _ in (n.meta.get("nn_module_stack") or {}).values():
                name = path.removeprefix("model").removeprefix(".")
                if name in outputs and distance(outputs[name], candidate) <= most:
                    matched[name] = candidate
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (_HOP.wrap_with_autocast, _HOP.wrap_with_set_grad_enabled):
            place = next(i for i, a in enumerate(args) if isinstance(a, GraphModule))
            body = _Matcher(args[place], *self._parts)
            return target(*args[:place], lambda *operands: body.run(*operands), *args[place + 1 :])
        return super().call_function(target, args, kwargs)


def first_divergent_module(
    graph: GraphModule,
    function: nn.Module,
    batch: dict[str, Tensor],
    arguments: Sequence[Tensor],
    distance: Distance,
    most: float,
) -> str:
    """Return the first module whose output or gradient differs from eager mode.

    Modules are in the order in which they finish.

    Args:
        graph: the captured graph; its first output is compared by gradient if it requires one.
        function: the captured function, in the same mode; buffers of both change.
        batch: input of `function`.
        arguments: inputs of `graph`.
        distance: distance between an eager and a captured tensor.
        most: largest distance that counts as equal.

    Returns:
        "module a.b", "module b, or between module a and it", "after module c", or "" if every
        module agrees.
    """
    model = function.get_submodule("model")
    outputs: dict[str, Tensor] = {}

    def record_output(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor):
                outputs.setdefault(name, output)

        return hook

    handles = [
        module.register_forward_hook(record_output(name))
        for name, module in model.named_modules()
        if name
    ]
    state = torch.random.get_rng_state()
    try:
        with outside_dtype():
            eager_loss = function(batch)[0]
    finally:
        for handle in handles:
            handle.remove()
    torch.random.set_rng_state(state)
    matched: dict[str, Tensor] = {}
    graph_loss = _Matcher(graph, outputs, matched, distance, most).run(*arguments)[0]
    inside = _modules_in(graph)
    for name in outputs:
        if name not in matched and name in inside:
            return f"module {name}"
    if not (eager_loss.requires_grad and graph_loss.requires_grad):
        return ""
    names = [n for n, o in outputs.items() if n in matched and o.requires_grad]
    if not names:
        return ""
    expected: tuple[Tensor | None, ...] = torch.autograd.grad(
        eager_loss, [outputs[n] for n in names], allow_unused=True
    )
    # A value without a gradient in the graph counts as wrong if it has one in eager mode.
    tracked = [n for n in names if matched[n].requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if tracked:
        gradients = torch.autograd.grad(
            graph_loss, [matched[n] for n in tracked], allow_unused=True
        )
    got = dict(zip(tracked, gradients, strict=True))
    wrong = [
        place
        for place, (name, gradient) in enumerate(zip(names, expected, strict=True))
        if _is_different(gradient, got.get(name), distance, most)
    ]
    if not wrong:
        return ""
    if wrong[-1] + 1 == len(names):
        return f"after module {names[-1]}"
    return f"module {names[wrong[-1] + 1]}, or between module {names[wrong[-1]]} and it"


def _is_different(
    expected: Tensor | None, got: Tensor | None, distance: Distance, most: float
) -> bool:
    return expected is not None and (got is None or not distance(expected, got) <= most)


def _modules_in(graph: GraphModule) -> set[str]:
    """Return the modules of which the graph contains an operator."""
    modules: set[str] = set()
    for node in nodes_in(graph):
        modules |= {
            path.removeprefix("model").removeprefix(".")
            for path, _ in (node.meta.get("nn_module_stack") or {}).values()
        }
    return modules
