"""The tree of a graph's regions, as the marks in the graph delimit them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from trainload.capture.operators import base_of, written_by
from trainload.capture.source.source_place import place_of_node
from trainload.capture.watching import marks
from trainload.core.errors import CaptureError

DEFERRED = ("backward", "func_grad", "vmap", "branch")
"""Kinds of regions that do not run at their position in the graph."""
_aten = torch.ops.aten


@dataclass(eq=False)
class Region:
    """A part of a graph.

    Attributes:
        kind: "grad_mode", or the kind of a `marks.BEGIN`.
        text: text of the `marks.BEGIN` or `marks.KEEP`.
        number: number of the `marks.BEGIN`.
        enabled: the grad mode, for a grad_mode region.
        items: nodes and nested regions, in order.
    """

    kind: str
    text: str = ""
    number: int = -1
    enabled: bool = True
    items: list[Node | Region] = field(default_factory=list)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes in the region, including those of nested regions."""
        for item in self.items:
            if isinstance(item, Region):
                yield from item.nodes()
            else:
                yield item


def parse_regions(graph: Graph, grad_enabled: bool) -> Region:
    """Return the tree of a graph's regions.

    A backward runs in the grad mode of the code that differentiates (None here), except for modes
    that it sets itself.
    """
    root = Region("root")
    stack = [root]
    modes: list[bool | None] = [grad_enabled]  # the grad mode around each region on the stack
    now: bool | None = grad_enabled
    # grad mode before a backward, and the contexts entered in it
    left: dict[int, tuple[bool | None, list[bool]]] = {}

    def close_mode() -> None:
        if stack[-1].kind == "grad_mode":
            stack.pop()
            modes.pop()

    def open_mode() -> None:
        if now is not None and now != modes[-1]:
            region = Region("grad_mode", enabled=now)
            stack[-1].items.append(region)
            stack.append(region)
            modes.append(now)

    for node in graph.nodes:
        if node.target is marks.GRAD_MODE:
            close_mode()
            now = node.args[0]
            backward = next(
                (left[region.number] for region in reversed(stack) if region.number in left), None
            )
            if backward is not None:
                # An enable_grad in a backward is kept even if it changed nothing in the trace,
                # since the caller's grad mode is unknown.
                _, entered = backward
                if node.args[1] and entered:
                    entered.pop()
                else:
                    entered.append(node.args[0])
                now = entered[-1] if entered else None
            open_mode()
        elif node.target is marks.BEGIN:
            region = Region(*node.args)
            stack[-1].items.append(region)
            stack.append(region)
            if region.kind == "backward":
                left[region.number] = (now, [])
                now = None
            modes.append(now)
        elif node.target is marks.KEEP:
            next(
                region for region in reversed(stack) if region.number == node.args[1]
            ).text = node.args[0]
        elif node.target is marks.END:
            # a grad mode, or regions left open by an exception
            while stack[-1].number != node.args[0]:
                stack.pop()
                modes.pop()
            ended = stack.pop()
            modes.pop()
            if ended.number in left:
                now, _ = left.pop(ended.number)
            if stack[-1].kind != "grad_mode" or stack[-1].enabled != now:
                close_mode()
                open_mode()
        elif node.op in ("placeholder", "output"):
            if node.op == "output":
                close_mode()
            root.items.append(node)
        else:
            stack[-1].items.append(node)
    assert stack == [root], "a region is not closed"
    return root


def operands_of(region: Region, entries: Sequence[Node], results: Sequence[Node]) -> list[Node]:
    """Return the outer values that a region uses, without `entries`.

    The entries are removed from the region.
    """
    region.items = [i for i in region.items if isinstance(i, Region) or i not in entries]
    inside = set(region.nodes())
    used = [source for node in region.nodes() for source in node.all_input_nodes] + [
        r for r in results if r not in inside
    ]
    return list(dict.fromkeys(n for n in used if n not in inside and n not in entries))


def forget_idle_copies(region: Region) -> None:
    """Remove a branch's copies of buffers that it does not use."""
    for item in reversed(list(region.items)):
        if isinstance(item, Region):
            forget_idle_copies(item)
        elif (
            item.target in (_aten.clone.default, _aten.view.dtype, _aten.to.dtype)
            and not item.users
        ):
            region.items.remove(item)
            item.graph.erase_node(item)


def check_no_writes(region: Region) -> None:
    """Check that a branch writes only to tensors that it created.

    Raises:
        CaptureError: if it writes to another tensor; names the line of the write.
    """
    inside = set(region.nodes())
    for node in region.nodes():
        for target in written_by(node):
            if base_of(target) not in inside:
                raise CaptureError(
                    "a branch of torch.cond writes to a tensor that is not a buffer of the model",
                    where=place_of_node(node),
                    hint=(
                        "Return the new value from both branches, or keep it in a buffer"
                        " (register_buffer)."
                    ),
                )
