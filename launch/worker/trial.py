"""Trial steps of a run by its first rank alone, which a dry run executes on one node.

Everything is as in the run (the node's cache, compiled graphs, weights, rows), except that the
other ranks do not exist: collectives return what they would if all had this rank's data. So the
times are those of a rank that never waits, and the loss is meaningless.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from trainload.autograd_trace.derivation.named_groups import alone_of, bind_groups
from trainload.core.errors import PlanError
from trainload.launching.data.prefetch import BatchStream, RankRows
from trainload.launching.data.run_data import run_dispatcher
from trainload.launching.node.build_key import device_of
from trainload.launching.node.determinism import deterministic
from trainload.launching.node.graph_comparison import Comparison
from trainload.launching.run.opening import trained_package
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.verification.verify_build import Verifier
from trainload.launching.worker.engine import Engine
from trainload.launching.worker.preparation import built_for, open_data, set_threads
from trainload.launching.worker.step_batches import draw_of, next_calls
from trainload.sharding.planner.check_plan import check_plan

_TRIAL_STEPS = 3
"""Steps without CUDA graphs. With them there is one more, since the third one records."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Durations of the parts of a trial on rank 0, in seconds.

    Attributes:
        package: opening the package, including the check of every file that is read.
        data: converting the data into the node's cache, or opening it from there.
        compile: compiling the graphs, or loading them from the node's cache.
        weights: reading this rank's weights.
        first_step: the first step, whose update creates the optimizer state.
        step: the fastest later step.
        compare: comparing compiled graphs with interpreted ones, which is part of the first steps.
        compiled: True if the graphs are compiled.
        interpreted: for each graph that runs interpreted nevertheless, the reason.
    """

    package: float
    data: float
    compile: float
    weights: float
    first_step: float
    step: float
    compare: float
    compiled: bool
    interpreted: tuple[str, ...]


def try_out(spec: RunSpec, local_world: int) -> Trial:
    """Run trial steps of a run in this process, which must have no process group.

    Args:
        spec: the run. Nothing is written into its folder.
        local_world: number of ranks that will share this node's cores.

    Raises:
        PlanError: the plan has a pipeline, whose ranks cannot run alone, since they wait for each
            other's messages.
        TrainloadError: an error of the package, the plan or the data.
    """
    plan = spec.plan
    if plan.pipeline is not None:
        raise PlanError(
            "a single rank of a pipeline cannot run a trial step without the others",
            where="plan.pipeline",
        )
    set_threads(local_world)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began

    alone = alone_of(0, plan.world_size) if plan.world_size > 1 else nullcontext()
    with deterministic(spec.deterministic), alone:
        with timed("package"):
            package = trained_package(spec)
            check_plan(plan, package)
        with timed("data"):
            data, _ = open_data(spec, package)
        with timed("compile"):
            built, folder = built_for(spec, package, 0)
            comparisons: list[Comparison] = []
            verifier: Verifier | None = None
            if folder is not None:
                verifier = Verifier(
                    package,
                    plan,
                    0,
                    device_of(plan),
                    folder,
                    None,
                    required=spec.require_compiled,
                    tell=comparisons.append,
                )
                built = verifier.verified(built)
        if spec.cuda_graphs:
            built = built.recorded()
        if plan.world_size > 1:
            bind_groups(plan.groups())
        with timed("weights"):
            engine = Engine(package, plan, 0, device_of(plan), built)
            engine.held.load_package()
        dispatcher = run_dispatcher(package)
        rows = RankRows(package.recipe, data.order(package.recipe.seed), plan, 0)
        steps = []
        count = _TRIAL_STEPS + spec.cuda_graphs
        with BatchStream(data, rows, 0, count, ahead=2 * plan.accumulate) as stream:
            for step in range(count):
                began = time.perf_counter()
                calls = next_calls(stream, package.recipe, step, plan.accumulate)
                draws = [draw_of(of_one, data, dispatcher) for of_one in calls]
                engine.step(step, draws)
                steps.append(time.perf_counter() - began)
    compare = 0.0 if verifier is None else verifier.taken()
    interpreted = tuple(map(str, comparisons))
    return Trial(
        **seconds,
        first_step=steps[0],
        step=min(steps[1:]),
        compare=compare,
        compiled=built.compiled,
        interpreted=interpreted,
    )
