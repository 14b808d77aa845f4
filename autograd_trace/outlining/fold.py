"""Let a call receive and return one tensor in place of many slices of one.

A plan keeps the parameters of a bucket in one flat tensor and collects their gradients in another.
Each parameter would be a slice in the outer graph, and each gradient a result and a copy, for every
layer. Parameters at equal distances become one operand, which the body slices; gradients that are
side by side in one flat tensor become one result. So do the elements of a vector of scalars, such
as the sites of a layer's random operators.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.graph_calls import append
from trainload.autograd_trace.outlining.equality import CALL, is_collection, is_element, is_part
from trainload.autograd_trace.outlining.signatures import argument, operands_of
from trainload.autograd_trace.outlining.views import take_in_views

aten = torch.ops.aten
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.detach.default,
    }
)
"""Operators that change no value and no number of elements."""


def fold(module: GraphModule) -> None:
    """Reduce the operands and the results of the calls of regions, in place.

    Args:
        module: a graph with calls of regions. Every node has `meta["val"]`.
    """
    calls: dict[str, list[Node]] = {}
    for call in module.graph.find_nodes(op="call_function", target=CALL):
        calls.setdefault(str(call.args[1]), []).append(call)
    for name, those in calls.items():
        body: GraphModule = getattr(module, name)
        if len(those[0].args) > 2:  # it has operands
            take_in_views(body.graph, those)
            _merge_operands(body.graph, those)
        _join_results(body.graph, those)
        body.graph.eliminate_dead_code()
        body.graph.lint()
        body.recompile()
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


# Operands


@dataclass(frozen=True, slots=True)
class _Piece:
    """A contiguous part of a flat tensor, or one element of it: the first element, and the number
    of elements.
    """

    whole: Node
    start: int
    length: int


def _piece_of(node: Node) -> _Piece | None:
    """Return the piece of a flat tensor of static size that a node is; None if it is none."""
    if not is_part(node) and not is_element(node):
        return None
    source: Any = node.args[0]
    return _Piece(source, argument(node, 2, 0), node.meta["val"].numel())


def _merge_operands(body: Graph, calls: Sequence[Node]) -> None:
    """Pass the hull of pieces of one flat tensor whose distances are the same in all calls."""
    inputs = body.find_nodes(op="placeholder")
    groups: dict[Hashable, list[tuple[int, list[_Piece]]]] = {}
    for index, operands in enumerate(zip(*(call.args[2:] for call in calls), strict=True)):
        pieces = [_piece_of(each) for each in operands]
        found = [piece for piece in pieces if piece is not None]
        if len(found) == len(calls):
            wholes = tuple(piece.whole for piece in found)
            shifts = tuple(piece.start - found[0].start for piece in found)
            groups.setdefault((wholes, shifts), []).append((index, found))
    merged = [group for group in groups.values() if len(group) > 1]
    gone = {index for group in merged for index, _ in group}
    last = inputs[-1]
    hulls: list[list[Node]] = [[] for _ in calls]
    for group in merged:
        low = min(pieces[0].start for _, pieces in group)
        high = max(pieces[0].start + pieces[0].length for _, pieces in group)
        first = group[0][1]
        for call, those, piece in zip(calls, hulls, first, strict=True):
            shift = piece.start - first[0].start  # of all members
            with call.graph.inserting_before(call):
                those.append(_slice(call.graph, piece.whole, low + shift, high + shift))
        with body.inserting_after(last):
            last = body.placeholder(f"bucket_{len(hulls[0])}")
        last.meta["val"] = hulls[0][-1].meta["val"]
        _slice_in_body(body, last, low, [(inputs[i], pieces[0]) for i, pieces in group])
    for index in gone:
        body.erase_node(inputs[index])
    for call, those in zip(calls, hulls, strict=True):
        kept = [each for index, each in enumerate(call.args[2:]) if index not in gone]
        call.args = (*call.args[:2], *kept, *those)


def _slice(graph: Graph, whole: Node, start: int, stop: int) -> Node:
    mode = whole.meta["val"].fake_mode
    return append(graph, mode, aten.slice.Tensor, whole, 0, start, stop)


def _slice_in_body(
    body: Graph, hull: Node, low: int, inputs: Iterable[tuple[Node, _Piece]]
) -> None:
    """Replace inputs of a body by views of a new one."""
    first = next(node for node in body.nodes if node.op != "placeholder")
    with body.inserting_before(first):
        for node, piece in inputs:
            start = piece.start - low
            if node.meta["val"].ndim:
                inner = _slice(body, hull, start, start + piece.length)
            else:
                mode = hull.meta["val"].fake_mode
                inner = append(body, mode, aten.select.int, hull, 0, start)
            node.replace_all_uses_with(inner)


# Results


@dataclass(frozen=True, slots=True)
class _Place:
    """Destination of a result: the flat tensor that is made of it and others, its index among them,
    and the views by which it becomes flat, one of another.
    """

    collected: Node
    index: int
    entry: Node
    views: tuple[Node, ...]


def _join_results(body: Graph, calls: Sequence[Node]) -> None:
    """Return results that are side by side in one flat tensor, in all calls, as one."""
    (output,) = body.find_nodes(op="output")
    returned: list[Node] = list(output.args[0])
    taken = [_results_of(call) for call in calls]
    places: dict[int, list[_Place]] = {}
    for index in range(len(returned)):
        found = [_place_of(results[index]) if index in results else None for results in taken]
        known = [place for place in found if place is not None]
        if len(known) == len(calls) and len({_text_of(place.views) for place in known}) == 1:
            places[index] = known
    runs = [run for run in _runs(places) if len(run) > 1 or places[run[0]][0].views]
    if not runs:
        return
    joined = {index for run in runs for index in run}
    kept = [index for index in range(len(returned)) if index not in joined]
    with body.inserting_before(output):
        flats = [_join(body, [(returned[i], places[i][0].views) for i in run]) for run in runs]
    values = [*(returned[index] for index in kept), *flats]
    output.args = (tuple(values),)
    output.meta["val"] = tuple(node.meta["val"] for node in values)
    for number, (call, results) in enumerate(zip(calls, taken, strict=True)):
        graph = call.graph
        call.meta["val"] = tuple(node.meta["val"] for node in values)
        for new, index in enumerate(kept):
            if index in results:
                results[index].args = (call, new)
        for new, run in enumerate(runs, len(kept)):
            with graph.inserting_after(call):
                flat = graph.call_function(operator.getitem, (call, new))
            flat.meta["val"] = values[new].meta["val"]
            _put(flat, [places[index][number] for index in run])


def _results_of(call: Node) -> dict[int, Node]:
    """Return index -> node of the results of a call that are used."""
    found: dict[int, Node] = {}
    for user in call.users:
        assert user.target is operator.getitem, "the results of a call are taken one by one"
        found[int(user.args[1])] = user  # type: ignore[arg-type]
    return found


def _place_of(result: Node) -> _Place | None:
    """Return where a result goes, if it goes to one place, flat."""
    entry, views = result, list[Node]()
    while len(entry.users) == 1:
        (user,) = entry.users
        if user.target in _VIEWS and operands_of(user) == [entry]:
            entry = user
            views.append(user)
            continue
        entries: Any = user.args[0]
        if not is_collection(user) or entries.count(entry) != 1:
            return None
        return _Place(user, entries.index(entry), entry, tuple(views))
    return None


def _runs(places: dict[int, list[_Place]]) -> Iterator[list[int]]:
    """Yield results that are side by side in all calls."""
    collected = {found[0].collected: number for number, found in enumerate(places.values())}
    order = sorted(places, key=lambda i: (collected[places[i][0].collected], places[i][0].index))
    run: list[int] = []
    for index in order:
        if run and not _are_adjacent(places[run[-1]], places[index]):
            yield run
            run = []
        run.append(index)
    if run:
        yield run


def _are_adjacent(one: Sequence[_Place], other: Sequence[_Place]) -> bool:
    return all(
        a.collected is b.collected and b.index == a.index + 1
        for a, b in zip(one, other, strict=True)
    )


def _join(body: Graph, results: Iterable[tuple[Node, Sequence[Node]]]) -> Node:
    """Append the flat tensor of results, of each of which some views are taken."""
    parts = [_viewed(body, result, views) for result, views in results]
    if len(parts) == 1:
        return parts[0]
    return append(body, parts[0].meta["val"].fake_mode, aten.cat.default, parts)


def _viewed(graph: Graph, node: Node, views: Iterable[Node]) -> Node:
    """Append views of a node, one of another, as other nodes have them."""
    for view in views:
        rest: Any = view.args[1:]
        node = append(graph, node.meta["val"].fake_mode, view.target, node, *rest, **view.kwargs)  # type: ignore[arg-type]
    return node


def _text_of(views: Iterable[Node]) -> str:
    """Return views, which read nothing but one another, as text."""
    return str([(str(view.target), view.args[1:], view.kwargs) for view in views])


def _put(flat: Node, places: Sequence[_Place]) -> None:
    """Put one tensor in the places of several entries."""
    collected = places[0].collected
    entries: Any = collected.args[0]
    gone = {place.entry for place in places[1:]}
    collected.args = (
        [flat if each is places[0].entry else each for each in entries if each not in gone],
        *collected.args[1:],
    )
