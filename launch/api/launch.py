"""Launch, dry-run, prepare and resume runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import SkipValidation

from trainload.capture.job.ambient import neutrally
from trainload.core.errors import ClusterError, StorageError
from trainload.core.processes import interrupted_by_signals
from trainload.core.storage.places import Where
from trainload.launching.api.request import (
    Backend,
    ExecutionOptions,
    RunRequest,
    another_plan,
    check_backend,
    check_package,
    check_rows,
    checked,
    leads,
)
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.reader import Checkpoint, usable_checkpoint
from trainload.launching.data.made_data import Data
from trainload.launching.node.build import is_compiled
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.run.driver import CheckDriver, check_no_driver, driving
from trainload.launching.run.journal import Event, followed, stream_events
from trainload.launching.run.kept_records import publish_kept
from trainload.launching.run.opening import frozen_package
from trainload.launching.run.publication import Publication, await_end, publishing_output
from trainload.launching.run.result import RunResult, check_output, finish, output_exists
from trainload.launching.run.run_changes import changed, changes_run
from trainload.launching.run.run_directory import RunFolder, removed_unless_kept
from trainload.launching.run.run_spec import (
    RunSpec,
    least_plan,
    read_spec,
    replace_spec,
    write_spec,
)
from trainload.launching.run.working_copy import RunFiles, forget_requests, working_copy
from trainload.launching.settings.options import takes_options
from trainload.launching.settings.run_settings import RunSettings
from trainload.launching.sinks.installed_sinks import check_sink_libraries, check_sinks
from trainload.launching.sinks.sink import open_sinks
from trainload.launching.worker.trial import Trial, try_out
from trainload.packaging.package import Package
from trainload.packaging.signatures.policy import find_policies
from trainload.sharding.planner.replan import replan
from trainload.sharding.planner.simulate import simulate
from trainload.sharding.plans.plan import Cluster, Plan
from trainload.sharding.plans.strategies import Strategy


@neutrally
@takes_options(RunRequest)
def launch(package: Package, plan: Plan, data: Data, request: RunRequest) -> RunResult:
    """Train a package.

    Args:
        package: package to train.
        plan: plan made for this package.
        data: path or URL of files whose columns are exactly the package's inputs, or those of one
            of its variants (Parquet, Arrow, npz, safetensors, tar); a mixture of such files, which
            is a file that ends in .json; or a function or Ray dataset that yields rows. See
            docs/guides/data.md.
        request: fields of `RunRequest`, passed as keyword arguments. Only run_dir is required;
            docs/reference/settings.md lists them.

    Returns:
        The result of the finished run.

    Raises:
        RequestError: an option is unknown, missing or invalid.
        PolicyError: a policy rejects the package.
        PlanError: the plan was made for another package, or an edit made it invalid.
        DataError: the data does not have the package's inputs.
        ClusterError: the cluster is too small for the plan.
        StorageError: a path exists already or is not writable. If any of the errors up to here is
            raised, nothing has been started.
        RunInterrupted: the run was interrupted (Ctrl-C) and can be resumed.
        TrainingError: the workers failed too often, or a loss or gradient is not finite.

    Example:
        package = trainload.open("gpt.tl")
        plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
        result = trainload.launch(package, plan, "train.parquet", run_dir="runs/first", steps=1000)
    """
    with checked(package, plan, data, request) as run:
        run_spec(run.spec, request.backend, request.address, request.on_event or _ignore, new=True)
        return _make_result(run.spec, package, request.backend)


@neutrally
@takes_options(RunRequest)
def prepare(package: Package, plan: Plan, data: Data, request: RunRequest) -> Where:
    """Write a run's folder without starting the run; `resume` trains it later.

    Everything that `launch` checks is checked first, except the cluster. The arguments are those of
    `launch`.

    Returns:
        The run's folder or URL.

    Raises:
        TrainloadError: as for `launch`, except errors of the cluster and of the training.
    """
    with checked(package, plan, data, request) as run:
        write_spec(run.spec)
        return run.spec.place


class ResumeRequest(RunSettings, ExecutionOptions):
    """Options of `resume`, in addition to the run's folder.

    Changed settings apply from the run's last checkpoint on. Settings and overrides that are not
    passed keep their values. A learning rate schedule always spans the whole run.
    """

    workers: int | None = None
    """Number of workers. Default: as before."""
    strategy: Annotated[Strategy | None, SkipValidation()] = None
    """Strategy of the new plan.

    Default: as before if that is possible for the number of workers.
    """
    plan: Plan | None = None
    """Another plan for the package, in place of both. Its global batch is the run's."""


