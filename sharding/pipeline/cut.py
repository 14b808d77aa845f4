"""Find the stage of every placed node so that as few bytes as possible cross stages, by one minimal
cut for each boundary.

A boundary has a lower and an upper side. A forward value is computed below all forward values that
depend on it; backward values go down. A forward value that backward needs may have been sent up
with forward, or is sent down with backward: both cost its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from trainload.sharding.pipeline.items import Item, Items, is_sendable

_BELOW, _ABOVE = -1, -2
"""Source and sink of the flow: items that are certainly below, and certainly above, a boundary."""


def stages_of(items: Items) -> dict[Item, int]:
    """Return the stage of every item."""
    stages: dict[Item, int] = {}
    open_items = list(items.all)
    for boundary in range(items.count - 1):
        below = _below(items, open_items, stages, boundary)
        stages |= dict.fromkeys(below, boundary)
        open_items = [item for item in open_items if item not in stages]
    return stages | dict.fromkeys(open_items, items.count - 1)


def _below(
    items: Items, open_items: Sequence[Item], placed: dict[Item, int], boundary: int
) -> list[Item]:
    """Return the items without a stage that belong below a boundary."""
    sides: dict[Item, int] = dict.fromkeys(placed, _BELOW)
    for item in open_items:
        if item.high <= boundary:
            sides[item] = _BELOW
        elif item.low > boundary or (item.homes is not None and boundary not in item.homes):
            sides[item] = _ABOVE
    unsure = [item for item in open_items if item not in sides]
    if unsure:
        flow = _flow(items, sides)
        _, (lower, _) = nx.minimum_cut(flow, _BELOW, _ABOVE)
        sides |= {item: _BELOW if item.number in lower else _ABOVE for item in unsure}
    return [item for item in open_items if sides[item] == _BELOW]


def _flow(items: Items, sides: dict[Item, int]) -> nx.DiGraph[int]:
    """Return the network whose minimal cut has the fewest bytes.

    The lower side is that of the source. An edge without a capacity is never cut.
    """
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from((_BELOW, _ABOVE))
    count = len(items.all)

    def place(item: Item) -> int:
        return sides.get(item, item.number)

    def never(tail: int, head: int) -> None:
        if tail != head:
            graph.add_edge(tail, head)

    for item in items.all:
        users = [user for user in item.users if place(user) != place(item)]
        if not users:
            continue
        here = place(item)
        if item.output is None and not is_sendable(item.node):
            for user in users:
                never(here, place(user))
                never(place(user), here)
            continue
        up, down = count + 2 * item.number, count + 2 * item.number + 1
        for user in users:
            there = place(user)
            if not item.backward:
                never(up, there)
                graph.add_edge(here, up, capacity=item.size + 1)
            if item.backward or user.backward:
                never(there, down)
                graph.add_edge(down, here, capacity=item.size + 1)
            if user.backward == item.backward:
                never(*((here, there) if item.backward else (there, here)))
    return graph
