"""One rank's part of a training run, without processes, files or schedules: state, a step, an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainload.autograd_trace.graphs import Role
from trainload.launch.build import Built, BuiltGraph
from trainload.launch.checkpoint_state import PARAM, ShardedState, StateKind, share, state_kind
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

    loss: mean over the global batch; weight: what it was taken over; gradient_norm: before clipping.
    """

    loss: float
    weight: float
    metrics: Mapping[str, float]
    gradient_norm: float


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
        self._rates = [g.learning_rates for g in self._recipe.groups]
        self._params: dict[str, Tensor] = {}
        self._states: list[Tensor] | None = None
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
        self._buffers = {b.name: weights.tensor(b.name).to(self._device) for b in self._package.manifest.buffers}
        self._load_constants()

    def load_state(self, state: ShardedState) -> None:
        """Continues from a checkpoint's state, already cut for this rank and plan."""
        self._params = {b.name: state.flats[b.name][PARAM].to(self._device) for b in self._plan.buckets}
        self._buffers = {name: value.to(self._device) for name, value in state.buffers.items()}
        self._load_constants()
        kinds = {StateKind.FLAT: state.flats, StateKind.SCALAR: state.scalars, StateKind.STACK: state.stacks}
        self._states = [kinds[kind][bucket][entry].to(self._device) for bucket, entry, kind in self._state_entries()]

    def state(self) -> ShardedState:
        """What a checkpoint keeps. The tensors are the live ones: copy before the next step."""
        kinds: dict[StateKind, dict[str, dict[str, Tensor]]] = {kind: {} for kind in StateKind}
        kinds[StateKind.FLAT] = {name: {PARAM: value} for name, value in self._params.items()}
        for (bucket, entry, kind), value in zip(self._state_entries(), self._states, strict=True) if self._states is not None else ():
            kinds[kind].setdefault(bucket, {})[entry] = value
        return ShardedState(kinds[StateKind.FLAT], kinds[StateKind.SCALAR], self._buffers, kinds[StateKind.STACK])

    def _load_constants(self) -> None:
        self._constants = {name: value.to(self._device) for name, value in self._package.program().constants.items()}

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
        norm = self._update(step, gradients, totals[-1] * self._scale, rates)
        return self._result(totals, norm)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Sums over the ranks of weight * loss, weight * each metric, and the weight: float32 (2 + metrics,)."""
        return self._call(self._built.evaluate, Microbatch(batch, 0), 0, [])[Role.TOTALS][0]

    @property
    def compiled(self) -> bool:
        """Whether the graphs were compiled."""
        return self._built.compiled

    @property
    def metric_names(self) -> list[str]:
        """What stands between the loss and the weight in totals."""
        outputs = self._package.manifest.graphs["train"].outputs
        return [o.name for o in outputs if o.role == "metric"]

    @property
    def _scale(self) -> float:
        return 1.0 / self._plan.global_batch

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
                case _:
                    value: int | float = {Role.SEED: self._recipe.seed, Role.STEP: step, Role.ROW: microbatch.row, Role.SCALE: self._scale}[
                        port.role
                    ]
                    arguments.append(
                        torch.tensor(value, dtype=torch.float32 if port.role is Role.SCALE else torch.int64, device=self._device)
                    )
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
            rates = [table[min(step, len(table) - 1)] for table in self._rates]
        rate_tensor = torch.tensor(list(rates), dtype=torch.float32, device=self._device)
        params = [self._updated_slice(b) for b in self._trained]
        with torch.no_grad():
            if self._states is None:
                first = UpdateStep(self._plan, self._package.updates(), self._recipe.clip_norm, first=True)
                norm, *new = first(divisor, rate_tensor, self._rank_tensor(), *params, *gradients)
                for param, value in zip(params, new[: len(params)], strict=True):
                    param.copy_(value)
                self._states = [value.clone() for value in new[len(params) :]]
            else:
                (norm,) = self._built.update(divisor, rate_tensor, self._rank_tensor(), *params, *gradients, *self._states)
            if self._plan.strategy == "zero1" and self._plan.world_size > 1:
                for bucket in self._trained:
                    full = torch.ops._c10d_functional.all_gather_into_tensor(self._updated_slice(bucket), self._plan.world_size, GROUP)
                    self._params[bucket.name] = torch.ops._c10d_functional.wait_tensor(full)
        return norm

    def _rank_tensor(self) -> Tensor:
        return torch.tensor(self._rank, device=self._device)

    def _updated_slice(self, bucket: Bucket) -> Tensor:
        """The part of a bucket that this rank updates: a view of what it stores."""
        stored = self._params[bucket.name]
        if update_length(self._plan, bucket) == stored_length(self._plan, bucket):
            return stored
        start, stop = share(bucket.length, self._rank, self._plan.world_size)
        return stored[start:stop]

    def _result(self, totals: Tensor, norm: Tensor) -> StepResult:
        values = totals.tolist()
        weight = values[-1]
        metrics = {name: value / weight for name, value in zip(self.metric_names, values[1:-1], strict=True)}
        return StepResult(values[0] / weight, weight, metrics, float(norm))
