"""A job's optimizers, the graphs whose gradients each of them follows, and the loop that runs
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from trainload.autograd_trace.graphs import TurnRecipe
from trainload.autograd_trace.optimizer.lr_schedule import Schedule
from trainload.autograd_trace.optimizer.rounds import turns_before
from trainload.capture.job.definition import Graph, Job, OptimizerFactory, Turn
from trainload.capture.program import MAIN, Mode, Program
from trainload.capture.source.source_place import place_of_error
from trainload.capture.tracing.targets import graphs_of
from trainload.core.arguments import out_of_range
from trainload.core.errors import JobError, RequestError, raised
from trainload.core.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class Trainer:
    """Optimizers that step together, after one gradient.

    Attributes:
        optimizers: each over some of the model's parameters.
        where: their place in the job, for errors.
        prefix: prefix of their groups' names.
        schedule: schedule of their learning rates.
        updates: number of their updates in a run of `Job.steps`.
        clock: the job's graphs whose gradients they follow; () for the main graph only.
        gradients: training graph, of each variant -> the parameters that get a gradient from it, by
            their owners' names.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    where: str
    prefix: str
    schedule: Schedule | None
    updates: int
    clock: tuple[str, ...]
    gradients: dict[str, frozenset[str]]

    def reached(self) -> frozenset[str]:
        """Return the parameters that get a gradient from at least one of the graphs."""
        return frozenset[str]().union(*self.gradients.values())

    def parts(
        self, group: str, names: Sequence[str]
    ) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Yield the parts of a group whose parameters get gradients from the same graphs: (name,
        parameters, training graphs).

        An optimizer skips parameters without a gradient, so the updates of other graphs must not
        touch them.
        """
        members_by_graphs: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            members_by_graphs.setdefault(
                tuple(g for g, reached in self.gradients.items() if name in reached), []
            ).append(name)
        for number, (graphs, members) in enumerate(members_by_graphs.items()):
            yield (group if number == 0 else f"{group}-{number}"), tuple(members), graphs


def make_loop(job: Job) -> tuple[TurnRecipe, ...]:
    """Return the job's loop; () if it has one graph.

    Raises:
        JobError: the loop is inconsistent.
    """
    graphs = graphs_of(job)
    if not job.graphs:
        return ()
    turns: list[TurnRecipe] = []
    for number, entry in enumerate(job.loop if job.loop is not None else graphs):
        where = f"Job.loop[{number}]"
        turn = Turn(entry) if isinstance(entry, str) else entry
        if turn.graph not in graphs:
            raise JobError(
                "the turn does not name one of the graphs",
                where=where,
                expected=f"a Turn, or one of {sorted(graphs)}",
                got=repr(entry),
                hint=did_you_mean(str(turn.graph), graphs),
            )
        try:
            turns.append(
                TurnRecipe(
                    graph=turn.graph,
                    times=turn.times,
                    every=turn.every,
                    start=turn.start,
                    fresh=turn.fresh,
                )
            )
        except ValidationError as error:
            raise out_of_range(error, JobError, where) from error
        _check_turn(job, turns, where)
    idle = sorted(set(graphs) - {turn.graph for turn in turns})
    if idle:
        raise JobError(
            "a graph never runs",
            where="Job.loop",
            expected="a turn of every graph of the job",
            got=f"no turn of {', '.join(idle)}",
        )
    main = main_of(job)
    if not any(turn.graph == main and turn.every == 1 and turn.start == 0 for turn in turns):
        raise JobError(
            "the first graph that trains must run in every round, because its loss is the run's",
            where="Job.loop",
            expected=f"a turn of {main!r} in every round",
            hint=(
                "Put another graph first in Job.graphs, or let the other graphs run several times"
                " per round (Turn.times)."
            ),
        )
    return tuple(turns)


def _check_turn(job: Job, turns: Sequence[TurnRecipe], where: str) -> None:
    """Check that the graphs that feed the last turn's graph run before it, on the same batch,
    whenever it runs.
    """
    turn = turns[-1]
    for entry, source in job.graphs[turn.graph].feeds.items():
        other = source.partition(".")[0]
        before = [t for t in turns[:-1] if t.graph == other and not t.fresh]
        always = any(
            turn.every % t.every == 0
            and t.start <= turn.start
            and (turn.start - t.start) % t.every == 0
            for t in before
        )
        if turn.fresh or not always:
            raise JobError(
                f"it is fed by {source!r}, which is not always available when it runs",
                where=f"{where}: {entry}",
                expected=(
                    f"a turn of {other!r} before it, in each of its rounds, and both on the round's"
                    " own batch (not fresh)"
                ),
                got=", ".join(t.graph for t in turns),
            )
    if job.graphs[turn.graph].compute is not None and (turn.times > 1 or turn.fresh):
        raise JobError(
            "the graph trains nothing, so it can only run once per round, on the round's batch",
            where=where,
            expected="times=1, fresh=False",
        )


def main_of(job: Job) -> str:
    """Return the graph whose loss is the run's: the first that trains."""
    return next((name for name, graph in job.graphs.items() if graph.loss is not None), MAIN)


