"""Decompose operators of captured graphs, and list what they decompose into.

A graph is decomposed before autograd sees it, operator by operator, in place: no_grad and autocast
regions and the bodies of control flow stay as they are. `ExportedProgram.run_decompositions` is not
suitable: it makes inference graphs, in which those regions are dissolved.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from trainload.autograd_trace.randomness.draws import is_random
from trainload.capture.operators import graphs_in, is_overload
from trainload.core.errors import CaptureError

_DEVICE = re.compile(
    r"(^|_)(cpu|cuda|cudnn|miopen|mkldnn|onednn|mps|xpu|xnnpack|flash|efficient)(_|$)"
)
_ROUNDS = 16
"""Maximum depth of nested decompositions; torch's tables go three deep."""


@cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    # an untyped dict subclass whose get() does not see the entries of items()
    table: Any = torch.export.default_decompositions()
    return dict(table.items())


def _decomposition(target: Any) -> Callable[..., Any]:
    """Return torch's decomposition: from its table, or else the operator's composite
    implementation.
    """

    def composite(*args: Any, **kwargs: Any) -> Any:
        result = target.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError(f"{target} is composed of nothing")
        return result

    return _table().get(target, composite)


def is_core(target: object) -> bool:
    """Return True if torch tags an operator as core ATen, the set that backends are expected to
    support.
    """
    return is_overload(target) and torch.Tag.core in target.tags


def is_device_specific(target: object) -> bool:
    """Return True if an operator's name contains a device or a library of one."""
    return is_overload(target) and _DEVICE.search(target.overloadpacket.__name__) is not None


def spelled(target: Any) -> str:
    """Return an operator's name, such as `aten.linear.default`, `higher_order.cond` or
    `getitem`.
    """
    return str(target) if is_overload(target) else str(getattr(target, "__name__", target))


def becomes(node: Node) -> tuple[str, ...]:
    """Return the operators that a call decomposes into in one step, sorted; () if it stays as it
    is.
    """
    traced = _trace(node)
    return (
        ()
        if traced is None
        else tuple(sorted({spelled(n.target) for n in traced.graph.nodes if is_overload(n.target)}))
    )


def decompose(module: GraphModule, chosen: Callable[[Any], bool]) -> GraphModule:
    """Return a copy of a captured graph in which every call of a chosen operator is replaced by its
    decomposition.

    A call stays as it is if it draws random numbers, or if its decomposition names a device, needs
    a tensor constant or does not exist: so the graph remains portable, and random masks do not
    change. Names, values (`meta["val"]`), module paths and stack traces are kept.

    Raises:
        CaptureError: the decompositions do not terminate.
    """
    decomposed = copy.deepcopy(module)
    for part in graphs_in(decomposed):
        unchanged: set[Node] = set()
        for _ in range(_ROUNDS):
            calls = [
                node
                for node in part.graph.nodes
                if node.op == "call_function" and is_overload(node.target)
            ]
            remaining = [node for node in calls if node not in unchanged and chosen(node.target)]
            for node in remaining:
                traced = _trace(node)
                if traced is None:
                    unchanged.add(node)
                else:
                    _replace(part, node, traced)
            if not remaining:
                break
        else:
            raise CaptureError(
                "decompositions do not terminate",
                got=", ".join(sorted({spelled(n.target) for n in remaining})),
            )
        part.graph.lint()
        part.recompile()
    return decomposed


def _trace(node: Node) -> GraphModule | None:
    """Return the graph of one decomposition step, from the call's tensors and symbols to its value;
    None if the call must stay as it is.
    """
    inputs = node.all_input_nodes
    if (
        not is_overload(node.target)
        or is_random(node)
        or any(source.op == "get_attr" for source in inputs)
    ):
        return None
    table: dict[Any, Callable[..., Any]] = {node.target: _decomposition(node.target)}
    values = [source.meta["val"] for source in inputs]
    mode = next(
        (
            value.fake_mode
            for value in values
            if isinstance(value, Tensor) and hasattr(value, "fake_mode")
        ),
        None,
    )
    if mode is None:
        return None

    def call(*operands: Any) -> Any:
        value_of = dict(zip(inputs, operands, strict=True))
        args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of.__getitem__)
        function: Any = node.target
        return function(*args, **kwargs)

    try:
        with mode, torch.enable_grad():
            traced: GraphModule = make_fx(
                call, decomposition_table=table, tracing_mode="real", pre_dispatch=True
            )(*values)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
        return None  # the decomposition does not accept these arguments, or needs a concrete size
    calls = [n for n in traced.graph.nodes if n.op not in ("placeholder", "output")]
    if any(n.op == "get_attr" or is_device_specific(n.target) or is_random(n) for n in calls):
        return None
    return None if [n.target for n in calls if is_overload(n.target)] == [node.target] else traced


def _replace(part: GraphModule, node: Node, traced: GraphModule) -> None:
    mapping: dict[Node, Any] = dict(
        zip(
            (n for n in traced.graph.nodes if n.op == "placeholder"),
            node.all_input_nodes,
            strict=True,
        )
    )
    provenance = {
        key: node.meta[key]
        for key in ("stack_trace", "nn_module_stack", "torch_fn")
        if key in node.meta
    }
    result: Any = None
    with part.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "output":
                result = map_arg(inner.args[0], mapping.__getitem__)
            elif inner.op != "placeholder":
                mapping[inner] = part.graph.node_copy(inner, mapping.__getitem__)
                value = inner.meta.get("val")
                mapping[inner].meta = {**provenance, "val": value}
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            part.graph.erase_node(user)
    part.graph.erase_node(node)
