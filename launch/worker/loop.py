"""The training loop of a worker, the same for every backend."""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainload.autograd_trace.derivation.named_groups import begun_collectives, bind_groups
from trainload.autograd_trace.derivation.wait_time import WaitTime
from trainload.autograd_trace.optimizer.rounds import draws_before
from trainload.core.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    RunInterrupted,
)
from trainload.core.host_memory import return_large_blocks
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.index import DataPosition
from trainload.launching.checkpoints.reader import Checkpoint, usable_checkpoint
from trainload.launching.checkpoints.writer import EVALUATION, CheckpointWriter
from trainload.launching.data.prefetch import BatchStream, RankRows
from trainload.launching.data.run_data import RunData, run_dispatcher
from trainload.launching.debugging.replicas import warning_of
from trainload.launching.node.build import can_compile
from trainload.launching.node.build_key import device_of
from trainload.launching.node.built_graphs import Built
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.determinism import deterministic
from trainload.launching.node.graph_comparison import Comparison
from trainload.launching.node.process_groups import gathered, group_of_stage
from trainload.launching.node.utilisation import (
    StepClock,
    Utilisation,
    dtypes_of,
    peaks_of,
    tokens_per_row,
    used_bytes,
)
from trainload.launching.profiling.profiling_steps import Profiling
from trainload.launching.run.activity import Activity, Phase
from trainload.launching.run.contact import Contact, Request
from trainload.launching.run.run_directory import resume_command
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.run.straggler import peers_of
from trainload.launching.verification.verify_build import Verifier
from trainload.launching.worker.agreement import check_same_collectives, check_same_data
from trainload.launching.worker.divergence import Search, explain_divergence
from trainload.launching.worker.engine import Draw, Engine, NotFiniteError, StepResult
from trainload.launching.worker.evaluation import Evaluation
from trainload.launching.worker.explaining import Failing, explain_without_rows, explaining
from trainload.launching.worker.preparation import Keeper, Opened, set_threads
from trainload.launching.worker.restoring import SCALING, load_beginning, load_checkpoint
from trainload.launching.worker.saving import Saver
from trainload.launching.worker.step_batches import draw_of, next_calls
from trainload.launching.worker.step_statistics import StepStatistics
from trainload.sharding.plans.coupled_rows import note_on_coupled_rows

GRAPHS = "graphs"
"""Key in the `user` entries of a checkpoint of a mapping: build -> for each graph, True if it runs
interpreted.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a worker: its rank among `world` workers, of which `local_world` share its node
    `node`.

    A worker sees at most one GPU, since a compiled graph names its GPU.
    """

    rank: int
    world: int
    local_world: int
    node: str = field(default_factory=socket.gethostname)


def run_worker(spec: RunSpec, place: Place, contact: Contact, keeper: Keeper | None = None) -> None:
    """Train as one worker of a run. With more than one worker the default process group must exist.

    Args:
        spec: the run.
        place: position of this worker.
        contact: connection to the driver.
        keeper: what this process has kept open since an earlier attempt.

    Raises:
        RunInterrupted: a stop was requested, and a checkpoint was written.
        DivergedError: a loss, or the norm of a gradient whose loss is not scaled, is not finite.
        TrainloadError: an error of the package, the plan, the data or the checkpoints.
    """
    return_large_blocks()
    with deterministic(spec.deterministic):
        _Worker(spec, place, contact, (keeper or Keeper()).opened(spec, place.rank)).run()


