"""Run a captured graph with stateless random numbers, on any device.

The interpreter has two uses: under AOT autograd's tracer it yields the step graph, and on real
tensors it is the reference that the step graph is compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from trainload.autograd_trace.derivation.derivable import DERIVABLE
from trainload.autograd_trace.randomness.batch_dim import Layout, Rows
from trainload.autograd_trace.randomness.draws import RANDOM, is_random
from trainload.autograd_trace.randomness.keyed import KEYED
from trainload.autograd_trace.randomness.random_key import RandomKey
from trainload.autograd_trace.recompute.rematerialisation import Region, Regions, marking
from trainload.capture.operators import (
    draws_nothing,
    graphs_in,
    is_higher_order,
    is_overload,
    is_seeded,
    nodes_in,
)
from trainload.capture.source.source_place import place_of_node
from trainload.capture.watching.higher_order import CHECKPOINT, SELECTIVE, Call, evaluate, is_ours
from trainload.core.errors import CaptureError

aten = torch.ops.aten
_HOP = torch.ops.higher_order


@dataclass(slots=True)
class _Counts:
    """Counters that a graph and its nested graphs share: random operators and checkpoints."""

    sites: int = 0
    checkpoints: int = 0


class GraphInterpreter(Interpreter):
    """Interpreter of a pre-dispatch graph.

    - Random operators become functions of `key`; one that has no stateless form raises
      CaptureError.
    - Autocast and grad-mode regions become the real context managers, on `device`.
    - Factory calls and `.to` use `device` where they named the device of the capture; a view
      becomes a `reshape` on another device.
    - Nodes that are traced inside a checkpoint are marked for `rematerialisation.recompute`.

    Args:
        module: the graph, with parameters lifted to inputs.
        key: source of random numbers; None if the graph must not need any.
        device: where the graph runs.
        batch_symbol: the batch size as `node.meta["val"]` spells it: a SymInt, or an int if it is
            static.
        counts: counters shared by nested graphs; omit it.
        regions: checkpoints around the graph; omit it.
        layout: layout of the outermost graph; omit it.
    """

    def __init__(
        self,
        module: GraphModule,
        key: RandomKey | None,
        device: torch.device,
        batch_symbol: int | torch.SymInt,
        counts: _Counts | None = None,
        regions: Regions = (),
        layout: Layout | None = None,
    ) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._key = key
        self._device = device
        self._batch = batch_symbol
        self._counts = counts if counts is not None else _Counts()
        self._regions = regions
        self._layout = layout if layout is not None else Layout(module, batch_symbol)
        self._node: Node | None = None

    def run_node(self, n: Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._regions:
            return self._call(target, args, kwargs)
        with marking(self._regions):
            return self._call(target, args, kwargs)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _HOP.wrap_with_autocast:
            _, dtype, enabled, cache, body, *operands = args
            with torch.autocast(
                self._device.type, dtype=dtype, enabled=enabled, cache_enabled=bool(cache)
            ):
                return self._nested(body, operands)
        if target is _HOP.wrap_with_set_grad_enabled:
            enabled, body, *operands = args
            with torch.set_grad_enabled(enabled):
                return self._nested(body, operands)
        if target in (CHECKPOINT, SELECTIVE):
            self._counts.checkpoints += 1
            return evaluate(
                target,
                args,
                self._call_in_checkpoint(
                    Region(self._counts.checkpoints, args[1] if target is SELECTIVE else "")
                ),
            )
        if is_ours(target):
            return evaluate(target, args, self._nested)
        if target is aten._assert_tensor_metadata.default:
            return None
        if target in DERIVABLE:
            return DERIVABLE[target](*args, **kwargs)
        rule = RANDOM.get(target)
        if rule is not None:
            return rule(self, *args, **kwargs)
        if is_higher_order(target):
            if any(
                is_random(node)
                for body in args
                if isinstance(body, GraphModule)
                for node in nodes_in(body)
            ):
                return self._run_keyed(target, args)
            args = tuple(
                self._retargeted_body(a) if isinstance(a, GraphModule) else a for a in args
            )
        elif is_overload(target):
            if is_seeded(target) and not draws_nothing(target, args, kwargs):
                raise CaptureError(
                    f"the random operator {target} has no stateless form, so its values could not"
                    " be repeated after a restart",
                    where=self.where(),
                    hint="Draw with dropout, torch.rand, torch.randn or torch.bernoulli instead.",
                )
            target = self._retargeted_view(target, self._node)
            args = tuple(self._retarget(a) for a in args)
            kwargs = {k: self._retarget(v) for k, v in kwargs.items()}
        return super().call_function(target, args, kwargs)

    def _nested(self, body: GraphModule, operands: Sequence[Any]) -> Any:
        return self._body_interpreter(body, self._regions).run(*operands)

    def _body_interpreter(self, body: GraphModule, regions: Regions) -> GraphInterpreter:
        return type(self)(
            body, self._key, self._device, self._batch, self._counts, regions, self._layout
        )

    def _call_in_checkpoint(self, checkpoint: Region) -> Call:
        """Return a function that runs a graph inside one more checkpoint."""

        def call(body: GraphModule, operands: Sequence[Any]) -> tuple[Any, ...]:
            results: tuple[Any, ...] = self._body_interpreter(
                body, (*self._regions, checkpoint)
            ).run(*operands)
            return results

        return call

    def _run_keyed(self, target: Any, args: tuple[Any, ...]) -> Any:
        if target not in KEYED:
            raise CaptureError(
                f"a body of {target} draws random numbers, which has no stateless form",
                where=self.where(),
                hint="Draw the random tensor before the call and pass it in as an operand.",
            )
        return KEYED[target](self, target, self._node, *args)

    def _retarget(self, value: Any) -> Any:
        return self._device if isinstance(value, torch.device) and value.type != "meta" else value

    def _retargeted_view(self, target: Any, node: Node | None) -> Any:
        """Return `reshape` for a `view` on a device other than the capture's.

        Attention kernels return other strides there, so a copy may be needed.
        """
        if (
            target is not aten.view.default
            or node is None
            or not isinstance(value := node.meta.get("val"), Tensor)
        ):
            return target
        return target if value.device.type == self._device.type else aten.reshape.default

    def _retargeted_body(self, body: GraphModule) -> GraphModule:
        """Return the body itself, or, if it names another device, a copy for this interpreter's
        device.
        """
        retargeted = copy.deepcopy(body)
        changed = False
        for module in graphs_in(retargeted):
            for node in module.graph.nodes:
                arguments = (
                    tuple(self._retarget(a) for a in node.args),
                    {k: self._retarget(v) for k, v in node.kwargs.items()},
                )
                if node.target is _HOP.wrap_with_autocast:
                    arguments = ((self._device.type, *node.args[1:]), node.kwargs)
                target = self._retargeted_view(node.target, node)
                if (target, *arguments) != (node.target, node.args, node.kwargs):
                    node.target, node.args, node.kwargs = target, *arguments
                    changed = True
            module.recompile()
        return retargeted if changed else body

    def where(self) -> str:
        """Return the user's file and line of the current node."""
        return place_of_node(self._node)

    def site(self, count: int = 1) -> int:
        """Return the number of this random operator, and reserve `count` numbers."""
        first = self._counts.sites
        self._counts.sites += count
        return first

    def key(self) -> RandomKey:
        """Return the key for the current node's random numbers."""
        return self._key_over(self._rows())

    def key_of_call(self) -> RandomKey:
        """Return the key for values that are drawn once per call."""
        return self._key_over(None)

    def key_of_entries(self, entries: Node) -> tuple[RandomKey, int | None]:
        """Return the key for values that are drawn once per entry of dim 0, and 0 if the entries
        are rows, else None.
        """
        rows = self._layout.rows(entries, self.where())
        if rows is None or rows.dim != 0:
            return self.key_of_call(), None
        return self._key_over(rows), 0

    def _key_over(self, rows: Rows | None) -> RandomKey:
        assert self._key is not None, "a graph that draws is given a key"
        return self._key if rows is None else replace(self._key, stacks=rows.stacks)

    def drawing(self, body: GraphModule, key: RandomKey) -> Callable[..., Any]:
        """Return a function that runs a body with the given key."""
        run: Callable[..., Any] = type(self)(
            body, key, self._device, self._batch, _Counts(), self._regions, self._layout
        ).run
        return run

    def batch_dim(self) -> int | None:
        """Return the dim of the current node's value that runs over the rows of the batch, or
        None.
        """
        rows = self._rows()
        return None if rows is None else rows.dim

    def _rows(self) -> Rows | None:
        assert self._node is not None
        return self._layout.rows(self._node, self.where())
