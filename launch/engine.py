"""One rank's part of a training run, without processes, files or schedules: a step, an evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainload.autograd_trace.graphs import Role
from trainload.autograd_trace.rounds import TurnCall, calls_of, turns_before
from trainload.capture.program import MAIN, Mode, graph_name
from trainload.launch.build import Built, BuiltGraph
from trainload.launch.checkpoints.state import share
from trainload.launch.rank_state import RankState
from trainload.packaging.read import Package
from trainload.sharding.plan import Bucket, Plan
from trainload.sharding.rewrite import Phase, accumulated_length, stored_length, update_length
from trainload.sharding.update import UpdateStep, bucket_updates


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one call of a step graph is given. `row`: the number, within the global batch, of its first row."""

    batch: Mapping[str, Tensor]
    row: int


@dataclass(frozen=True, slots=True)
class Draw:
    """A rank's part of a global batch: `plan.accumulate` microbatches, for the graphs of one variant; the same one on every rank."""

    microbatches: Sequence[Microbatch]
    variant: str = ""


@dataclass(frozen=True, slots=True)
class GraphResult:
    """What a graph's update came to. The same on every rank.

    loss: mean over the global batch; weight: what it was taken over; gradient_norm: before clipping. loss_scale: the one of this update,
    None where the recipe does not scale the loss; where it does and the norm is not finite, nothing was updated.
    """

    loss: float
    weight: float
    metrics: Mapping[str, float]
    gradient_norm: float
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult(GraphResult):
    """What a round came to: the main graph's last result, and the last one of each other graph that trained."""

    others: Mapping[str, GraphResult] = field(default_factory=dict)


