"""Compute the steps of a run again, in one process and interpreted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from trainload.core.errors import RequestError
from trainload.core.storage.places import Where
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.data.prefetch import BatchStream, RankRows
from trainload.launching.data.run_data import RunData, open_run_data, run_dispatcher
from trainload.launching.node.build_key import device_of
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.determinism import deterministic
from trainload.launching.run.journal import Event, stream_events
from trainload.launching.run.opening import trained_package
from trainload.launching.run.run_spec import RunSpec, read_spec
from trainload.launching.run.working_copy import viewed
from trainload.launching.worker.divergence import Search
from trainload.launching.worker.engine import Draw, Engine
from trainload.launching.worker.explaining import Failing, explaining
from trainload.launching.worker.restoring import load_beginning, load_checkpoint
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
            load_checkpoint(Checkpoint.open(published[start]), self.plan, 0, held)
        else:
            load_beginning(spec, self.package, self.plan, 0, held)
        return start

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

    def explaining(self, step: int) -> AbstractContextManager[None]:
        """Return a context in which an error of an operator names its line and row."""
        search = self.search
        failing = Failing(self.package, self.plan, 0, self.engine, search.device)
        return explaining(failing, self._data, search.source, f"step {step + 1}")


@contextmanager
def replaying(
    source: Where | Package, data: str | Path | None, step: int | None
) -> Iterator[tuple[Replay, int, int]]:
    """Yield a process that can compute a step, the number of steps that its state has, and the
    number of the step, from 0.

    A package begins with the step itself, whose number only selects the batch.

    Args:
        source: folder or URL of a run, or a package.
        data: rows, for a package.
        step: number of the step, from 1. Default: the step at which the run failed, or its last
            one; the first step for a package.

    Raises:
        RequestError: the step does not exist, a package has no data, or a run has its own.
    """
    if isinstance(source, Package):
        if data is None:
            raise RequestError("a package needs data", where="data", hint="Pass --data.")
        if step is not None and step < 1:
            raise RequestError(
                "there is no such step", where="step", expected="1 or more", got=str(step)
            )
        number = (step or 1) - 1
        with deterministic(True):
            yield Replay.of_package(source, data), number, number
        return
    if data is not None:
        raise RequestError("a run has its own data", where="data", hint="Omit --data.")
    with viewed(source) as files:
        spec = read_spec(files.folder)
        wanted = _failed_step(stream_events(files.folder)) if step is None else step
        check_step(wanted, spec.steps, "the run has no such step")
        with deterministic(spec.deterministic):
            replay = Replay.of_run(spec)
            yield replay, replay.load_before(spec, wanted - 1), wanted - 1


def _failed_step(events: Iterable[Event]) -> int:
    """Return the number, from 1, of the step at which a run failed, or of its last step."""
    last, before = 0, ""
    for event in events:
        if event.kind in ("step", "finding"):
            last = event.data["step"] + 1
        failed = event.kind == "failed" and event.data.get("error") == "DivergedError"
        if failed and before != "finding":
            last += 1
        before = event.kind
    return max(1, last)


def check_step(step: int, last: int, problem: str) -> None:
    """Raise RequestError with this problem unless a step, counted from 1, is at most the last."""
    if not 1 <= step <= last:
        raise RequestError(problem, where="step", expected=f"1 to {last}", got=str(step))


def _open_data(source: str | Path, package: Package, plan: Plan) -> RunData:
    return open_run_data(source, package, plan.rows_per_call, default_cache_dir() / "data")