Optimizers = Mapping[str, tuple[torch.optim.Optimizer, ...]]
"""A job's optimizers by the graph that owns them; optimizers that several graphs share, by the
first of these graphs.
"""


def make_optimizers(job: Job) -> Optimizers:
    """Call the job's optimizer factories, each once.

    A factory may change the model (freeze layers, set modes, wrap parameters), so it is called
    before the model is captured.

    Raises:
        JobError: the job's graphs are inconsistent, or a factory does not return optimizers.
    """
    graphs, shared = _training_graphs(job)
    optimizers = {}
    for name, graph in graphs.items():
        if name in shared[1:]:
            continue
        factory = graph.optimizer or job.optimizer
        assert factory is not None, "a graph without an optimizer was rejected"
        optimizers[name] = _call_factory(job, factory, _place(name, graph))
    return optimizers


def trainers_of(
    job: Job, program: Program, loop: Sequence[TurnRecipe], optimizers: Optimizers
) -> tuple[Trainer, ...]:
    """Return the job's optimizers with the graphs that they follow."""
    everything = frozenset(p.name for p in program.parameters if p.trainable and p.alias_of is None)
    graphs, shared = _training_graphs(job)
    trainers: list[Trainer] = []
    for name, graph_optimizers in optimizers.items():
        graph = graphs[name]
        own = graph.optimizer is not None
        followed = [name] if own else shared
        clock = tuple(followed) if loop else ()
        captured = [
            g for g in program.graphs.values() if g.mode is Mode.TRAIN and g.graph in followed
        ]
        trainers.append(
            Trainer(
                optimizers=graph_optimizers,
                where=_place(name, graph),
                prefix=f"{name}-" if own else "",
                schedule=graph.schedule or job.schedule,
                updates=(
                    sum(turns_before(loop, g, job.steps) for g in followed) if loop else job.steps
                ),
                clock=clock,
                gradients={
                    g.name: everything if g.reached is None else frozenset(g.reached)
                    for g in captured
                },
            )
        )
    return tuple(trainers)


def _training_graphs(job: Job) -> tuple[dict[str, Graph], list[str]]:
    """Return the job's graphs that train, and the names of those that share `Job.optimizer`."""
    graphs = {name: graph for name, graph in graphs_of(job).items() if graph.compute is None}
    return graphs, [name for name, graph in graphs.items() if graph.optimizer is None]


def _place(name: str, graph: Graph) -> str:
    """Return the place in the job of a graph's optimizer, for errors."""
    return "Job.optimizer" if graph.optimizer is None else f"Job.graphs[{name!r}].optimizer"


def _hint(model: torch.nn.Module) -> str:
    if any(parameter.requires_grad for parameter in model.parameters()):
        return ""
    return "No parameter of Job.model requires a gradient."


def _call_factory(
    job: Job, factory: OptimizerFactory, where: str
) -> tuple[torch.optim.Optimizer, ...]:
    try:
        result = factory(job.model)
    except RequestError:
        raise
    except Exception as error:  # the user's own code may raise anything
        place = place_of_error(error)
        raise JobError(
            f"{where} fails: {raised(error)}",
            where="" if place is None else str(place),
            hint=_hint(job.model),
        ) from error
    optimizers = tuple(result) if isinstance(result, Sequence) else (result,)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(
                "does not return an optimizer",
                where=where,
                expected="a torch.optim.Optimizer, or several",
                got=type(optimizer).__name__,
            )
        _check_own_methods(optimizer, where)
    return optimizers


def _check_own_methods(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Check that an optimizer has the methods of its class, because an update is captured from a
    copy of it.

    Raises:
        JobError: a method was replaced on the instance, by a learning rate scheduler or otherwise.
    """
    for name, value in vars(optimizer).items():
        if not callable(getattr(type(optimizer), name, None)):
            continue
        if name == "step" and getattr(value, "_wrapped_by_lr_sched", False):
            raise JobError(
                "creates a learning rate scheduler, which would never be stepped",
                where=where,
                expected="only an optimizer",
                hint=(
                    "Pass it as Job.schedule: schedule=lambda optimizer:"
                    " torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)."
                ),
            )
        raise JobError(
            f"returns an optimizer whose method {name} was replaced",
            where=f"{where}: {type(optimizer).__name__}.{name}",
            expected="the method of its class",
            hint="Define it as a method of a subclass: class Mine(torch.optim.SGD).",
        )