class Engine:
    """Steps a rank's parameters and optimizer state.

    Laws: after the same steps on the same data every strategy has the same parameters, up to rounding; the same strategy and world
    size has the same bits.

    Args:
        package: what is trained.
        plan: how.
        rank: this rank. The plan's process groups must be bound to their names if there is more than one rank.
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
        self._updates = package.updates()
        self._parts = {name: bucket_updates(plan, self._updates, self._recipe.graph(name).groups) for name in built.train}
        self.held = RankState(package, plan, self._updates, rank, device)

    # Steps

    def step(self, number: int, draws: Sequence[Draw], rates: Sequence[float] | None = None) -> StepResult:
        """One round of the loop; one optimizer update, where the recipe has one graph.

        Args:
            number: of the round, from 0.
            draws: the round's global batches, as `rounds.draws_of` counts them.
            rates: learning rates of the recipe's groups; None: the recipe's own.
        """
        fed: dict[str, list[Tensor]] = {}
        results: dict[str, GraphResult] = {}
        counts = {turn.graph: turns_before(self._recipe.turns, turn.graph, number) for turn in self._recipe.turns}
        for call in calls_of(self._recipe, number):
            draw = draws[call.draw]
            assert len(draw.microbatches) == self._plan.accumulate, "one microbatch for each accumulation"
            computed = graph_name(call.graph, Mode.COMPUTE, draw.variant)
            if computed in self._built.forward:
                outputs = [self._call(self._built.forward[computed], call, m, fed, i) for i, m in enumerate(draw.microbatches)]
                _feed(fed, call.graph, self._built.forward[computed], outputs)
            else:
                given = self._recipe.rates(counts) if rates is None else rates
                results[call.graph] = self._train(call, draw, fed, given)
            counts[call.graph] += 1
        main = results.pop(self._recipe.main)
        return StepResult(main.loss, main.weight, main.metrics, main.gradient_norm, main.loss_scale, results)

    def _train(self, call: TurnCall, draw: Draw, fed: dict[str, list[Tensor]], rates: Sequence[float]) -> GraphResult:
        """One turn of a training graph: forward and backward over the microbatches, then the update."""
        name = graph_name(call.graph, Mode.TRAIN, draw.variant)
        totals: Tensor | None = None
        gradients: Sequence[Tensor] = []
        outputs: list[dict[Role, list[Tensor]]] = []
        for number, microbatch in enumerate(draw.microbatches):
            graph = self._built.train[name][self._phase(number)]
            found = self._call(graph, call, microbatch, fed, number, gradients)
            totals = found[Role.TOTALS][0] if totals is None else totals + found[Role.TOTALS][0]
            gradients = found[Role.BUCKET_GRADIENT]
            outputs.append(found)
        assert totals is not None
        _feed(fed, call.graph, graph, outputs)
        scaling = self.held.scaling.get(call.graph, [])
        loss_scale = scaling[0].item() if scaling else None
        norm = self._update(name, gradients, totals[-1] * self._scale(call.graph), rates, scaling)
        values = totals.tolist()
        weight = values[-1]
        metrics = {metric: value / weight for metric, value in zip(self.metric_names(name), values[1:-1], strict=True)}
        return GraphResult(values[0] / weight, weight, metrics, float(norm), loss_scale)

    def evaluate(self, microbatch: Microbatch, variant: str = "") -> dict[str, Tensor]:
        """For each graph that trains: sums over the ranks of weight * loss, weight * each metric, and the weight: float32 (2 + metrics,).

        A graph that draws random numbers draws the same for a row in every evaluation.
        """
        fed: dict[str, list[Tensor]] = {}
        found: dict[str, Tensor] = {}
        for graph in dict.fromkeys(turn.graph for turn in self._recipe.turns):
            computed, evaluated = (graph_name(graph, mode, variant) for mode in (Mode.COMPUTE, Mode.EVAL))
            built = self._built.forward[evaluated if evaluated in self._built.forward else computed]
            results = self._call(built, TurnCall(graph, 0, 0), microbatch, fed, 0)
            _feed(fed, graph, built, [results])
            if Role.TOTALS in results:
                found[graph] = results[Role.TOTALS][0]
        return found

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it `evaluate` sees the running mean of the parameters, once there is one."""
        kept = self.held.params
        buckets = {bucket.name: bucket for bucket in self._plan.buckets}
        means = {name: self._whole_stored(buckets[name], mean) for name, mean in self.held.means.items()}
        self.held.params = {**kept, **means}
        try:
            yield
        finally:
            self.held.params = kept

    @property
    def compiled(self) -> bool:
        """Whether the graphs were compiled."""
        return self._built.compiled

    def metric_names(self, name: str) -> list[str]:
        """What stands between the loss and the weight in the totals of a training graph."""
        return [o.name for o in self._package.manifest.graphs[name].outputs if o.role == "metric"]

    def _scale(self, graph: str) -> Tensor:
        scale = torch.tensor(1.0 / self._plan.global_batch, dtype=torch.float32, device=self._device)
        return scale * self.held.scaling[graph][0] if graph in self.held.scaling else scale

    def _phase(self, number: int) -> Phase:
        if self._plan.accumulate == 1:
            return Phase.ONLY
        return Phase.SYNCHRONISE if number == self._plan.accumulate - 1 else Phase.ACCUMULATE

    def _call(
        self,
        graph: BuiltGraph,
        call: TurnCall,
        microbatch: Microbatch,
        fed: Mapping[str, Sequence[Tensor]],
        number: int,
        so_far: Sequence[Tensor] = (),
    ) -> dict[Role, list[Tensor]]:
        """Calls a graph on microbatch `number` of a draw. Returns: its outputs but buffers, which are kept."""
        feeds = self._recipe.feeds.get(call.graph, {})
        waiting = iter(so_far)
        arguments: list[Tensor] = []
        for port in graph.inputs:
            match port.role:
                case Role.BUCKET:
                    arguments.append(self.held.params[port.name])
                case Role.BUCKET_GRADIENT:
                    arguments.append(next(waiting) if so_far else self._zero_gradient(port.name))
                case Role.BUFFER:
                    arguments.append(self.held.buffers[port.name])
                case Role.CONSTANT:
                    arguments.append(self.held.constants[port.name])
                case Role.BATCH if port.name in feeds:
                    arguments.append(fed[feeds[port.name]][number])
                case Role.BATCH:
                    arguments.append(microbatch.batch[port.name].to(self._device))
                case Role.SCALE:
                    arguments.append(self._scale(call.graph))
                case _:
                    value = {
                        Role.SEED: seed_of(self._recipe.seed, call.graph),
                        Role.STEP: call.count,
                        Role.ROW: microbatch.row,
                        Role.TENSOR_RANK: self._plan.tensor_index(self._rank),
                    }[port.role]
                    arguments.append(torch.tensor(value, dtype=torch.int64, device=self._device))
        with torch.no_grad():
            results = graph.call(*arguments)
        found: dict[Role, list[Tensor]] = {}
        for port, value_out in zip(graph.outputs, results, strict=True):
            if port.role is Role.BUFFER:
                self.held.buffers[port.name] = value_out
            else:
                found.setdefault(port.role, []).append(value_out)
        return found

    def _zero_gradient(self, name: str) -> Tensor:
        bucket = next(b for b in self._plan.buckets if b.name == name)
        return torch.zeros(accumulated_length(self._plan, bucket), dtype=getattr(torch, bucket.dtype), device=self._device)

    # Updates

    def _update(self, name: str, gradients: Sequence[Tensor], divisor: Tensor, rates: Sequence[float], scaling: list[Tensor]) -> Tensor:
        rate_tensor = torch.tensor(list(rates), dtype=torch.float32, device=self._device)
        held, parts, mean = self.held, self._parts[name], self._recipe.graph(name).ema_decay is not None
        params = [self._updated_slice(part.bucket) for part in parts]
        lacking = held.lacking(parts, mean=mean)
        states = [value for part in parts for value in held.states.get(part.key, ())]
        means = [held.means[part.bucket.name] for part in parts if mean and part.bucket.name in held.means]
        arguments = (divisor, rate_tensor, self._rank_tensor(), *params, *gradients, *states, *means, *scaling)
        with torch.no_grad():
            if lacking:
                step = UpdateStep(self._plan, self._updates, self._recipe, name, lacking)
                norm, *new = step(*arguments)
                self._take(step, norm, params, new, scaling)
            else:
                (norm,) = self._built.update[name](*arguments)
            for part in parts:
                held.params[part.bucket.name] = self._whole_stored(part.bucket, self._updated_slice(part.bucket))
        return norm

    def _take(self, step: UpdateStep, norm: Tensor, params: Sequence[Tensor], new: Sequence[Tensor], scaling: list[Tensor]) -> None:
        """Writes what an update has made beside what it moved, unless its gradient was not finite and the loss is scaled."""
        made = list(new)
        if scaling:
            scaling[:] = [made.pop() for _ in scaling][::-1]
            if not torch.isfinite(norm):
                return
        values = iter(made)
        for param in params:
            param.copy_(next(values))
        for part in step.parts:
            self.held.states[part.key] = [next(values).clone() for _ in part.state]
        for part in step.parts if step.keeps_mean else ():
            self.held.means[part.bucket.name] = next(values).clone()

    def _whole_stored(self, bucket: Bucket, updated: Tensor) -> Tensor:
        """What this rank stores of a bucket, out of the slices that the ranks have updated."""
        if updated.numel() == stored_length(self._plan, bucket):
            return updated
        full = torch.ops._c10d_functional.all_gather_into_tensor(updated, self._plan.shard_degree, self._plan.shard_group)
        result: Tensor = torch.ops._c10d_functional.wait_tensor(full)
        return result

    def _rank_tensor(self) -> Tensor:
        return torch.tensor(self._plan.shard_index(self._rank), device=self._device)

    def _updated_slice(self, bucket: Bucket) -> Tensor:
        """The part of a bucket that this rank updates: a view of what it stores."""
        stored = self.held.params[bucket.name]
        if update_length(self._plan, bucket) == stored_length(self._plan, bucket):
            return stored
        start, stop = share(bucket.length, self._plan.shard_index(self._rank), self._plan.shard_degree)
        return stored[start:stop]


def seed_of(seed: int, graph: str) -> int:
    """The seed of a graph's random numbers: graphs of one job draw apart, the one of a job that has one by the job's own seed."""
    return seed if graph == MAIN else seed + int.from_bytes(hashlib.sha256(graph.encode()).digest()[:6])


def _feed(fed: dict[str, list[Tensor]], name: str, graph: BuiltGraph, outputs: Sequence[Mapping[Role, Sequence[Tensor]]]) -> None:
    """Notes what a graph has computed for others, by "graph.output": one tensor for each microbatch."""
    ports = [port for port in graph.outputs if port.role is Role.PREDICTION]
    for place, port in enumerate(ports):
        fed[f"{name}.{port.name}"] = [found[Role.PREDICTION][place] for found in outputs]
