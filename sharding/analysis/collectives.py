"""Read the collectives of rank graphs from the graphs, and compare them across ranks before any of
them is called.

Ranks that call other collectives than their peers, or in another order, wait for one another until
a timeout. The collectives that each rank will call are in its graphs, so mismatches can be detected
beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import SymInt, Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from trainload.capture.operators import body_at, is_overload
from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import PlanError

_SYMBOL = re.compile(r"\b[a-z]+[0-9]+\b")
_UNBACKED = re.compile(r"\bu[0-9]+\b")
"""A data-dependent size."""
_PREFIX = "_c10d_functional."
_WAIT = "wait_tensor"
_WITH_GROUP_SIZE = frozenset({"all_gather_into_tensor", "reduce_scatter_tensor"})
_CALLED = _WITH_GROUP_SIZE | {"all_reduce", "broadcast"}
_HINT = (
    "Every rank must run the same package, plan, trainload and torch: compare the nodes, clear"
    " their caches, and resume."
)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as one rank calls it.

    `elements`: elements of its input; if they depend on the rows of a call, an expression of
    symbols n0, n1, ..., numbered in the order in which the graph's collectives use them.
    """

    operator: str
    group: str
    dtype: str
    elements: int | str
    reduction: str = ""

    @property
    def is_called(self) -> bool:
        """True if it is a collective, False if it is another property that must be the same on all
        ranks of a group.
        """
        return self.operator in _CALLED

    def __str__(self) -> str:
        reduction = f" {self.reduction}" if self.reduction else ""
        return f"{self.operator}{reduction} of {self.elements} {self.dtype} in {self.group}"


def as_json(collectives: Mapping[str, Sequence[Collective]]) -> dict[str, list[list[Any]]]:
    """Return the collectives of some graphs, by name, as JSON values."""
    return {name: [list(astuple(each)) for each in called] for name, called in collectives.items()}


def of_json(encoded: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, tuple[Collective, ...]]:
    """Return the collectives that `as_json` wrote."""
    return {name: tuple(Collective(*each) for each in called) for name, called in encoded.items()}


Groups = Mapping[str, Sequence[Sequence[int]]]
"""Name -> the process groups of that name, as in `Plan.groups`."""


def collectives_of(module: GraphModule, groups: Groups, where: str) -> tuple[Collective, ...]:
    """Return the collectives that a rank graph calls, in order.

    Raises:
        PlanError: a collective uses an unknown group or a wrong group size; its result is not
            waited for; or it is in the body of an operator, where the data could decide whether a
            rank calls it.
    """
    collectives: list[Collective] = []
    symbols: dict[str, str] = {}
    for node, inside in _calls(module):
        if inside:
            raise PlanError(
                "a collective is in the body of an operator: ranks whose data differ would not all"
                " call it",
                where=f"{where}, {node.name}",
                got=str(node.target),
            )
        collective, ranks = _read_collective(node, where, symbols)
        if collective.group not in groups:
            raise PlanError(
                "a collective names a process group that the plan does not have",
                where=f"{where}, {node.name}",
                expected=", ".join(sorted(groups)),
                got=collective.group,
            )
        size = len(groups[collective.group][0])
        if ranks is not None and ranks != size:
            raise PlanError(
                "a collective states the wrong size of its group",
                where=f"{where}, {node.name}",
                expected=f"{size} ranks",
                got=f"{ranks}",
            )
        whole = collective.elements
        if (
            collective.operator == "reduce_scatter_tensor"
            and isinstance(whole, int)
            and whole % size
        ):
            raise PlanError(
                "a scattered tensor cannot be divided evenly",
                where=f"{where}, {node.name}",
                expected=f"a multiple of {size} elements",
                got=f"{whole}",
            )
        if not any(_collective_name(user) == _WAIT for user in node.users):
            raise PlanError(
                "nothing waits for the result of a collective",
                where=f"{where}, {node.name}",
                got=str(collective),
            )
        collectives.append(collective)
    return tuple(collectives)


def graph_digest(module: GraphModule) -> str:
    """Return the digest of a graph's computation: its nodes in order with their inputs and results,
    without their names, which a graph need not keep when it is stored.

    Ranks with equal collectives but different graphs would not hang; they would train on each
    other's values.
    """
    symbols: dict[str, str] = {}
    lines = [
        _SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"n{len(symbols)}"), line)
        for line in _lines(module)
    ]
    return sha256_bytes("\n".join(lines).encode())


