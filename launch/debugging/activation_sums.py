"""Sums over the results of a graph's modules and activation functions, from which their statistics
are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from trainload.capture.operators import is_overload
from trainload.launching.debugging.node_origins import line_of, module_of
from trainload.packaging.format.source_map import modules_of

aten = torch.ops.aten
_ZEROS = frozenset({aten.relu, aten.threshold, aten.hardtanh, aten.leaky_relu})
"""Activation functions whose result may be zero everywhere."""
_SATURATED: Mapping[Any, float] = {aten.sigmoid: 0.0, aten.tanh: -1.0}
"""Activation functions with a result between this number and 1."""
_NEAR = 0.01
"""Distance from an end of its range at which a value is saturated, relative to the range."""


class Site(NamedTuple):
    """A module's result (`operator` is ""), or the n-th call of an activation function in it."""

    module: str
    operator: str = ""
    number: int = 0


@dataclass(slots=True)
class Sums:
    """Sums over the values of a site.

    Attributes:
        line: line of the user's code.
        count: number of values.
        squares: 0-dim float64; sum of their squares.
        greatest: 0-dim float64; their greatest magnitude.
        zeros: 0-dim float64; number of zeros.
        saturated: 0-dim float64; number of values within 1 % of an end of the function's range;
            None if it has no such range.
        alive: bool (units,); True for each element of the last dim that was not zero in some row;
            None if units are not followed.
    """

    line: str
    count: int
    squares: Tensor
    greatest: Tensor
    zeros: Tensor
    saturated: Tensor | None
    alive: Tensor | None = None

    def add(self, other: Sums) -> None:
        """Add the sums over other values."""
        self.count += other.count
        self.squares = self.squares + other.squares
        self.greatest = torch.maximum(self.greatest, other.greatest)
        self.zeros = self.zeros + other.zeros
        if self.saturated is not None and other.saturated is not None:
            self.saturated = self.saturated + other.saturated
        if other.alive is not None:
            is_same = self.alive is not None and self.alive.shape == other.alive.shape
            self.alive = other.alive | self.alive if is_same else other.alive  # type: ignore[operator]  # it is no None


@dataclass(frozen=True, slots=True)
class Observed:
    """A site of a graph, as far as its sums depend on it.

    Attributes:
        site: the site.
        line: line of the user's code.
        low: least value of its activation function; None if it has no range.
    """

    site: Site
    line: str
    low: float | None

    @classmethod
    def of(cls, site: Site, node: Node) -> Observed:
        """Return a site of a node (`sites_of`)."""
        return cls(
            site, line_of(node), _SATURATED.get(_function_of(node)) if site.operator else None
        )


def sums_of(
    value: Tensor, observed: Sequence[Observed], *, follows_units: bool
) -> list[tuple[Site, Sums]]:
    """Return the sums over a value for each of its sites. Nothing is copied to the host.

    Args:
        value: the value, of any shape and floating dtype.
        observed: its sites.
        follows_units: True to follow which units of the last dim are zero in every row.
    """
    value = value.detach()
    squares = greatest = zeros = torch.zeros((), dtype=torch.float64, device=value.device)
    if value.numel():
        # a dot product and aminmax: vector_norm takes five times as long on CPUs (torch 2.13)
        flat = value.reshape(-1)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        squares = torch.dot(flat, flat).double()
        least, most = torch.aminmax(flat)
        greatest = torch.maximum(-least, most).double()
        zeros = (value.numel() - torch.count_nonzero(flat)).double()
    alive = None
    if follows_units:
        units = value.reshape(-1, value.shape[-1]) if value.ndim else value.reshape(1, 1)
        alive = (units != 0).any(0)
    return [
        (
            each.site,
            Sums(
                each.line,
                value.numel(),
                squares,
                greatest,
                zeros,
                None if each.low is None else _saturated(value, each.low),
                alive,
            ),
        )
        for each in observed
    ]


def _saturated(value: Tensor, low: float) -> Tensor:
    near = _NEAR * (1 - low)
    return ((value <= low + near) | (value >= 1 - near)).sum().double()


def numbers_of(sums: Iterable[Sums]) -> Tensor:
    """Return float64 (sites, 5) on the CPU: count, squares, zeros, saturated (0 if it is None),
    greatest. All are copied from the device at once.
    """
    rows = [
        torch.stack(
            [
                each.squares.new_tensor(each.count),
                each.squares,
                each.zeros,
                torch.zeros_like(each.squares) if each.saturated is None else each.saturated,
                each.greatest,
            ]
        )
        for each in sums
    ]
    return torch.stack(rows).cpu() if rows else torch.zeros(0, 5, dtype=torch.float64)


def _function_of(node: Node) -> Any:
    """Return the activation function that a node calls; None if it calls none."""
    if node.op != "call_function" or not is_overload(node.target):
        return None
    packet = node.target.overloadpacket
    return packet if packet in _ZEROS or packet in _SATURATED else None


def sites_of(nodes: Iterable[Node]) -> Mapping[Node, Sequence[Site]]:
    """Return the nodes of a forward that statistics are about, and their sites."""
    last: dict[str, Node] = {}
    observed: dict[Node, list[Site]] = {}
    counts: Counter[Site] = Counter()
    for node in nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        last |= dict.fromkeys(filter(None, modules_of(node)), node)
        if (packet := _function_of(node)) is not None:
            site = Site(module_of(node), str(packet).removeprefix("aten."))
            observed.setdefault(node, []).append(site._replace(number=counts[site]))
            counts[site] += 1
    for path, node in last.items():
        observed.setdefault(node, []).insert(0, Site(path))
    return observed
