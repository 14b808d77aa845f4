"""One rank's part of a training run, without processes, files or schedules: state, a step, an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainload.autograd_trace.graphs import Role
from trainload.launch.build import Built, BuiltGraph
from trainload.launch.checkpoint_state import MEAN, PARAM, ShardedState, StateKind, share, state_kind
from trainload.packaging.read import Package
from trainload.sharding.plan import Bucket, Plan
from trainload.sharding.rewrite import GROUP, Phase, accumulated_length, stored_length, update_length
from trainload.sharding.update import UpdateStep


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one call of the step graph is given. `row`: the number, within the global batch, of its first row."""

    batch: Mapping[str, Tensor]
    row: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The same on every rank.

    loss: mean over the global batch; weight: what it was taken over; gradient_norm: before clipping. loss_scale: the one of this step, None
    where the recipe does not scale the loss; where it does and the norm is not finite, nothing was updated.
    """

    loss: float
    weight: float
    metrics: Mapping[str, float]
    gradient_norm: float
    loss_scale: float | None = None


class Engine:
    """Holds a rank's parameters and optimizer state as flat tensors, and steps them.

    Laws: after the same steps on the same data every strategy has the same parameters, up to rounding; the same strategy and world
    size has the same bits.

    Args:
        package: what is trained.
        plan: how.
        rank: this rank. The plan's process group must be bound to `GROUP` if it has more than one.
        device: where this rank computes.
        built: the plan's callables for this device.
    """

    def __init__(self, package: Package, plan: Plan, rank: int, device: torch.device, built: Built) -> None:
        self._package = package
        self._plan = plan
        self._rank = rank
        self._device = device
        self._built = built
        self._recipe = package.recipe
        self._trained = [b for b in plan.buckets if b.group is not None]
        self._params: dict[str, Tensor] = {}
        self._states: list[Tensor] | None = None
        self._means: list[Tensor] = []
        self._scaling: list[Tensor] = []
        self._buffers: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}

    # State

    def load_package(self) -> None:
        """Starts from the package's weights; only the bytes that this rank stores are read."""
        weights = self._package.weights
        for bucket in self._plan.buckets:
            start, stop = self._stored_interval(bucket)
            flat = torch.zeros(stop - start, dtype=getattr(torch, bucket.dtype))
            for slot in bucket.slots:
                low, high = max(start, slot.offset), min(stop, slot.offset + slot.length)
                if low < high:
                    flat[low - start : high - start] = weights.slice(slot.parameter, low - slot.offset, high - slot.offset)
            self._params[bucket.name] = flat.to(self._device)
        self._states = None
        self._means = []
        self._load_scaling(None)
        self._buffers = {b.name: weights.tensor(b.name).to(self._device) for b in self._package.manifest.buffers}
        self._load_constants()

    def load_state(self, state: ShardedState, scaling: Mapping[str, Any] | None = None) -> None:
        """Continues from a checkpoint's state, already cut for this rank and plan, and from what `scaling` was."""
        self._params = {b.name: state.flats[b.name][PARAM].to(self._device) for b in self._plan.buckets}
        self._buffers = {name: value.to(self._device) for name, value in state.buffers.items()}
        self._load_constants()
        kinds = {StateKind.FLAT: state.flats, StateKind.SCALAR: state.scalars, StateKind.STACK: state.stacks}
        # Of a run whose every gradient so far was not finite there is none.
        made = all(entry in kinds[kind].get(bucket, {}) for bucket, entry, kind in self._state_entries())
        self._states = [kinds[kind][bucket][entry].to(self._device) for bucket, entry, kind in self._state_entries()] if made else None
        self._means = [state.flats[b.name][MEAN].to(self._device) for b in self._trained if MEAN in state.flats[b.name]]
        self._load_scaling(scaling)

    def state(self) -> ShardedState:
        """What a checkpoint keeps. The tensors are the live ones: copy before the next step."""
        kinds: dict[StateKind, dict[str, dict[str, Tensor]]] = {kind: {} for kind in StateKind}
        kinds[StateKind.FLAT] = {name: {PARAM: value} for name, value in self._params.items()}
        for (bucket, entry, kind), value in zip(self._state_entries(), self._states, strict=True) if self._states is not None else ():
            kinds[kind].setdefault(bucket, {})[entry] = value
        for trained, mean in zip(self._trained, self._means, strict=bool(self._means)):
            kinds[StateKind.FLAT][trained.name][MEAN] = mean
        return ShardedState(kinds[StateKind.FLAT], kinds[StateKind.SCALAR], self._buffers, kinds[StateKind.STACK])

    def scaling(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of the loss's scale; None where it is not scaled."""
        if not self._scaling:
            return None
        scale, streak = self._scaling
        return {"scale": scale.item(), "streak": streak.item()}

    def _load_scaling(self, found: Mapping[str, Any] | None) -> None:
        rule = self._recipe.loss_scale
        if rule is None:
            return
        scale, streak = (rule.init_scale, 0) if found is None else (found["scale"], found["streak"])
        self._scaling = [
            torch.tensor(scale, dtype=torch.float32, device=self._device),
            torch.tensor(streak, dtype=torch.int64, device=self._device),
        ]

    def _load_constants(self) -> None:
        self._constants = {name: value.to(self._device) for name, value in self._package.constants.items()}

    def _state_entries(self) -> list[tuple[str, str, StateKind]]:
        """(bucket, entry, kind) in the order of the update's states."""
        by_group = {u.group: u for u in self._package.manifest.updates}
        return [(b.name, s.name, state_kind(b, s.like_parameter)) for b in self._trained for s in by_group[str(b.group)].state]

    def _stored_interval(self, bucket: Bucket) -> tuple[int, int]:
        return share(bucket.length, self._rank, self._plan.world_size) if self._plan.strategy == "zero3" else (0, bucket.length)

    # Steps

    def step(self, step: int, microbatches: Sequence[Microbatch], rates: Sequence[float] | None = None) -> StepResult:
        """One optimizer update.

        Args:
            step: its number, from 0.
            microbatches: `plan.accumulate` of them.
            rates: learning rates of the recipe's groups; None: the recipe's own for this step.
        """
        assert len(microbatches) == self._plan.accumulate, "one microbatch for each accumulation"
        totals: Tensor | None = None
        gradients: list[Tensor] = []
        for number, microbatch in enumerate(microbatches):
            graph = self._built.train[self._phase(number)]
            outputs = self._call(graph, microbatch, step, gradients)
            totals = outputs[Role.TOTALS][0] if totals is None else totals + outputs[Role.TOTALS][0]
            gradients = outputs[Role.BUCKET_GRADIENT]
        assert totals is not None
        loss_scale = self._scaling[0].item() if self._scaling else None
        norm = self._update(step, gradients, totals[-1] * self._scale(), rates)
        return self._result(totals, norm, loss_scale)

    def evaluate(self, microbatch: Microbatch) -> Tensor:
        """Sums over the ranks of weight * loss, weight * each metric, and the weight: float32 (2 + metrics,).

        A graph that draws random numbers draws the same for a row in every evaluation.
        """
        return self._call(self._built.evaluate, microbatch, 0, [])[Role.TOTALS][0]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it `evaluate` sees the running mean of the parameters, once there is one."""
        kept = self._params
        means = {b.name: self._whole_stored(b, mean) for b, mean in zip(self._trained, self._means, strict=bool(self._means))}
        self._params = {**kept, **means}
        try:
            yield
        finally:
            self._params = kept

    @property
    def compiled(self) -> bool:
        """Whether the graphs were compiled."""
        return self._built.compiled

    @property
    def metric_names(self) -> list[str]:
        """What stands between the loss and the weight in totals."""
        outputs = self._package.manifest.graphs["train"].outputs
        return [o.name for o in outputs if o.role == "metric"]

    def _scale(self) -> Tensor:
        scale = torch.tensor(1.0 / self._plan.global_batch, dtype=torch.float32, device=self._device)
        return scale * self._scaling[0] if self._scaling else scale

    def _phase(self, number: int) -> Phase:
        if self._plan.accumulate == 1:
            return Phase.ONLY
        return Phase.SYNCHRONISE if number == self._plan.accumulate - 1 else Phase.ACCUMULATE

    def _call(self, graph: BuiltGraph, microbatch: Microbatch, step: int, so_far: Sequence[Tensor]) -> dict[Role, list[Tensor]]:
        arguments: list[Tensor] = []
        gradients = dict(zip((b.name for b in self._trained), so_far, strict=False))
        for port in graph.inputs:
            match port.role:
                case Role.BUCKET:
                    arguments.append(self._params[port.name])
                case Role.BUCKET_GRADIENT:
                    arguments.append(gradients[port.name] if gradients else self._zero_gradient(port.name))
                case Role.BUFFER:
                    arguments.append(self._buffers[port.name])
                case Role.CONSTANT:
                    arguments.append(self._constants[port.name])
                case Role.BATCH:
                    arguments.append(microbatch.batch[port.name].to(self._device))
                case Role.SCALE:
                    arguments.append(self._scale())
                case _:
                    value = {Role.SEED: self._recipe.seed, Role.STEP: step, Role.ROW: microbatch.row}[port.role]
                    arguments.append(torch.tensor(value, dtype=torch.int64, device=self._device))
        with torch.no_grad():
            results = graph.call(*arguments)
        found: dict[Role, list[Tensor]] = {Role.TOTALS: [], Role.BUCKET_GRADIENT: []}
        for port, value_out in zip(graph.outputs, results, strict=True):
            if port.role is Role.BUFFER:
                self._buffers[port.name] = value_out
            else:
                found.setdefault(port.role, []).append(value_out)
        return found

    def _zero_gradient(self, name: str) -> Tensor:
        bucket = next(b for b in self._trained if b.name == name)
        return torch.zeros(accumulated_length(self._plan, bucket), dtype=getattr(torch, bucket.dtype), device=self._device)

    def _update(self, step: int, gradients: Sequence[Tensor], divisor: Tensor, rates: Sequence[float] | None) -> Tensor:
        if rates is None:
            rates = self._recipe.rates(step)
        rate_tensor = torch.tensor(list(rates), dtype=torch.float32, device=self._device)
        params = [self._updated_slice(b) for b in self._trained]
        with torch.no_grad():
            if self._states is None:
                first = UpdateStep(self._plan, self._package.updates(), self._recipe, first=True)
                norm, *new = first(divisor, rate_tensor, self._rank_tensor(), *params, *gradients, *self._scaling)
                self._take_first(norm, params, new)
            else:
                kept = (*self._states, *self._means, *self._scaling)
                (norm,) = self._built.update(divisor, rate_tensor, self._rank_tensor(), *params, *gradients, *kept)
            for bucket in self._trained:
                self._params[bucket.name] = self._whole_stored(bucket, self._updated_slice(bucket))
        return norm

    def _take_first(self, norm: Tensor, params: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Writes what the first update made, unless its gradient was not finite and the loss is scaled."""
        made = list(new)
        if self._scaling:
            self._scaling = [made.pop() for _ in self._scaling][::-1]
            if not torch.isfinite(norm):
                return
        for param, value in zip(params, made, strict=False):
            param.copy_(value)
        kept = [value.clone() for value in made[len(params) :]]
        count = len(self._state_entries())
        self._states, self._means = kept[:count], kept[count:]

    def _whole_stored(self, bucket: Bucket, updated: Tensor) -> Tensor:
        """What this rank stores of a bucket, out of the slices that the ranks have updated."""
        if updated.numel() == stored_length(self._plan, bucket):
            return updated
        full = torch.ops._c10d_functional.all_gather_into_tensor(updated, self._plan.world_size, GROUP)
        result: Tensor = torch.ops._c10d_functional.wait_tensor(full)
        return result

    def _rank_tensor(self) -> Tensor:
        return torch.tensor(self._rank, device=self._device)

    def _updated_slice(self, bucket: Bucket) -> Tensor:
        """The part of a bucket that this rank updates: a view of what it stores."""
        stored = self._params[bucket.name]
        if update_length(self._plan, bucket) == stored_length(self._plan, bucket):
            return stored
        start, stop = share(bucket.length, self._rank, self._plan.world_size)
        return stored[start:stop]

    def _result(self, totals: Tensor, norm: Tensor, loss_scale: float | None) -> StepResult:
        values = totals.tolist()
        weight = values[-1]
        metrics = {name: value / weight for name, value in zip(self.metric_names, values[1:-1], strict=True)}
        return StepResult(values[0] / weight, weight, metrics, float(norm), loss_scale)
