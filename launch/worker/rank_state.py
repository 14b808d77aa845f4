"""State of one rank between steps: flat parameters, optimizer state, running means, buffers and
loss scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainload.autograd_trace.graphs import UpdateGraph
from trainload.launching.checkpoints.sharded_state import (
    MEAN,
    PARAM,
    ShardedState,
    StateKind,
    held,
    state_kind,
)
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan, Slot
from trainload.sharding.rewriting.rank_update import BucketUpdate, Lacking, StateKey, bucket_updates
from trainload.sharding.rewriting.shares import fill_share


class RankState:
    """Tensors of a rank, all on its device.

    Attributes:
        params: bucket -> (n,), the part of it that this rank stores.
        states: (bucket, group) -> the entries of the optimizer state, in its order; absent before
            the first update.
        means: bucket -> (n,), this rank's slice of the running mean; absent before the first update
            of a graph that keeps one.
        buffers: buffers by name.
        constants: constants by name.
        scaling: graph -> [scale, consecutive updates since it last changed]; empty if losses are
            not scaled.
    """

    def __init__(
        self,
        package: Package,
        plan: Plan,
        updates: Sequence[UpdateGraph],
        rank: int,
        device: torch.device,
    ) -> None:
        self._package = package
        self._plan = plan
        self._rank = rank
        self._device = device
        self._buckets = plan.held_buckets(plan.pipeline_index(rank))
        self._bucket_updates = bucket_updates(
            self._buckets, updates, {g.name for g in package.recipe.groups}
        )
        self.params: dict[str, Tensor] = {}
        self.states: dict[StateKey, list[Tensor]] = {}
        self.means: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self.scaling: dict[str, list[Tensor]] = {}

    def load_package(self) -> None:
        """Load the package's weights. Only the bytes that this rank stores are read."""
        weights = self._package.weights
        self.params = {}
        for bucket in self._buckets:
            start, stop = held(self._plan, bucket, PARAM, self._rank)
            flat = torch.zeros(stop - start, dtype=getattr(torch, bucket.dtype))
            for slot in bucket.slots:
                low, high = max(start, slot.offset), min(stop, slot.offset + slot.length)
                if low < high:
                    self._fill(slot, low - slot.offset, flat[low - start : high - start])
            self.params[bucket.name] = flat.to(self._device)
        self.states = {}
        self.means = {}
        self._load_scaling({})
        self.buffers = {
            b.name: weights.tensor(b.name).to(self._device) for b in self._package.manifest.buffers
        }
        self._load_constants()

    def _fill(self, slot: Slot, start: int, into: Tensor) -> None:
        """Read elements of this rank's share of a parameter from the package, beginning with
        element `start`.
        """
        plan, weights = self._plan, self._package.weights
        shard = plan.tensor_shards.get(slot.parameter)

        def whole(low: int, part: Tensor) -> None:
            part.copy_(weights.slice(slot.parameter, low, low + len(part)))

        if shard is None:
            whole(start, into)
        else:
            fill_share(
                whole,
                slot.shape,
                shard,
                plan.tensor_ranks,
                plan.tensor_index(self._rank),
                start,
                into,
            )

    def load(self, state: ShardedState, scaling: Mapping[str, Any] | None = None) -> None:
        """Load a checkpoint's state, already cut for this rank and plan, and the result of
        `dump_scaling`.
        """
        self.params = {b.name: state.flats[b.name][PARAM].to(self._device) for b in self._buckets}
        self.buffers = {name: value.to(self._device) for name, value in state.buffers.items()}
        self._load_constants()
        self.load_optimizer(state, scaling)

    def load_optimizer(self, state: ShardedState, scaling: Mapping[str, Any] | None = None) -> None:
        """Load the rest of a checkpoint beside parameters and buffers: optimizer state, running
        means and loss scales.
        """
        kinds = {
            StateKind.FLAT: state.flats,
            StateKind.SCALAR: state.scalars,
            StateKind.STACK: state.stacks,
        }
        self.states = {}
        for part in self._bucket_updates:
            bucket, entries = part.bucket.name, list(_entries(part))
            # There is no state of an update that never ran, or whose gradients have never been
            # finite so far.
            if all(entry in kinds[kind].get(bucket, {}) for entry, kind in entries):
                self.states[part.key] = [
                    kinds[kind][bucket][entry].to(self._device) for entry, kind in entries
                ]
        self.means = {
            name: entries[MEAN].to(self._device)
            for name, entries in state.flats.items()
            if MEAN in entries
        }
        self._load_scaling(scaling or {})

    def dump(self) -> ShardedState:
        """Return the state that a checkpoint stores.

        The tensors are not copies: copy them before the next step.
        """
        kinds: dict[StateKind, dict[str, dict[str, Tensor]]] = {kind: {} for kind in StateKind}
        kinds[StateKind.FLAT] = {name: {PARAM: value} for name, value in self.params.items()}
        for part in self._bucket_updates:
            for (entry, kind), value in zip(
                _entries(part), self.states.get(part.key, ()), strict=False
            ):
                kinds[kind].setdefault(part.bucket.name, {})[entry] = value
        for name, mean in self.means.items():
            kinds[StateKind.FLAT][name][MEAN] = mean
        return ShardedState(
            kinds[StateKind.FLAT], kinds[StateKind.SCALAR], self.buffers, kinds[StateKind.STACK]
        )

    def dump_scaling(self) -> dict[str, Any] | None:
        """Return the loss scales that a checkpoint stores; None if losses are not scaled."""
        scales = {
            graph: {"scale": scale.item(), "streak": streak.item()}
            for graph, (scale, streak) in self.scaling.items()
        }
        return scales or None

    def lacking(self, parts: Sequence[BucketUpdate], *, mean: bool) -> Lacking:
        """Return the optimizer states and means that do not exist yet, so an update of these parts
        must create them.
        """
        states = frozenset(part.key for part in parts if part.key not in self.states)
        return Lacking(
            states,
            frozenset(p.bucket.name for p in parts if mean and p.bucket.name not in self.means),
        )

    def _load_scaling(self, scales: Mapping[str, Any]) -> None:
        rule = self._package.recipe.loss_scale
        self.scaling = {}
        for graph in (
            {turn.graph: None for turn in self._package.recipe.turns} if rule is not None else ()
        ):
            assert rule is not None
            entry = scales.get(graph, {"scale": rule.init_scale, "streak": 0})
            self.scaling[graph] = [
                torch.tensor(entry["scale"], dtype=torch.float32, device=self._device),
                torch.tensor(entry["streak"], dtype=torch.int64, device=self._device),
            ]

    def _load_constants(self) -> None:
        self.constants = {
            name: value.to(self._device) for name, value in self._package.constants.items()
        }


def _entries(part: BucketUpdate) -> Iterator[tuple[str, StateKind]]:
    """Yield the names and kinds under which a checkpoint stores the entries of an optimizer state,
    in its order.
    """
    for spec in part.state:
        yield (
            part.bucket.entry(part.update.group, spec.name),
            state_kind(part.update.elementwise, spec.like_parameter),
        )
