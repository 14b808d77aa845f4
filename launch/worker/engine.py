"""One rank's steps and evaluations, independent of processes, files and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainload.autograd_trace.graphs import Role
from trainload.autograd_trace.optimizer.rounds import TurnCall, calls_of, turns_before
from trainload.capture.program import Mode, graph_name
from trainload.launching.checkpoints.sharded_state import share
from trainload.launching.node.built_graphs import Built, BuiltGraph
from trainload.launching.node.device_values import scalar_on, vector_on
from trainload.launching.worker.calls import CallContext, Calls, Microbatch, ignore
from trainload.launching.worker.pipeline_step import PipelineRunner
from trainload.launching.worker.rank_state import RankState
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Bucket, Plan
from trainload.sharding.rewriting.rank_update import (
    Lacking,
    UpdateStep,
    bucket_updates,
    usable_norm,
)
from trainload.sharding.rewriting.rewrite import Phase, stored_length, update_length


@dataclass(frozen=True, slots=True)
class Draw:
    """A rank's part of a global batch: `plan.accumulate` microbatches for the graphs of one
    variant.

    The variant is the same on every rank.
    """

    microbatches: Sequence[Microbatch]
    variant: str = ""


@dataclass(frozen=True, slots=True)
class GraphResult:
    """Result of a graph's update, the same on every rank.

    The update is skipped if the weight is 0; loss and metrics are NaN then, and the norm is 0. It
    is also skipped if loss or norm are not finite.

    Attributes:
        loss: weighted mean over the global batch.
        weight: sum of the weights of its rows.
        metrics: metrics by name, means like the loss.
        gradient_norm: norm of the gradient before clipping.
        loss_scale: scale of the loss in this update; None if the recipe does not scale the loss.
    """

    loss: float
    weight: float
    metrics: Mapping[str, float]
    gradient_norm: float
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult(GraphResult):
    """Result of a round: the fields of `GraphResult` are the main graph's last result.

    Attributes:
        others: last result of each other graph that trained.
        turns: name of the graph and result of every update, in order.
    """

    others: Mapping[str, GraphResult] = field(default_factory=dict)
    turns: Sequence[tuple[str, GraphResult]] = ()


class NotFiniteError(Exception):
    """The loss of a turn, or the norm of a gradient whose loss is not scaled, is not finite.

    Attributes:
        graph: name of the graph.
        quantity: "loss" or "gradient's norm".
        value: its value.
    """

    def __init__(self, graph: str, quantity: str, value: float) -> None:
        super().__init__(f"{graph}: the {quantity} is {value}")
        self.graph, self.quantity, self.value = graph, quantity, value


@dataclass(frozen=True, slots=True)
class _Begun:
    """A turn of a training graph and what it began from, as far as the turn changes it."""

    name: str
    call: TurnCall
    draw: Draw
    fed: dict[str, list[Tensor]]
    buffers: dict[str, Tensor]
    scaling: list[Tensor]


class Engine:
    """Trainer of one rank: steps its parameters and optimizer state.

    Laws: after the same steps on the same data every strategy has the same parameters, up to
    rounding; with the same strategy and world size they are bitwise equal.

    Args:
        package: package that is trained.
        plan: plan of the run.
        rank: this rank. With more than one rank, the plan's process groups must be bound to their
            names.
        device: device of this rank.
        built: callables of the plan for this device.
        on_call: called with the name of each graph, within the build, before the graph is called.

    Attributes:
        held: state of this rank between steps.
        built: callables of the plan for this device.
        calling: (graph of the package, microbatch) of each call of this rank in the current step or
            evaluation.
        before_update: called with each update and its arguments, before it writes to them; None for
            nothing.
    """

    def __init__(
        self,
        package: Package,
        plan: Plan,
        rank: int,
        device: torch.device,
        built: Built,
        on_call: Callable[[str], None] = ignore,
    ) -> None:
        self._package = package
        self._plan = plan
        self._rank = rank
        self._device = device
        self.built = built
        self._recipe = package.recipe
        self._updates = package.updates()
        self._index = plan.pipeline_index(rank)
        buckets = plan.held_buckets(self._index)
        self._parts = {
            name: bucket_updates(buckets, self._updates, self._recipe.graph(name).groups)
            for name in built.update
        }
        self.held = RankState(package, plan, self._updates, rank, device)
        self._on_call = on_call
        self._calls = Calls(package, plan, rank, device, self.held, on_call)
        self._pipeline = (
            PipelineRunner(plan, rank, device, self._calls) if plan.pipeline is not None else None
        )
        self.calling: list[tuple[str, Microbatch]] = []
        self.before_update: Callable[[UpdateStep, Sequence[Tensor]], None] | None = None
        self._begun: _Begun | None = None

    @property
    def microbatch(self) -> Microbatch | None:
        """The microbatch of the graph that is called, or was called last."""
        return self._calls.microbatch

    # Steps

    def step(
        self, number: int, draws: Sequence[Draw], rates: Sequence[float] | None = None
    ) -> StepResult:
        """Run one round of the loop: one optimizer update if the recipe has one graph.

        Args:
            number: number of the round, from 0.
            draws: global batches of the round; `rounds.draws_of` is their number.
            rates: learning rates of the recipe's groups; None for those of the recipe's schedule.

        Raises:
            NotFiniteError: the loss or the gradient of a turn is not finite, on every rank. The
                round has ended with this turn, which has changed neither parameters nor optimizer
                state; `repeat_turn` computes it again.
        """
        fed: dict[str, list[Tensor]] = {}
        results: dict[str, GraphResult] = {}
        turns: list[tuple[str, GraphResult]] = []
        counts = {
            turn.graph: turns_before(self._recipe.turns, turn.graph, number)
            for turn in self._recipe.turns
        }
        self.calling = []
        for call in calls_of(self._recipe, number):
            draw = draws[call.draw]
            assert len(draw.microbatches) == self._plan.accumulate, (
                "one microbatch for each accumulation"
            )
            computed = graph_name(call.graph, Mode.COMPUTE, draw.variant)
            name = (
                computed
                if computed in self.built.forward
                else graph_name(call.graph, Mode.TRAIN, draw.variant)
            )
            self.calling += [(name, microbatch) for microbatch in draw.microbatches]
            if name in self.built.forward:
                graph = self.built.forward[name]
                outputs = [
                    self._calls.call(graph, m, CallContext(call, i, fed))
                    for i, m in enumerate(draw.microbatches)
                ]
                _add_predictions(fed, call.graph, graph, outputs)
            else:
                current_rates = self._recipe.rates(counts) if rates is None else rates
                results[call.graph] = self._train(name, call, draw, fed, current_rates)
                turns.append((call.graph, results[call.graph]))
                self._check_finite(call.graph, results[call.graph])
            counts[call.graph] += 1
        main = results.pop(self._recipe.main)
        return StepResult(
            main.loss,
            main.weight,
            main.metrics,
            main.gradient_norm,
            main.loss_scale,
            results,
            turns,
        )

    def _check_finite(self, graph: str, result: GraphResult) -> None:
        if not result.weight:
            return  # nothing was updated
        if not math.isfinite(result.loss):
            raise NotFiniteError(graph, "loss", result.loss)
        norm = result.gradient_norm
        is_usable = bool(usable_norm(torch.tensor(norm), self._recipe, graph))
        # a scaled loss has its scale lowered instead
        if result.loss_scale is None and not is_usable:
            raise NotFiniteError(graph, "gradient's norm", norm)

    def _begin(
        self, name: str, call: TurnCall, draw: Draw, fed: Mapping[str, list[Tensor]]
    ) -> _Begun:
        # an update changes scales in place, and a recorded graph its buffers
        scaling = [value.clone() for value in self.held.scaling.get(call.graph, [])]
        buffers = {
            buffer: value.clone() if self.built.is_recorded else value
            for buffer, value in self.held.buffers.items()
        }
        return _Begun(name, call, draw, dict(fed), buffers, scaling)

    @property
    def begun_draw(self) -> Draw:
        """Batch of the last turn."""
        assert self._begun is not None, "a turn has begun"
        return self._begun.draw

    def repeat_turn(self, built: Built, draw: Draw | None = None) -> None:
        """Compute forward and backward of the last turn again, by the callables of another build of
        the plan, without an update. The state is the same afterwards.

        Args:
            built: the other build.
            draw: a batch in place of the turn's.
        """
        begun, own, held = self._begun, self.built, self.held
        assert begun is not None, "a turn has begun"
        graph = begun.call.graph
        buffers, scaling = held.buffers, held.scaling
        held.buffers = dict(begun.buffers)
        held.scaling = {**scaling, graph: begun.scaling} if graph in scaling else scaling
        self.built = built
        try:
            self._compute(begun.name, begun.call, draw or begun.draw, dict(begun.fed))
        finally:
            self.built, held.buffers, held.scaling = own, buffers, scaling

    def _train(
        self,
        name: str,
        call: TurnCall,
        draw: Draw,
        fed: dict[str, list[Tensor]],
        rates: Sequence[float],
    ) -> GraphResult:
        """Run one turn of a training graph: forward and backward over the microbatches, then the
        update.
        """
        names = self.metric_names(name)
        self._begun = self._begin(name, call, draw, fed)
        totals, gradients = self._compute(name, call, draw, fed)
        scaling = self.held.scaling.get(call.graph, [])
        scale = [value.reshape(1).clone() for value in scaling[:1]]
        if self._has_own_weight(name) and not totals[-1].item():
            nothing = dict.fromkeys(names, math.nan)
            return GraphResult(math.nan, 0.0, nothing, 0.0, scale[0].item() if scale else None)
        # an update whose loss is not finite must leave everything unchanged too
        divisor = torch.where(torch.isfinite(totals[0]), totals[-1], math.nan)
        norm = self._update(
            name, gradients, divisor * self._calls.scale(call.graph), rates, scaling
        )
        # one copy, the only place at which the host waits for the device
        told = torch.cat([totals, norm.reshape(1), *scale]).tolist()
        values, gradient_norm, loss_scale = (
            told[: len(totals)],
            told[len(totals)],
            told[-1] if scale else None,
        )
        weight = values[-1]
        metrics = {
            metric: value / weight for metric, value in zip(names, values[1:-1], strict=True)
        }
        return GraphResult(values[0] / weight, weight, metrics, gradient_norm, loss_scale)

    def _compute(
        self, name: str, call: TurnCall, draw: Draw, fed: dict[str, list[Tensor]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward of a turn; return the totals and the gradient of each bucket."""
        if self._pipeline is None:
            return self._train_microbatches(name, call, draw, fed)
        return self._train_pipeline(name, call, draw)

    def _train_microbatches(
        self, name: str, call: TurnCall, draw: Draw, fed: dict[str, list[Tensor]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward over the microbatches, one by one; return the totals and the
        gradient of each bucket.
        """
        gradients: dict[str, Tensor] = {}
        outputs: list[dict[Role, list[Tensor]]] = []
        for number, microbatch in enumerate(draw.microbatches):
            graph = self.built.train[name][self._phase(number)]
            outputs.append(
                self._calls.call(graph, microbatch, CallContext(call, number, fed, gradients))
            )
        _add_predictions(fed, call.graph, graph, outputs)
        first, *others = (by_role[Role.TOTALS][0] for by_role in outputs)
        return sum(others, first), gradients

    def _train_pipeline(
        self, name: str, call: TurnCall, draw: Draw
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Do the same as `_train_microbatches` with the stages of a pipeline.

        The gradients are this rank's own.
        """
        assert self._pipeline is not None
        totals, gradients = self._pipeline.train(self.built.stages[name], call, draw.microbatches)
        return self._pipeline.shared(totals, len(self.metric_names(name)) + 2), gradients

    def evaluate(self, microbatch: Microbatch, variant: str = "") -> dict[str, Tensor]:
        """Evaluate a microbatch with each graph that trains.

        A graph that draws random numbers draws the same ones for a row in every evaluation.

        Returns:
            Graph -> float32 (2 + metrics,): the sums over the ranks of weight * loss, of weight *
            each metric, and of the weight.
        """
        fed: dict[str, list[Tensor]] = {}
        graph_totals: dict[str, Tensor] = {}
        self.calling = []
        for graph in dict.fromkeys(turn.graph for turn in self._recipe.turns):
            computed, evaluated = (
                graph_name(graph, mode, variant) for mode in (Mode.COMPUTE, Mode.EVAL)
            )
            turn = TurnCall(graph, 0, 0)
            self.calling.append(
                (evaluated if evaluated in self._package.manifest.graphs else computed, microbatch)
            )
            if self._pipeline is not None:
                totals = self._pipeline.evaluate(self.built.stages[evaluated], turn, microbatch)
                graph_totals[graph] = self._pipeline.shared(
                    totals, len(self.metric_names(graph_name(graph, Mode.TRAIN, variant))) + 2
                )
                continue
            built = self.built.forward[evaluated if evaluated in self.built.forward else computed]
            results = self._calls.call(built, microbatch, CallContext(turn, 0, fed))
            _add_predictions(fed, graph, built, [results])
            if Role.TOTALS in results:
                graph_totals[graph] = results[Role.TOTALS][0]
        return graph_totals

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Make `evaluate` use the running mean of the parameters within the context, once there is
        one.
        """
        stored_params = self.held.params
        buckets = {bucket.name: bucket for bucket in self._plan.buckets}
        means = {
            name: self._gather_stored(buckets[name], mean) for name, mean in self.held.means.items()
        }
        self.held.params = {**stored_params, **means}
        try:
            yield
        finally:
            self.held.params = stored_params

    @property
    def compiled(self) -> bool:
        """True if the graphs were compiled."""
        return self.built.compiled

    def metric_names(self, name: str) -> list[str]:
        """Return the names of the metrics of a training graph; in its totals they are between loss
        and weight.
        """
        return [o.name for o in self._package.manifest.graphs[name].outputs if o.role == "metric"]

    def _has_own_weight(self, name: str) -> bool:
        """Return True if a training graph computes its weight, which may be 0.

        Otherwise the weight is the number of rows, and no device synchronization is needed to know
        it.
        """
        return any(
            output.role == "weight" for output in self._package.manifest.graphs[name].outputs
        )

    def _phase(self, number: int) -> Phase:
        if self._plan.accumulate == 1:
            return Phase.ONLY
        return Phase.SYNCHRONISE if number == self._plan.accumulate - 1 else Phase.ACCUMULATE

    # Updates

    def _update(
        self,
        name: str,
        gradients: Mapping[str, Tensor],
        divisor: Tensor,
        rates: Sequence[float],
        scaling: list[Tensor],
    ) -> Tensor:
        rate_tensor = vector_on(self._device, rates, torch.float32)
        state, parts, mean = (
            self.held,
            self._parts[name],
            self._recipe.graph(name).ema_decay is not None,
        )
        params = [self._updated_slice(part.bucket) for part in parts]
        own = [
            gradients[b] if (b := part.bucket.name) in gradients else self._calls.zero_gradient(b)
            for part in parts
        ]
        lacking = state.lacking(parts, mean=mean)
        states = [value for part in parts for value in state.states.get(part.key, ())]
        means = [
            state.means[part.bucket.name]
            for part in parts
            if mean and part.bucket.name in state.means
        ]
        arguments = (
            divisor,
            rate_tensor,
            self._rank_tensor(),
            *params,
            *own,
            *states,
            *means,
            *scaling,
        )
        with torch.no_grad():
            if self.before_update is not None:
                self.before_update(self._update_step(name, lacking), arguments)
            if lacking:
                norm = self._create_state(
                    self._update_step(name, lacking), arguments, params, scaling
                )
            else:
                self._on_call(self.built.update_names[name])
                (norm,) = self.built.update[name](*arguments)
            for part in parts:
                stored = state.params[part.bucket.name]
                gathered = self._gather_stored(part.bucket, self._updated_slice(part.bucket))
                if self.built.is_recorded and gathered is not stored:
                    stored.copy_(gathered)  # where CUDA graphs read it
                else:
                    state.params[part.bucket.name] = gathered
        return norm

    def _update_step(self, name: str, lacking: Lacking) -> UpdateStep:
        return UpdateStep(self._plan, self._updates, self._recipe, name, lacking, self._index)

    def _create_state(
        self,
        step: UpdateStep,
        arguments: Sequence[Tensor],
        params: Sequence[Tensor],
        scaling: list[Tensor],
    ) -> Tensor:
        """Run an update that creates optimizer state or means, one bucket at a time, and return the
        gradient's norm.

        Nothing but the loss scale is stored if the gradient is not usable.
        """
        results = step.in_turn(*arguments)
        norm, *scales = next(results)
        scaling[:] = scales
        if not usable_norm(norm, self._recipe, step.name):
            return norm
        for part, param, (new, *created) in zip(step.parts, params, results, strict=True):
            param.copy_(new)
            values = [value.clone() for value in created]
            count = len(part.state)
            self.held.states[part.key] = values[:count]
            if step.keeps_mean:
                (self.held.means[part.bucket.name],) = values[count:]
        return norm

    def _gather_stored(self, bucket: Bucket, updated: Tensor) -> Tensor:
        """Return the part of a bucket that this rank stores, gathered from the slices that the
        ranks have updated.
        """
        if updated.numel() == stored_length(self._plan, bucket):
            return updated
        full = torch.ops._c10d_functional.all_gather_into_tensor(
            updated, self._plan.shard_degree, self._plan.shard_group
        )
        result: Tensor = torch.ops._c10d_functional.wait_tensor(full)
        return result

    def _rank_tensor(self) -> Tensor:
        return scalar_on(self._device, self._plan.shard_index(self._rank), torch.int64)

    def _updated_slice(self, bucket: Bucket) -> Tensor:
        """Return the part of a bucket that this rank updates, as a view of its stored part."""
        stored = self.held.params[bucket.name]
        if update_length(self._plan, bucket) == stored_length(self._plan, bucket):
            return stored
        start, stop = share(
            bucket.length, self._plan.shard_index(self._rank), self._plan.shard_degree
        )
        return stored[start:stop]


def _add_predictions(
    fed: dict[str, list[Tensor]],
    name: str,
    graph: BuiltGraph,
    outputs: Sequence[Mapping[Role, Sequence[Tensor]]],
) -> None:
    """Add a graph's predictions to `fed`, which other graphs read: "graph.output" -> one tensor for
    each microbatch.
    """
    ports = [port for port in graph.outputs if port.role is Role.PREDICTION]
    for place, port in enumerate(ports):
        fed[f"{name}.{port.name}"] = [by_role[Role.PREDICTION][place] for by_role in outputs]
