"""The tensor axis of a plan: what it divides of a package, and what its ranks exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.core.errors import PlanError
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.plans.plan import Replicated, Shard
from trainload.sharding.plans.strategies import Divide
from trainload.sharding.tensor.choose import choose, experts
from trainload.sharding.tensor.partition import Partitioned, partition
from trainload.sharding.tensor.placement import Exchange
from trainload.sharding.tensor.positions import Positions

LEAST = 0.5
"""Minimum fraction of the matrix products' operations that the ranks of a context axis must be able
to do for their own positions only.
"""


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """Division of a package by a tensor axis, for the main training graph with its example of
    `rows` rows.

    Attributes:
        ranks: ranks of the axis.
        shards: parameter -> its division.
        exchanges: collectives of the ranks.
        rows: rows of the example.
        replicated: work that each rank repeats.
    """

    ranks: int
    shards: Mapping[str, Shard]
    exchanges: tuple[Exchange, ...] = ()
    rows: int = 1
    replicated: tuple[Replicated, ...] = ()

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one rank's share of a parameter."""
        return (
            self.shards[name].share_shape(shape, self.ranks)
            if name in self.shards
            else tuple(shape)
        )

    def sent(self, rows: int) -> float:
        """Return the bytes that a rank sends for one call of this number of rows."""
        return sum(exchange.sent(self.ranks, rows / self.rows) for exchange in self.exchanges)


def divide(
    steps: Sequence[StepGraph],
    ranks: int,
    whole: Collection[str],
    rules: Mapping[str, Shard | None] | None,
    what: Divide = "tensor",
    partitioned: Callable[..., Partitioned] | None = None,
) -> TensorAxis:
    """Find what a tensor axis of this number of ranks divides of a package.

    Args:
        steps: the package's training graphs, the main one first.
        ranks: ranks of the axis.
        whole: parameters that it must leave whole, since their update needs them whole.
        rules: as in `choose`; only with "tensor" and "sequence".
        what: as in `Plan.divide`.
        partitioned: function that partitions the main training graph, given shards and `positions`;
            None for `partition`.

    Raises:
        PlanError: a rule does not fit, or nothing can be divided.
    """
    shards = _shards(steps, ranks, whole, rules, what)
    result = (partitioned or functools.partial(partition, steps[0], ranks))(
        shards, positions=what != "tensor"
    )
    if what in ("sequence", "context"):
        _check_positions(result.positions, ranks, LEAST if what == "context" else 0.0)
    return TensorAxis(ranks, shards, result.exchanges, _rows(steps[0]), result.replicated)


def _shards(
    steps: Sequence[StepGraph],
    ranks: int,
    whole: Collection[str],
    rules: Mapping[str, Shard | None] | None,
    what: Divide,
) -> dict[str, Shard]:
    """Return which parameters are divided, and how."""
    if what in ("tensor", "sequence"):
        shards = choose(steps, ranks, whole, rules)
        if not shards:
            raise PlanError(
                "the tensor axis has nothing to divide",
                where="tensor_ranks",
                expected=(
                    f"a parameter dim, not a batch dim, that is a multiple of {ranks} and worth its"
                    " communication"
                ),
                got="none",
                hint="Use the data axis, or specify what to divide (--tensor-rule).",
            )
        return shards
    if rules:
        raise PlanError(
            "tensor rules only apply where parameters are divided",
            where="tensor_rules",
            expected="divide tensor or sequence",
            got=what,
        )
    if what == "context":
        return {}
    shards = experts(steps, ranks, whole)
    if not shards:
        raise PlanError(
            "the graph has no experts that this number of ranks can share",
            where="tensor_ranks",
            expected=f"parameters of batched matrix products, whose batch is a multiple of {ranks}",
            got="none",
            hint="Use the tensor axis (--tensor), or the data axis.",
        )
    return shards


def _check_positions(positions: Positions | None, ranks: int, least: float) -> None:
    if positions is None:
        raise PlanError(
            "the graph has no positions that this number of ranks can share",
            where="tensor_ranks",
            expected=(
                f"an input dim other than the rows, of a fixed size that is a multiple of {ranks},"
                " with matrix products along it"
            ),
            got="none",
            hint=(
                "Freeze with sequences of such a length (padded, where they are shorter), or choose"
                " another number of ranks."
            ),
        )
    if positions.share < least:
        assert positions.whole is not None
        raise PlanError(
            "most of the work cannot be divided by positions",
            where=f"{positions.whole.name} ({positions.whole.target})",
            expected=f"at least {least:.0%} of the operations of matrix products",
            got=f"{positions.share:.0%}, for a dim of {positions.factor.size} positions",
            hint="Use the tensor axis (--tensor), which divides parameters.",
        )


def _rows(step: StepGraph) -> int:
    placeholders, _ = ends(step.module)
    sizes = [
        n.meta["val"].shape[0]
        for n, p in zip(placeholders, step.inputs, strict=True)
        if p.role is Role.BATCH
    ]
    return sizes[0] if isinstance(sizes[0], int) else int(sizes[0].node.hint)
