"""The tensor axis of a plan: which parameters of a package it divides, and what its ranks exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.errors import PlanError
from trainload.sharding.nodes import ends
from trainload.sharding.plan import Shard
from trainload.sharding.tensor.choose import choose
from trainload.sharding.tensor.partition import partition
from trainload.sharding.tensor.place import Exchange


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """ranks: of the axis. shards: parameter -> how it is divided. exchanges: of the main training graph, for its example of `rows` rows."""

    ranks: int
    shards: Mapping[str, Shard]
    exchanges: tuple[Exchange, ...] = ()
    rows: int = 1

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """What one rank has of a parameter."""
        return self.shards[name].share_shape(shape, self.ranks) if name in self.shards else tuple(shape)

    def sent(self, rows: int) -> float:
        """Bytes that a rank sends for one call of so many rows."""
        return sum(exchange.sent(self.ranks, rows / self.rows) for exchange in self.exchanges)


def divide(steps: Sequence[StepGraph], ranks: int, whole: Collection[str], rules: Mapping[str, Shard | None] | None) -> TensorAxis:
    """Finds what a tensor axis of so many ranks divides of a package.

    Args:
        steps: the package's training graphs, the main one first.
        ranks: of the axis.
        whole: parameters that it must leave whole, since their update takes whole parameters.
        rules: as `choose` takes them.

    Raises:
        PlanError: a rule does not fit, or nothing can be divided.
    """
    shards = choose(steps, ranks, whole, rules)
    if not shards:
        raise PlanError(
            "the tensor axis finds nothing to divide",
            where="tensor_ranks",
            expected=f"a dim of a parameter, no dim of the batch, that is a multiple of {ranks} and worth its exchanges",
            got="none",
            cure="Use the data axis, or say what to divide (--tensor-rule).",
        )
    return TensorAxis(ranks, shards, partition(steps[0], ranks, shards).exchanges, _rows(steps[0]))


def _rows(step: StepGraph) -> int:
    placeholders, _ = ends(step.module)
    sizes = [n.meta["val"].shape[0] for n, p in zip(placeholders, step.inputs, strict=True) if p.role is Role.BATCH]
    return sizes[0] if isinstance(sizes[0], int) else int(sizes[0].node.hint)