class _Worker:
    def __init__(self, spec: RunSpec, place: Place, contact: Contact, opened: Opened) -> None:
        self._spec = spec
        self._opened = opened
        self._plan = spec.plan
        self._place = place
        self._contact = contact
        self._device = device_of(spec.plan)
        self._activity = Activity(partial(used_bytes, self._device))
        contact.report(self._activity)
        self._waits = WaitTime()
        self._has_peers = bool(peers_of(spec.plan))
        self._run_dir = spec.run_dir
        self._checkpoints = place_of(spec.run_dir, spec.checkpoints)
        self._control = dist.new_group(backend="gloo") if place.world > 1 else None
        self._attempt, path = self._begin()
        set_threads(place.local_world)
        if place.world > 1:
            bind_groups(self._plan.groups())
        self._package = opened.package
        self._data, self._eval_data = opened.data
        if self._control is not None:
            for name, data in ((spec.data, self._data), (spec.eval_data, self._eval_data)):
                if data is not None:
                    check_same_data(data.fingerprint, place.node, str(name), self._control)
        self._dispatcher = run_dispatcher(self._package)
        built, folder = self._build()
        if self._control is not None:
            check_same_collectives(built.collectives, self._plan, self._control)
        if place.world > 1:
            self._activity.know(built.collectives, begun_collectives(self._plan.groups()))
        checkpoint = None if path is None else Checkpoint.open(path)
        built = self._verified(built, folder, checkpoint)
        if spec.cuda_graphs:
            built = built.recorded()
        self._engine = Engine(
            self._package,
            self._plan,
            place.rank,
            self._device,
            built,
            on_call=self._activity.calling,
        )
        peaks = peaks_of(self._device, dtypes_of(built.work), default_cache_dir())
        self._utilisation = Utilisation(built.work, self._package.recipe, self._plan, peaks)
        self._search = Search(
            self._package,
            self._plan,
            place.rank,
            self._device,
            self._data,
            spec.data,
            self._control,
        )
        self._profiling = Profiling(
            self._package,
            self._plan,
            place.rank,
            self._device,
            self._engine,
            contact,
            self._control,
            self._activity,
            spec.run_dir,
            spec.steps,
            self._search.build,
        )
        self._memory = 0
        self._start = 0
        self._statistics = None if spec.statistics is None else self._prepared_statistics()
        with self._explaining(self._data, spec.data, "loading the weights"):
            self._load(checkpoint)
        writer = CheckpointWriter(
            self._checkpoints,
            self._plan,
            place.rank,
            self._attempt,
            keep=spec.retention,
            # so the journal has every step that a restart from it does not repeat
            before_publishing=contact.flush,
            aborted=contact.aborted,
            writing_state=partial(self._activity.at, Phase.SAVING),
        )
        self._saver = Saver(
            writer, contact, self._control, leading=place.rank == 0, patience=spec.storage_patience
        )
        self._evaluation = None
        self._evaluated: tuple[int, float] | None = None
        if self._eval_data is not None:
            self._evaluation = Evaluation(
                self._engine,
                self._package,
                self._plan,
                place.rank,
                self._eval_data,
                str(spec.eval_data),
                batches=spec.eval_batches,
                mean=spec.weights == "mean",
            )

    # Start

    def _begin(self) -> tuple[str, str | None]:
        """Return a unique name for this attempt, and the path of the checkpoint to resume from, if
        any.
        """
        usable = usable_checkpoint(
            self._checkpoints, patience=self._spec.storage_patience, control=self._control
        )
        if self._place.rank == 0:
            for reason in usable.rejected:
                self._contact.write("warning", message=f"a checkpoint cannot be used: {reason}")
        if usable.path is None and (usable.rejected or self._spec.had_checkpoint):
            raise CheckpointError(
                "none of the run's checkpoints can be used",
                where=self._checkpoints.where,
                got="; ".join(usable.rejected) or "no checkpoints",
                hint=(
                    "Restore one of them, or launch a new run. This run does not start over from"
                    " step 0 automatically."
                ),
            )
        return gathered(uuid.uuid4().hex, self._control)[0], (
            None if usable.path is None else str(usable.path)
        )

    def _build(self) -> tuple[Built, Path | None]:
        if self._spec.compile and not can_compile() and self._place.rank == 0:
            self._contact.write(
                "warning",
                message="no C++ compiler was found: the graphs run uncompiled, which is slower",
            )
        try:
            return self._opened.built(self._contact.write)
        except Exception as error:
            explained = explain_without_rows(error, "building the graphs")
            if explained is None or explained is error:
                raise
            raise explained from error

    def _verified(self, built: Built, folder: Path | None, checkpoint: Checkpoint | None) -> Built:
        """Return the build with graphs that are compared at their first call.

        Args:
            built: the build.
            folder: folder of the compiled build; None if it runs interpreted, and nothing is
                compared.
            checkpoint: checkpoint to resume from, which has earlier decisions.
        """
        self._verifier: Verifier | None = None
        if folder is None:
            return built
        self._build_name = "+".join(sorted(set(gathered(folder.name, self._control))))
        decisions: dict[str, Any] = (
            {} if checkpoint is None else checkpoint.index.user.get(GRAPHS, {})
        )
        # The stages of a pipeline call different graphs at different times, so only the ranks that
        # call a graph decide about it. Waiting for all ranks would deadlock: the next stage waits
        # for this one.
        alike = group_of_stage(self._plan, self._place.rank, self._control)
        self._speaks = alike is None or dist.get_rank(alike) == 0
        self._verifier = Verifier(
            self._package,
            self._plan,
            self._place.rank,
            self._device,
            folder,
            alike,
            required=self._spec.require_compiled,
            decided=decisions.get(self._build_name),
            tell=self._tell_interpreted,
            comparing=partial(self._activity.within, Phase.COMPARING),
        )
        return self._verifier.verified(built)

    def _tell_interpreted(self, comparison: Comparison) -> None:
        if self._speaks:
            self._contact.write(
                "warning",
                message=f"{comparison}; it runs interpreted, which is slower",
                **asdict(comparison),
            )

    def _load(self, checkpoint: Checkpoint | None) -> None:
        held = self._engine.held
        if checkpoint is None:
            load_beginning(self._spec, self._package, self._plan, self._place.rank, held)
            if (given := self._package.given) is not None:
                self._contact.write("weights", rank=self._place.rank, **given.taken)
            return
        if checkpoint.index.data.fingerprint != self._data.fingerprint:
            raise DataError(
                "the data differs from the data that the run started with",
                where=self._spec.data,
                expected=checkpoint.index.data.fingerprint,
                got=self._data.fingerprint,
                hint="Restore the data, or launch a new run from the trained package.",
            )
        load_checkpoint(checkpoint, self._plan, self._place.rank, held)
        self._start = checkpoint.index.step

    # The loop

    def run(self) -> None:
        """Train until the last step, or until a stop is requested."""
        try:
            self._run()
        except BaseException:
            self._contact.lingers = not self._saver.abort()
            raise

    def _run(self) -> None:
        spec, leading = self._spec, self._place.rank == 0
        workers = gathered(f"{socket.gethostname()}:{os.getpid()}", self._control)
        nodes = gathered(self._place.node, self._control)
        if leading:
            self._contact.write(
                "start",
                step=self._start,
                steps=spec.steps,
                world=self._place.world,
                strategy=self._plan.strategy,
                compiled=self._engine.compiled,
                workers=workers,
                nodes=nodes,
                **(
                    {"overrides": changed}
                    if (changed := spec.overrides.model_dump(mode="json", exclude_defaults=True))
                    else {}
                ),
            )
            if note := note_on_coupled_rows(self._package.manifest, self._plan):
                self._contact.write("warning", message=note)
        if self._start == 0:
            self._evaluate(0)
        recipe = self._package.recipe
        rows = RankRows(recipe, self._data.order(recipe.seed), self._plan, self._place.rank)
        step = self._start
        profiling = self._profiling
        with (
            BatchStream(
                self._data, rows, self._start, spec.steps, ahead=2 * self._plan.accumulate
            ) as stream,
            profiling,
        ):
            clock = StepClock(tokens_per_row(self._package))
            while step < spec.steps:
                with profiling.step(step):
                    self._step(step, profiling.seen(stream), clock)
                step += 1
                request = self._asked()
                if request is Request.STOP:
                    break
                if (
                    spec.eval_every is not None
                    and step % spec.eval_every == 0
                    and step < spec.steps
                ):
                    with profiling.span("evaluation"):
                        self._evaluate(step)
                    clock.skip()
                due = spec.checkpoint_every is not None and step % spec.checkpoint_every == 0
                if (due or request is Request.CHECKPOINT) and step < spec.steps:
                    with profiling.span("checkpoint"):
                        self._checkpoint(step)
                if profiling.advance(step):
                    clock.skip()
        if step == spec.steps > 0:
            self._evaluate(step)
        self._activity.at(Phase.ENDING)
        # otherwise the checkpoint of this step exists, perhaps as the only one, and is not replaced
        if step > self._start:
            self._saver.finish(lambda: self._checkpoint(step))
        if step == spec.steps:
            if leading:
                self._contact.write("end", step=step, steps=spec.steps)
            return
        if leading:
            self._contact.met(Request.STOP)
        raise RunInterrupted(
            "the run was asked to stop",
            where=f"step {step} of {spec.steps}",
            hint=f"Continue with: {resume_command(self._run_dir)}",
        )

    def _step(self, step: int, stream: Iterator[Any], clock: StepClock) -> None:
        self._activity.at(Phase.DATA, step)
        began = time.perf_counter()
        self._waits.taken()
        calls = next_calls(stream, self._package.recipe, step, self._plan.accumulate)
        waited = time.perf_counter() - began
        self._activity.at(Phase.STEP)
        draws = [draw_of(of_one, self._data, self._dispatcher) for of_one in calls]
        every = self._spec.statistics
        statistics = None if every is None or (step + 1) % every else self._statistics
        try:
            with (
                self._explaining(self._data, self._spec.data, f"step {step + 1}"),
                self._waits.measured() if self._has_peers else nullcontext(),
                nullcontext() if statistics is None else statistics.collecting(self._engine),
            ):
                result = self._engine.step(step, draws)
        except NotFiniteError as error:
            raise self._explain_divergence(step, error, draws) from error
        seconds = time.perf_counter() - began - self._waits.taken()
        compared = self._compared()
        clock.leave_out(compared)
        if not compared and not self._profiling.records:  # tracing takes time of its own
            self._activity.worked(seconds)
        sampled = [] if statistics is None else statistics.collected()
        if self._place.rank == 0:
            rates = clock.tick(self._spec.steps - step - 1, len(draws) * self._plan.global_batch)
            self._report_skipped(step, result)
            if not result.weight:
                return
            self._contact.write(
                "step",
                step=step,
                steps=self._spec.steps,
                loss=result.loss,
                metrics=_metrics(result),
                gradient_norm=result.gradient_norm,
                data_wait=waited,
                mfu=self._utilisation.of(step, [draw.variant for draw in draws], rates["seconds"]),
                memory=max(self._memory, used_bytes(self._device)),
                **({} if result.loss_scale is None else {"loss_scale": result.loss_scale}),
                **(
                    {"variants": [draw.variant for draw in draws]}
                    if self._package.manifest.variants
                    else {}
                ),
                **rates,
            )
            if statistics is not None and statistics.unequal:
                self._contact.write("warning", **warning_of(statistics.unequal, step))
            for graph, each in sampled:
                names = {"graph": graph} if len(self._package.recipe.graphs) > 1 else {}
                self._contact.write("statistics", step=step + 1, **names, **each.as_record())

    def _prepared_statistics(self) -> StepStatistics:
        began = time.perf_counter()
        statistics = StepStatistics(
            self._search, self._search.build(), on_call=self._activity.calling
        )
        if self._place.rank == 0:
            seconds = time.perf_counter() - began
            self._contact.write("stage", name="derive graphs for statistics", seconds=seconds)
        return statistics

    def _explaining(self, data: RunData, source: str, when: str) -> AbstractContextManager[None]:
        failing = Failing(self._package, self._plan, self._place.rank, self._engine, self._device)
        return explaining(failing, data, source, when)

    def _compared(self) -> float:
        """Return and report the seconds that comparing compiled graphs has taken since the last
        call.
        """
        seconds = 0.0 if self._verifier is None else self._verifier.taken()
        if seconds and self._place.rank == 0:
            self._contact.write("stage", name="compare compiled graphs", seconds=seconds)
        return seconds

    def _report_skipped(self, step: int, result: StepResult) -> None:
        """Report the updates of a step that were skipped because the weight of their batch is 0."""
        for graph, turn in result.turns:
            if not turn.weight:
                name = f", graph {graph}" if result.others else ""
                self._contact.write(
                    "warning",
                    message=(
                        f"step {step + 1}{name}: the update was skipped, because the weight of its"
                        " batch is 0: all labels are ignored, or a mask is 0 everywhere"
                    ),
                    step=step,
                )

    def _explain_divergence(
        self, step: int, error: NotFiniteError, draws: Sequence[Draw]
    ) -> DivergedError:
        with self._activity.within(Phase.SEARCHING):
            explained, finding = explain_divergence(error, self._search, self._engine, draws, step)
        if finding is not None and self._place.rank == 0:
            self._contact.write("finding", step=step, **finding.as_json())
        return explained

    def _asked(self) -> Request:
        """Return the pending request, the same on every rank; the ranks also exchange their memory
        usage.
        """
        self._activity.at(Phase.AGREEING)
        request, wants_profile = Request.NONE, False
        if self._place.rank == 0:
            asked = self._contact.asked()
            wants_profile = self._profiling.wants(asked)
            request = asked if isinstance(asked, Request) else Request.NONE
            request = max(Request.CHECKPOINT if self._saver.wanted else Request.NONE, request)
        said = torch.tensor([request, used_bytes(self._device), wants_profile])
        if self._control is not None:
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self._control)
        self._memory = int(said[1])
        self._profiling.agree(bool(said[2]))
        return Request(int(said[0]))

    def _checkpoint(self, step: int) -> None:
        self._activity.at(Phase.SAVING)
        recipe = self._package.recipe
        drawn = draws_before(recipe, step) * self._plan.global_batch
        position = DataPosition(
            fingerprint=self._data.fingerprint, seed=recipe.seed, position=drawn
        )
        scaling = self._engine.held.dump_scaling()
        if self._place.rank == 0:
            self._contact.met(Request.CHECKPOINT)
        user: dict[str, object] = {} if scaling is None else {SCALING: scaling}
        if self._verifier is not None:
            # in a pipeline, each rank decides about its own stages
            decided = gathered(self._verifier.decided, self._control)
            user[GRAPHS] = {self._build_name: dict(ChainMap(*decided))}
        if (
            self._evaluated is not None
            and self._evaluated[0] == step
            and math.isfinite(self._evaluated[1])
        ):
            user[EVALUATION] = self._evaluated[1]
        self._saver.save(step, self._engine.held.dump(), position, user)

    def _evaluate(self, step: int) -> None:
        if self._evaluation is None:
            return
        self._activity.at(Phase.EVALUATING, step)
        began = time.perf_counter()
        assert self._eval_data is not None
        with self._explaining(
            self._eval_data, str(self._spec.eval_data), f"the evaluation after step {step}"
        ):
            evaluation = self._evaluation()
        self._compared()
        self._evaluated = (step, evaluation.loss)
        if self._place.rank == 0:
            self._contact.write(
                "eval", step=step, **evaluation.as_json(), seconds=time.perf_counter() - began
            )


def _metrics(result: StepResult) -> dict[str, float]:
    """Return the main graph's metrics, and losses, metrics and norms of the other graphs as
    "graph.loss", ...
    """
    metrics = dict(result.metrics)
    for graph, other in result.others.items():
        if not other.weight:
            continue
        metrics |= {f"{graph}.loss": other.loss, f"{graph}.gradient_norm": other.gradient_norm}
        metrics |= {f"{graph}.{name}": value for name, value in other.metrics.items()}
    return metrics
