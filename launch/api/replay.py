"""Compute the steps of a run again, in one process and interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainload.core.errors import RequestError
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.load import load_sharded
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.data.prefetch import BatchStream, RankRows
from trainload.launching.data.run_data import RunData, open_run_data, run_dispatcher
from trainload.launching.node.build_key import device_of
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.run.opening import trained_package
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.worker.divergence import Search
from trainload.launching.worker.engine import Draw, Engine, NotFiniteError
from trainload.launching.worker.explaining import Failing, explain
from trainload.launching.worker.loop import SCALING
from trainload.launching.worker.step_batches import draw_of, next_calls
from trainload.packaging.package import Package
from trainload.sharding.planner.make_plan import plan as make_plan
from trainload.sharding.plans.plan import Cluster, Plan


class Replay:
    """One process with the state of a run, or of a package before its first step.

    Law: its steps have the data, the microbatches and the random numbers of the run's, and its
    results, up to rounding.

    Args:
        package: package that is trained.
        plan: plan for one process.
        data: opened data.
        source: path or URL of the data.

    Attributes:
        search: the search for bad values in its graphs.
        built: its graphs, interpreted, with their source lines.
        engine: the engine.
    """

    def __init__(self, package: Package, plan: Plan, data: RunData, source: str) -> None:
        self.package, self.plan, self._data = package, plan, data
        device = device_of(plan)
        self.search = Search(package, plan, 0, device, data, source, None)
        self.built = self.search.build()
        self.engine = Engine(package, plan, 0, device, self.built)

    @classmethod
    def of_package(cls, package: Package, source: str | Path) -> Replay:
        """Return a process with a package's weights, for rows of a data source."""
        plan = make_plan(package, Cluster(), "single")
        replay = cls(package, plan, _open_data(source, package, plan), str(source))
        replay.engine.held.load_package()
        return replay

    @classmethod
    def of_run(cls, spec: RunSpec) -> Replay:
        """Return a process without state (`load_before`), for a run."""
        package = trained_package(spec)
        wanted = spec.plan.cluster.device
        device = wanted if wanted != "cuda" or torch.cuda.is_available() else "cpu"
        plan = make_plan(
            package,
            Cluster(device=device),
            "single",
            global_batch=spec.plan.global_batch,
            accumulate=spec.plan.global_batch // spec.plan.rows_per_call,
        )
        return cls(package, plan, _open_data(spec.data, package, plan), spec.data)

    def load_before(self, spec: RunSpec, step: int) -> int:
        """Load the state of a run from its newest checkpoint with at most `step` steps, or else
        that from which it began; return its number of steps.

        Raises:
            RequestError: the run's settings were changed after that checkpoint.
        """
        published = place_of(spec.place, spec.checkpoints).published()
        start = max((number for number in published if number <= step), default=0)
        changed = spec.changes[-1].step if spec.changes else 0
        if start < changed:
            raise RequestError(
                "the run's settings were changed after the checkpoint before this step",
                where="step",
                expected=f"a step after a checkpoint with {changed} steps or more",
                got=str(step + 1),
                hint="Name a later step.",
            )
        held = self.engine.held
        if start in published:
            checkpoint = Checkpoint.open(published[start])
            state = load_sharded(checkpoint, self.plan, 0)
            held.load(state, checkpoint.index.user.get(SCALING))
            return start
        held.load_package()
        if spec.optimizer_from is not None:
            before = Checkpoint.open(spec.optimizer_from)
            state = load_sharded(before, self.plan, 0, state_alone=True)
            held.load_optimizer(state, before.index.user.get(SCALING))
        return 0

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, list[Draw]]]:
        """Yield (number, batches) of each step from `start`, counted from 0, before `stop`."""
        recipe = self.package.recipe
        rows = RankRows(recipe, self._data.order(recipe.seed), self.plan, 0)
        dispatcher = run_dispatcher(self.package)
        accumulate = self.plan.accumulate
        with BatchStream(self._data, rows, start, stop, ahead=2 * accumulate) as stream:
            for number in range(start, stop):
                calls = next_calls(stream, recipe, number, accumulate)
                yield number, [draw_of(each, self._data, dispatcher) for each in calls]

    @contextmanager
    def explaining(self, step: int) -> Iterator[None]:
        """Replace an error of an operator within the context by one that names its line and row."""
        try:
            yield
        except NotFiniteError:
            raise
        except Exception as error:
            search = self.search
            failing = Failing(self.package, self.plan, 0, self.engine, search.device)
            explained = explain(error, failing, self._data, search.source, f"step {step + 1}")
            if explained is None or explained is error:
                raise
            raise explained from error


def _open_data(source: str | Path, package: Package, plan: Plan) -> RunData:
    return open_run_data(source, package, plan.rows_per_call, default_cache_dir() / "data")
