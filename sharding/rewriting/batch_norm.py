"""Synchronised batch norm: each rank normalises by the statistics of the rows of all ranks, and its
gradient includes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt
from torch.fx import Graph, Node

from trainload.autograd_trace.graph_calls import append, converted, wide
from trainload.autograd_trace.graphs import StepGraph
from trainload.sharding.analysis.graph_nodes import (
    LazyGraphModule,
    arguments,
    ends,
    mode_of,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
FORWARD = (aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)
BACKWARD = aten.native_batch_norm_backward.default


def synchronised(step: StepGraph, ranks: int, group: str) -> StepGraph:
    """Return the same step graph with each batch norm over the rows of `ranks` ranks, which have
    equal numbers of rows.

    A norm of each row by itself (an instance norm, which torch computes as a batch norm of rows x
    channels) stays as it is.

    Args:
        step: the graph of one of the ranks.
        ranks: number of ranks in the group.
        group: logical name of the process group.
    """
    if not any(node.target in FORWARD and _covers_rows(node) for node in step.module.graph.nodes):
        return step
    placeholders, _ = ends(step.module)
    synchroniser = _Synchroniser(mode_of(placeholders), ranks, group)
    for node in step.module.graph.nodes:
        synchroniser.take(node)
    synchroniser.graph.lint()
    return StepGraph(LazyGraphModule(step.module, synchroniser.graph), step.inputs, step.outputs)


def _covers_rows(node: Node) -> bool:
    """Return True if a batch norm's statistics cover several rows of the batch, that is, its
    channels are not rows themselves.
    """
    args = arguments(node)
    shape = args["input"].meta["val"].shape
    if not args["train" if node.target is BACKWARD else "training"]:
        return False
    return not isinstance(shape[1], SymInt) and (isinstance(shape[0], SymInt) or shape[0] > 1)


class _Synchroniser:
    def __init__(self, mode: Any, ranks: int, group: str) -> None:
        self.graph = Graph()
        self._mode, self._ranks, self._group = mode, ranks, group
        self._copied: dict[Node, Node] = {}
        self._results: dict[Node, tuple[Node | None, ...]] = {}

    def take(self, node: Node) -> None:
        """Copy a node, or its replacement."""
        if node.target in FORWARD and _covers_rows(node):
            self._results[node] = self._forward(node)
        elif node.target is BACKWARD and _covers_rows(node):
            self._results[node] = self._backward(node)
        elif node.target is operator.getitem and node.args[0] in self._results:
            result = self._results[node.args[0]][node.args[1]]  # type: ignore[index]
            assert result is not None, "nobody takes a result that was not asked for"
            self._copied[node] = result
        else:
            self._copied[node] = self.graph.node_copy(node, lambda source: self._copied[source])

    def _forward(self, node: Node) -> tuple[Node | None, ...]:
        args = self._copied_arguments(node)
        x = self._upcast(args["input"])
        dims = [at for at in range(x.meta["val"].ndim) if at != 1]
        local = [
            self._call(aten.mean.dim, x, dims),
            self._call(aten.var.correction, x, dims, correction=0),
        ]
        everyones = self._call(
            aten.view.default,
            self._gathered(self._call(aten.cat.default, local)),
            [self._ranks, 2, -1],
        )
        means, variances = (self._call(aten.select.int, everyones, 1, index) for index in range(2))
        mean = self._call(aten.mean.dim, means, [0])
        apart = self._call(aten.square.default, self._call(aten.sub.Tensor, means, mean))
        variance = self._call(aten.mean.dim, self._call(aten.add.Tensor, variances, apart), [0])
        inverse = self._call(aten.rsqrt.default, self._call(aten.add.Scalar, variance, args["eps"]))
        output = self._call(
            aten.mul.Tensor,
            self._call(aten.sub.Tensor, x, self._broadcast(mean, x)),
            self._broadcast(inverse, x),
        )
        if args["weight"] is not None:
            output = self._call(
                aten.mul.Tensor, output, self._broadcast(self._upcast(args["weight"]), x)
            )
        if args["bias"] is not None:
            output = self._call(
                aten.add.Tensor, output, self._broadcast(self._upcast(args["bias"]), x)
            )
        output = self._cast(output, node.meta["val"][0].dtype)
        if "running_mean" not in args:
            return output, mean, inverse
        count = self._count(x)
        unbiased = self._call(
            aten.mul.Tensor,
            variance,
            self._call(aten.div.Tensor, count, self._call(aten.sub.Scalar, count, 1)),
        )
        momentum = args["momentum"]
        moved = (
            self._update_running(args["running_mean"], mean, momentum),
            self._update_running(args["running_var"], unbiased, momentum),
        )
        return output, mean, inverse, *moved

    def _backward(self, node: Node) -> tuple[Node | None, ...]:
        args = self._copied_arguments(node)
        x, gradient = self._upcast(args["input"]), self._upcast(args["grad_out"])
        mean, inverse = args["save_mean"], args["save_invstd"]
        dims = [at for at in range(x.meta["val"].ndim) if at != 1]
        centred = self._call(aten.sub.Tensor, x, self._broadcast(mean, x))
        total = self._call(aten.sum.dim_IntList, gradient, dims)
        product = self._call(
            aten.sum.dim_IntList, self._call(aten.mul.Tensor, gradient, centred), dims
        )
        needed = args["output_mask"]
        results: list[Node | None] = [None, None, None]
        if needed[0]:
            sums = self._call(
                aten.view.default,
                self._summed(self._call(aten.cat.default, [total, product])),
                [2, -1],
            )
            means = self._call(aten.div.Tensor, sums, self._count(x))
            of_gradient, of_product = (
                self._call(aten.select.int, means, 0, index) for index in range(2)
            )
            slope = self._call(
                aten.mul.Tensor, of_product, self._call(aten.square.default, inverse)
            )
            input_gradient = self._call(aten.sub.Tensor, gradient, self._broadcast(of_gradient, x))
            input_gradient = self._call(
                aten.sub.Tensor,
                input_gradient,
                self._call(aten.mul.Tensor, centred, self._broadcast(slope, x)),
            )
            factor = (
                inverse
                if args["weight"] is None
                else self._call(aten.mul.Tensor, inverse, self._upcast(args["weight"]))
            )
            input_gradient = self._call(aten.mul.Tensor, input_gradient, self._broadcast(factor, x))
            results[0] = self._cast(input_gradient, node.meta["val"][0].dtype)
        if needed[1]:
            results[1] = self._cast(
                self._call(aten.mul.Tensor, product, inverse), node.meta["val"][1].dtype
            )
        if needed[2]:
            results[2] = self._cast(total, node.meta["val"][2].dtype)
        return tuple(results)

    def _copied_arguments(self, node: Node) -> dict[str, Any]:
        return {
            name: self._copied[value] if isinstance(value, Node) else value
            for name, value in arguments(node).items()
        }

    def _update_running(self, running: Node, value: Node, momentum: float) -> Node:
        decayed = self._call(aten.mul.Scalar, running, 1 - momentum)
        return self._call(
            aten.add.Tensor,
            decayed,
            self._cast(self._call(aten.mul.Scalar, value, momentum), running.meta["val"].dtype),
        )

    def _count(self, x: Node) -> Node:
        """Return the number of elements of a channel on all ranks: a 0-dim tensor."""
        value = x.meta["val"]
        count: Any = self._ranks
        for at, size in enumerate(value.shape):
            if at != 1:
                count = self._times(
                    count,
                    self._call(aten.sym_size.int, x, at) if isinstance(size, SymInt) else size,
                )
        return self._call(aten.scalar_tensor.default, count, dtype=value.dtype, device=value.device)

    def _times(self, left: Any, right: Any) -> Any:
        return (
            self._call(operator.mul, left, right)
            if isinstance(left, Node) or isinstance(right, Node)
            else left * right
        )

    def _gathered(self, value: Node) -> Node:
        return self._wait(
            self._call(c10d.all_gather_into_tensor.default, value, self._ranks, self._group)
        )

    def _summed(self, value: Node) -> Node:
        return self._wait(self._call(c10d.all_reduce.default, value, "sum", self._group))

    def _wait(self, in_flight: Node) -> Node:
        return self._call(c10d.wait_tensor.default, in_flight)

    def _broadcast(self, value: Node, x: Node) -> Node:
        """Return a value per channel, broadcast along the other dims of x."""
        return self._call(
            aten.view.default, value, [-1, *(1 for _ in range(x.meta["val"].ndim - 2))]
        )

    def _upcast(self, value: Node) -> Node:
        """Return the value in at least float32, as torch's own kernels compute."""
        return self._cast(value, wide(value.meta["val"].dtype))

    def _cast(self, value: Node, dtype: torch.dtype) -> Node:
        return converted(self._call, value, dtype)

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return append(self.graph, self._mode, target, *args, **kwargs)
