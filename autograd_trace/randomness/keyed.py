"""Stateless random numbers in the bodies of control flow: a body receives its random key as an
extra operand.

A body is traced once and may run many times or never, so its random operators cannot be numbered by
their places in the graph. The operator takes one site and draws a key from it: one per call of a
`cond`, one per iteration of a loop. If a loop runs over the rows of the batch, the key belongs to
the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.randomness.random_key import RandomKey

_HOP = torch.ops.higher_order
Operands = Sequence[Any]


class Run(Protocol):
    """Interface of the interpreter that the functions of `KEYED` use."""

    def key_of_call(self) -> RandomKey:
        """Return the key for values that are drawn once per call."""
        ...

    def key_of_entries(self, entries: Node) -> tuple[RandomKey, int | None]:
        """Return the key for values that are drawn once per entry of dim 0, and 0 if the entries
        are rows, else None.
        """
        ...

    def site(self, count: int = 1) -> int:
        """Return the next site, and reserve `count` sites."""
        ...

    def drawing(self, body: GraphModule, key: RandomKey) -> Callable[..., Any]:
        """Return a function that runs a body with the given key."""
        ...


def _key_operands(key: RandomKey) -> tuple[Any, ...]:
    """Return the operands that complete a body's key, which come last: the call's first row, and
    the number of rows if it is symbolic.
    """
    return (key.row,) if isinstance(key.rows, int) else (key.row, key.rows)


def _with_key(
    key: RandomKey, before: int, call: Callable[[RandomKey, Operands], Any]
) -> Callable[..., Any]:
    """Return a body whose operand number `before` is its key. `call` receives the key and the
    operands of the original body.
    """
    behind = len(_key_operands(key))

    def body(*operands: Any) -> Any:
        end = len(operands) - behind
        row, *rows = operands[end:]
        own = RandomKey(operands[before], row, rows[0] if rows else key.rows)
        return call(own, (*operands[:before], *operands[before + 1 : end]))

    return body


def _run_with_key(run: Run, body: GraphModule) -> Callable[[RandomKey, Operands], Any]:
    """Return a function that runs a body with a key and the body's own operands."""
    return lambda own, operands: run.drawing(body, own)(*operands)


def _cond(
    run: Run,
    target: Any,
    _: Node,
    predicate: Any,
    true: GraphModule,
    false: GraphModule,
    operands: Operands,
) -> Any:
    key = run.key_of_call()
    own = key.bits(run.site(), [], None)
    branches = [_with_key(key, len(operands), _run_with_key(run, body)) for body in (true, false)]
    return target(predicate, *branches, (*operands, own, *_key_operands(key)))


def _scan(
    run: Run,
    target: Any,
    node: Node,
    body: GraphModule,
    first: Operands,
    entries: Operands,
    operands: Operands,
) -> Any:
    key, keys = _entry_keys(run, node.args[2], entries)
    combine = _with_key(key, len(first) + len(entries), _run_with_key(run, body))
    return target(combine, first, [*entries, keys], (*operands, *_key_operands(key)))


def _map(
    run: Run, target: Any, node: Node, body: GraphModule, entries: Operands, operands: Operands
) -> Any:
    key, keys = _entry_keys(run, node.args[1], entries)
    keyed_body = _with_key(key, len(entries), _run_with_key(run, body))
    return target(keyed_body, (*entries, keys), (*operands, *_key_operands(key)))


def _entry_keys(run: Run, nodes: Any, entries: Operands) -> tuple[RandomKey, Tensor]:
    """Return the key of the call, and the keys of the iterations: int64 (entries,)."""
    key, dim = run.key_of_entries(nodes[0])
    return key, key.bits(run.site(), [entries[0].shape[0]], dim)


def _while_loop(
    run: Run,
    target: Any,
    _: Node,
    condition: GraphModule,
    body: GraphModule,
    carried: Operands,
    operands: Operands,
) -> Any:
    """Call a while_loop that carries the iteration number beside the loop's own values."""
    key, count = run.key_of_call(), len(carried)
    own = key.bits(run.site(), [], None)

    def call(part: GraphModule) -> Callable[[RandomKey, Operands], Any]:
        return lambda own, values: run.drawing(part, own.of_iteration(values[count]))(
            *values[:count], *values[count + 1 :]
        )

    run_condition, run_body = call(condition), call(body)
    place = count + 1 + len(operands)
    results = target(
        _with_key(key, place, run_condition),
        _with_key(key, place, lambda own, values: (*run_body(own, values), values[count] + 1)),
        (*carried, torch.zeros((), dtype=torch.int64, device=own.device)),
        (*operands, own, *_key_operands(key)),
    )
    return tuple(results[:count])


KEYED: Mapping[Any, Callable[..., Any]] = {
    _HOP.cond: _cond,
    _HOP.scan: _scan,
    _HOP.map_impl: _map,
    _HOP.while_loop: _while_loop,
}
"""Operator -> a function that calls it with keyed bodies.

Arguments: interpreter, operator, node, and the operator's own arguments.
"""