@neutrally
@takes_options(ResumeRequest)
def resume(run_dir: str | Path, request: ResumeRequest) -> RunResult:
    """Continue a run from its last complete checkpoint, on the same or another number of workers.

    Args:
        run_dir: the run's folder or URL.
        request: fields of `ResumeRequest`, passed as keyword arguments. Changed settings are
            recorded in run.json with the step from which they apply. Policies are checked in
            addition to those that the run was launched under.

    Returns:
        The result of the finished run.

    Raises:
        JobError: a setting cannot be changed in the middle of a run.
        IntegrityError: the package is not the one that the run was launched with.
        PlanError: the plan has another global batch than the run.
        TrainloadError: as for `launch`.

    Example:
        trainload.resume("runs/first")
        trainload.resume("runs/first", workers=4, overrides=trainload.Overrides(lr=1e-4))
    """
    check_backend(request.backend, request.address)
    if leads(request.backend):
        publish_kept(run_dir)
    with working_copy(run_dir) as folder:
        RunFiles(folder).update()
        return _resume(folder, request)


def _resume(folder: Path, request: ResumeRequest) -> RunResult:
    """Continue the run in a folder; see `resume`."""
    backend, policy, plan = request.backend, request.policy, request.plan
    leading = leads(backend)
    spec = (
        change(folder, request)
        if changes_run(request) and leading
        else _apply_changes(read_spec(folder), request)
    )
    if leading:  # torchrun's rank 0 may drive it by now
        check_no_driver(folder)
    policies = tuple(
        dict.fromkeys((*spec.policies, *find_policies(None if policy is None else Path(policy))))
    )
    spec = spec.model_copy(update={"policies": policies})
    package = frozen_package(spec)
    if plan is not None:
        spec = spec.model_copy(
            update={
                "plan": another_plan(plan, spec.plan, request.workers, request.strategy),
                "plans": (),
            }
        )
    elif request.workers is not None or request.strategy is not None:
        cluster = Cluster(
            nodes=1,
            devices_per_node=request.workers or spec.plan.world_size,
            device=spec.plan.cluster.device,
        )
        spec = spec.model_copy(
            update={
                "plan": replan(
                    spec.overrides.apply(package, spec.steps), spec.plan, cluster, request.strategy
                ),
                "plans": (),
            }
        )
    check_sinks(spec.sinks, backend)
    if leading:
        check_sink_libraries(spec.sinks)
    check_rows(check_package(package, spec), spec)
    check_output(spec, new=False)
    run_spec(spec, backend, request.address, request.on_event or _ignore, new=False)
    return _make_result(spec, package, backend)


def change(run_dir: Path, settings: RunSettings) -> RunSpec:
    """Change the settings of a run that has no driver, and return the changed run.

    The settings are written to run.json, so that they apply when the run is resumed. The errors are
    those of `resume`.
    """
    before = read_spec(run_dir)
    check_no_driver(run_dir)
    spec = _apply_changes(before, settings)
    check_sink_libraries(spec.sinks)
    package = frozen_package(spec)
    check_rows(check_package(package, spec), spec)
    if output_exists(spec):
        raise StorageError(
            "the run has already written its result, and the changed run would produce another one",
            where=str(spec.output),
            hint="Move the result, then resume the run.",
        )
    replace_spec(spec)
    return spec