def _lines(module: GraphModule) -> Iterator[str]:
    numbers = {node: f"%{number}" for number, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        values = () if node.op == "output" else node.meta.get("val", ())
        tensors = values if isinstance(values, tuple | list) else (values,)
        results = [
            f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else str(v) for v in tensors
        ]
        target = "" if node.op == "placeholder" else node.target
        inputs = map_arg((node.args, node.kwargs), numbers.__getitem__)
        yield f"{node.op} {target} {inputs} {results}"
        if (body := body_at(module, node)) is not None:
            yield from _lines(body)


def check_agreement(ranks: Sequence[Sequence[Collective]], groups: Groups, where: str) -> None:
    """Check that every rank's collectives match those of its peers: the same ones in each group,
    and in the same order across groups.

    Args:
        ranks: the collectives of each rank, by rank. Equal sequences may be one object, which makes
            the comparison almost free.
        groups: the plan's groups.
        where: name of the graph, for errors.

    Raises:
        PlanError: the ranks would hang; the message names two of them, and the first collective
            that differs.
    """
    kinds: dict[tuple[Collective, ...], int] = {}
    identities: dict[int, int] = {}
    kind_of: list[int] = []
    for sequence in ranks:
        if id(sequence) not in identities:
            identities[id(sequence)] = kinds.setdefault(tuple(sequence), len(kinds))
        kind_of.append(identities[id(sequence)])
    if len(kinds) == 1:
        return
    sequences = list(kinds)
    for (first, other), names in _pairs_to_compare(kind_of, groups).items():
        first_calls, other_calls = (
            [c for c in sequences[kind_of[rank]] if c.group in names] for rank in (first, other)
        )
        if first_calls != other_calls:
            at = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(first_calls, other_calls, strict=False))
                    if a != b
                ),
                min(len(first_calls), len(other_calls)),
            )
            called = all(
                each.is_called for each in (*first_calls[at : at + 1], *other_calls[at : at + 1])
            )
            raise PlanError(
                "ranks would "
                + (
                    "deadlock: they call different collectives"
                    if called
                    else "compute different results: their graphs differ"
                ),
                where=f"{where}, collective {at} of those that ranks {first} and {other} share",
                expected=f"rank {first}: {first_calls[at] if at < len(first_calls) else 'no more'}",
                got=f"rank {other}: {other_calls[at] if at < len(other_calls) else 'no more'}",
                hint=_HINT,
            )


def _pairs_to_compare(
    kind_of: Sequence[int], groups: Groups
) -> dict[tuple[int, int], frozenset[str]]:
    """Return pairs of ranks of different kinds -> the names of the groups that they share.

    For each two kinds that share a group, the first rank of one is paired with those of the other,
    one pair for each set of names. The axes of a mesh are regular, so the first rank sees every
    existing set.
    """
    homes = {
        name: {rank: number for number, part in enumerate(parts) for rank in part}
        for name, parts in groups.items()
    }
    pairs: dict[tuple[int, int, frozenset[str]], tuple[int, int]] = {}
    for parts in groups.values():
        for part in parts:
            firsts = {kind_of[rank]: rank for rank in reversed(part)}
            for kind, first in firsts.items() if len(firsts) > 1 else ():
                for other in part:
                    if kind_of[other] > kind:
                        shared = frozenset(
                            n
                            for n, home in homes.items()
                            if first in home and home[first] == home.get(other)
                        )
                        pairs.setdefault((kind, kind_of[other], shared), (first, other))
    return {pair: names for (_, _, names), pair in pairs.items()}


def _read_collective(
    node: Node, where: str, symbols: dict[str, str]
) -> tuple[Collective, int | None]:
    """Return a node's collective, and the group size that it states, if any. `symbols`: names of
    the symbols so far; updated.
    """
    name = _collective_name(node)
    value: Any = node.all_input_nodes[0].meta["val"]
    assert is_overload(node.target)
    arguments: dict[str, Any] = {
        parameter.name: argument
        for parameter, argument in zip(node.target._schema.arguments, node.args, strict=False)
    }
    arguments |= node.kwargs
    elements = value.numel()
    if isinstance(elements, SymInt) and not _UNBACKED.search(str(elements)):
        elements = _SYMBOL.sub(
            lambda match: symbols.setdefault(match[0], f"n{len(symbols)}"), str(elements)
        )
    if not isinstance(arguments.get("group_name"), str) or isinstance(elements, SymInt):
        raise PlanError(
            "the group or size of a collective is not known in advance",
            where=f"{where}, {node.name}",
            got=str(node.target),
        )
    dtype = str(value.dtype).removeprefix("torch.")
    collective = Collective(
        name, arguments["group_name"], dtype, elements, arguments.get("reduce_op", "")
    )
    return collective, arguments["group_size"] if name in _WITH_GROUP_SIZE else None


def _calls(module: GraphModule, inside: bool = False) -> Iterator[tuple[Node, bool]]:
    """Yield the nodes that call a collective, in order, each with True if it is in the body of an
    operator.
    """
    for node in module.graph.nodes:
        if _collective_name(node) not in ("", _WAIT):
            yield node, inside
        if (body := body_at(module, node)) is not None:
            yield from _calls(body, True)


def _collective_name(node: Node) -> str:
    """Return the name of a functional collective, "" for any other node."""
    spelled = str(node.target) if node.op == "call_function" else ""
    return spelled.removeprefix(_PREFIX).partition(".")[0] if spelled.startswith(_PREFIX) else ""
