"""Control-flow operators whose bodies draw random numbers: each call of a body is given a key of its own, among its operands.

A body is traced once and run many times, or not at all, so that what it draws cannot be counted as what stands in a graph is. The
operator takes one site; each iteration of a loop has a key of its own, and of a loop over the rows of the batch, each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.random import RandomKey

_HOP = torch.ops.higher_order
Operands = Sequence[Any]


class Run(Protocol):
    """What is asked of the interpreter that meets an operator."""

    def key_of_call(self) -> RandomKey:
        """Where what is drawn once for a call comes from."""
        ...

    def key_of_entries(self, entries: Node) -> tuple[RandomKey, int | None]:
        """Where what is drawn for each entry of a value comes from, and 0 if its entries, along dim 0, run over rows; else None."""
        ...

    def site(self, count: int = 1) -> int:
        """The number of the operator."""
        ...

    def drawing(self, body: GraphModule, key: RandomKey) -> Callable[..., Any]:
        """What runs a body with a key."""
        ...


def _held(key: RandomKey) -> tuple[Any, ...]:
    """What a body is told of a key, behind all else, beside the key of its own: the row, and a number of rows that changes."""
    return (key.row,) if isinstance(key.rows, int) else (key.row, key.rows)


def _keyed(key: RandomKey, before: int, call: Callable[[RandomKey, Operands], Any]) -> Callable[..., Any]:
    """A body that takes the key of its own behind `before` operands. `call` is given it, and the operands that the body had."""
    behind = len(_held(key))

    def body(*operands: Any) -> Any:
        end = len(operands) - behind
        row, *rows = operands[end:]
        own = RandomKey(operands[before], row, rows[0] if rows else key.rows)
        return call(own, (*operands[:before], *operands[before + 1 : end]))

    return body


def _plain(run: Run, body: GraphModule) -> Callable[[RandomKey, Operands], Any]:
    """What calls a body with a key and all of its operands."""
    return lambda own, given: run.drawing(body, own)(*given)


def _cond(run: Run, target: Any, _: Node, predicate: Any, true: GraphModule, false: GraphModule, operands: Operands) -> Any:
    key = run.key_of_call()
    own = key.bits(run.site(), [], None)
    branches = [_keyed(key, len(operands), _plain(run, body)) for body in (true, false)]
    return target(predicate, *branches, (*operands, own, *_held(key)))


def _scan(run: Run, target: Any, node: Node, body: GraphModule, first: Operands, entries: Operands, operands: Operands) -> Any:
    key, keys = _of_entries(run, node.args[2], entries)
    combine = _keyed(key, len(first) + len(entries), _plain(run, body))
    return target(combine, first, [*entries, keys], (*operands, *_held(key)))


def _map(run: Run, target: Any, node: Node, body: GraphModule, entries: Operands, operands: Operands) -> Any:
    key, keys = _of_entries(run, node.args[1], entries)
    each = _keyed(key, len(entries), _plain(run, body))
    return target(each, (*entries, keys), (*operands, *_held(key)))


def _of_entries(run: Run, nodes: Any, entries: Operands) -> tuple[RandomKey, Tensor]:
    """A key, and that of each iteration: int64 (entries,)."""
    key, dim = run.key_of_entries(nodes[0])
    return key, key.bits(run.site(), [entries[0].shape[0]], dim)


def _while_loop(run: Run, target: Any, _: Node, condition: GraphModule, body: GraphModule, carried: Operands, operands: Operands) -> Any:
    """With one more value that is carried: the number of the iteration."""
    key, count = run.key_of_call(), len(carried)
    own = key.bits(run.site(), [], None)

    def call(part: GraphModule) -> Callable[[RandomKey, Operands], Any]:
        return lambda own, given: run.drawing(part, own.of_iteration(given[count]))(*given[:count], *given[count + 1 :])

    asked, called = call(condition), call(body)
    place = count + 1 + len(operands)
    results = target(
        _keyed(key, place, asked),
        _keyed(key, place, lambda own, given: (*called(own, given), given[count] + 1)),
        (*carried, torch.zeros((), dtype=torch.int64, device=own.device)),
        (*operands, own, *_held(key)),
    )
    return tuple(results[:count])


KEYED: Mapping[Any, Callable[..., Any]] = {
    _HOP.cond: _cond,
    _HOP.scan: _scan,
    _HOP.map_impl: _map,
    _HOP.while_loop: _while_loop,
}
"""Operator -> what calls it so that its bodies may draw, given the interpreter, the operator, its node and its own arguments."""