def _apply_changes(spec: RunSpec, settings: RunSettings) -> RunSpec:
    if not changes_run(settings):
        return spec
    usable = usable_checkpoint(place_of(spec.run_dir, spec.checkpoints)).path
    return changed(spec, 0 if usable is None else Checkpoint.open(usable).index.step, settings)


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """Description of the run that a launch would start.

    Everything is checked, but nothing is started except a few trial steps of the first rank, whose
    results are discarded.

    Attributes:
        package: path of the package.
        digest: digest of the package.
        strategy: strategy of the plan.
        workers: number of workers.
        steps: number of steps.
        rows: rows of the training data.
        eval_rows: rows of the held-out data; None if there is none.
        parameter_bytes_per_worker: estimated bytes of parameters on each worker.
        optimizer_bytes_per_worker: estimated bytes of optimizer state on each worker.
        compiled_already: True if this machine's cache holds the compiled graphs (CPU plans only).
        free_disk_bytes: free bytes where checkpoints will be stored; None for a URL.
        seconds: duration of each part of the dry run: the checks, the simulation of all ranks and,
            on one node, the parts of a `Trial`. Parts whose results are now in the node's cache
            are faster the next time.
        run_seconds: estimated duration of the run at the speed of the trial steps if no rank waited
            for another; None for a pipeline, whose ranks cannot run alone.
        interpreted: for each graph that would run interpreted, the reason.
    """

    package: Path
    digest: str
    strategy: str
    workers: int
    steps: int
    rows: int
    eval_rows: int | None
    parameter_bytes_per_worker: int
    optimizer_bytes_per_worker: int
    compiled_already: bool
    free_disk_bytes: int | None
    seconds: dict[str, float]
    run_seconds: float | None
    interpreted: tuple[str, ...]


@neutrally
@takes_options(RunRequest)
def dry_run(package: Package, plan: Plan, data: Data, request: RunRequest) -> DryRunReport:
    """Do everything that a launch does except train.

    Checks the package, the policies, the plan, the graphs of all ranks, the data, the cluster, the
    paths and the free disk space, and runs a few compiled steps of the first rank on one node. The
    arguments and errors are those of `launch`.

    Example:
        report = trainload.dry_run(package, plan, "train.parquet", run_dir="runs/first")
        print(report.run_seconds, report.parameter_bytes_per_worker)
    """
    seconds: dict[str, float] = {}
    began = time.perf_counter()
    with checked(package, plan, data, request) as run:
        spec = run.spec
        seconds["checks"] = time.perf_counter() - began
        began = time.perf_counter()
        simulate(run.package, plan)
        seconds["simulate"] = time.perf_counter() - began
        already = plan.cluster.device == "cpu" and is_compiled(
            run.package,
            plan,
            default_cache_dir(),
            evaluates=spec.evaluates,
            is_deterministic=spec.deterministic,
        )
        trial = _run_trial(spec, request.backend, request.address)
        if trial is not None:
            seconds |= {
                name: value
                for name, value in asdict(trial).items()
                if name not in ("compiled", "interpreted")
            }
        return DryRunReport(
            package=package.path,
            digest=package.digest,
            strategy=plan.strategy,
            workers=plan.world_size,
            steps=spec.steps,
            rows=run.rows,
            eval_rows=run.eval_rows,
            parameter_bytes_per_worker=plan.estimate.parameter_bytes,
            optimizer_bytes_per_worker=plan.estimate.optimizer_bytes,
            compiled_already=already,
            free_disk_bytes=place_of(spec.run_dir, spec.checkpoints).free_bytes(),
            seconds={name: round(value, 3) for name, value in seconds.items()},
            run_seconds=None if trial is None else trial.first_step + (spec.steps - 1) * trial.step,
            interpreted=() if trial is None else trial.interpreted,
        )


def _run_trial(spec: RunSpec, backend: Backend, address: str | None) -> Trial | None:
    """Run trial steps of a run's first rank; on Ray, on a node where the run would start.

    Returns:
        The timings; None for a pipeline, whose ranks cannot run alone.

    Raises:
        ClusterError: as for `launch`, or all devices are in use at the moment.
        TrainingError: the step fails.
    """
    alone = spec.plan.pipeline is None
    if backend != "ray":
        return try_out(spec, spec.plan.world_size) if alone else None
    from trainload.launching.cluster.connection import connected

    with connected(address, with_ranks=False):
        from trainload.launching.cluster.nodes import check_seats, nodes_of, place_to_try
        from trainload.launching.cluster.tasks import tried_out

        nodes = nodes_of(spec.plan.cluster.device)
        check_seats(least_plan(spec), nodes)
        return tried_out(spec, *place_to_try(spec.plan, least_plan(spec), nodes)) if alone else None


def _ignore(event: Event) -> None:
    """Do nothing: the default callback."""


@dataclass(frozen=True, slots=True)
class _Driving:
    """Tools of a driver.

    Attributes:
        tell: receives the run's events, for its sinks too.
        check: checks that no other process drives the run.
        publication: publishes the run's records.
    """

    tell: Callable[[Event], None]
    check: CheckDriver
    publication: Publication


@contextmanager
def _drive(spec: RunSpec, on_event: Callable[[Event], None], *, new: bool) -> Iterator[_Driving]:
    """Drive a run inside the block. If it is new, its folder is created, and removed again if the
    block is not reached.
    """
    run_dir = spec.folder
    publication = Publication(run_dir, patience=spec.storage_patience)
    with removed_unless_kept(run_dir) if new else nullcontext(RunFolder(run_dir)) as folder:
        if new:
            write_spec(spec)
            folder.is_created = True
            forget_requests(run_dir)
        with (
            driving(run_dir, publication) as check_driver,
            open_sinks(spec.sinks, run_dir, on_event, new=new) as tell,
        ):
            folder.is_kept = True
            try:
                yield _Driving(tell, check_driver, publication)
            except (StorageError, ClusterError) as error:
                error.work_began = any(event.kind == "step" for event in stream_events(run_dir))
                raise


def run_spec(
    spec: RunSpec,
    backend: Backend,
    address: str | None,
    on_event: Callable[[Event], None],
    *,
    new: bool,
) -> None:
    """Execute a checked run to its end; if `new`, create its folder first.

    The errors are those of `launch`.
    """
    if backend == "ray":
        _run_on_ray(spec, address, on_event, new=new)
    elif backend == "torchrun":
        from trainload.launching.worker.local_run import check_torchrun, run_under_torchrun

        place = check_torchrun(spec)
        if place.rank == 0:
            with _drive(spec, on_event, new=new) as driver, followed(spec.folder, driver.tell):
                run_under_torchrun(spec, place, driver.publication, driver.check)
        else:
            with publishing_output(spec.folder) as publication:
                run_under_torchrun(spec, place, publication)
    else:
        from trainload.launching.worker.local_run import check_one_worker, run_in_process

        check_one_worker(spec)
        with _drive(spec, on_event, new=new) as driver, followed(spec.folder, driver.tell):
            run_in_process(spec, driver.publication, driver.check)


def _make_result(spec: RunSpec, package: Package, backend: Backend) -> RunResult:
    """Return the result of a finished run. Only the leading process writes the trained package."""
    if not leads(backend):
        await_end(spec.folder)
        return finish(spec.model_copy(update={"output": None}), package)
    publication = Publication(spec.folder)
    publication.note_files()
    result = finish(spec, package)
    publication.send_results()
    return result


def _run_on_ray(
    spec: RunSpec, address: str | None, on_event: Callable[[Event], None], *, new: bool
) -> None:
    from trainload.launching.cluster.connection import connected

    with interrupted_by_signals(), connected(address) as connection:
        from trainload.launching.cluster.nodes import check_seats, nodes_of, room_asked_for
        from trainload.launching.cluster.supervisor import supervise
        from trainload.launching.ranks.fork_server import ServerOptions

        check_seats(least_plan(spec), nodes_of(spec.plan.cluster.device))
        idle_seconds = 0.0 if connection.is_temporary else spec.idle_timeout
        with (
            room_asked_for(spec.plans[-1] if spec.plans else None),
            _drive(spec, on_event, new=new) as driver,
        ):
            fork_server = ServerOptions(idle_seconds, connection.fork_server)
            supervise(spec, driver.tell, driver.check, fork_server, driver.publication)
