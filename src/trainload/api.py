"""The verbs: freeze, open, plan, launch, resume."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Required, TypedDict, Unpack

from trainload.abstract import freeze_abstract
from trainload.bundling import Bundler, given_wheel
from trainload.capture.errors import ClusterError, DataError, JobError, PlanError, StorageError
from trainload.capture.inputs import constants_of, leaves_of
from trainload.capture.job import Job
from trainload.capture.program import Program
from trainload.capture.replays import Check
from trainload.capture.shape_fixes import AppliedFix, with_suggested_fixes
from trainload.capture.shape_report import explain_shapes
from trainload.capture.shapes import declared_shapes, spelled
from trainload.launch.build import build_key, device_of
from trainload.launch.data.run_data import check_run_data
from trainload.launch.journal import Event, followed
from trainload.launch.libraries import absolute, demand_run, import_libraries, library_warnings, open_with
from trainload.launch.opening import frozen_package
from trainload.launch.overrides import Overrides
from trainload.launch.result import RunResult, check_output, finish
from trainload.launch.sinks.sink import SinkName, told
from trainload.launch.spec import RunSpec, Weights, check_new_run, default_cache_dir, existing_folder, least_plan, read_spec, write_spec
from trainload.launch.state import demand_no_driver
from trainload.launch.trial import Trial, try_out
from trainload.packaging.assets import asset_sources
from trainload.packaging.op_libraries import Libraries
from trainload.packaging.read import Package, demand_weights
from trainload.packaging.signatures.policy import find_policies
from trainload.packaging.write import write_package
from trainload.proving import keep_steps, prove
from trainload.sharding.buckets import item_bytes
from trainload.sharding.check_plan import check_plan
from trainload.sharding.estimate import kept_per_element, state_counts
from trainload.sharding.make_plan import make_plan
from trainload.sharding.plan import Cluster, Plan
from trainload.sharding.replan import replan
from trainload.sharding.simulate import simulate
from trainload.sharding.strategies import Strategy

Backend = Literal["ray", "local", "torchrun"]

__all__ = ["DryRunReport", "dry_run", "explain_shapes", "freeze", "launch", "open", "plan", "resume"]


def freeze(
    job: Job,
    path: str | Path,
    *,
    check: Check | Literal["usual", "thorough"] = Check.USUAL,
    strict: bool | None = None,
    apply_suggested_fixes: bool = False,
    on_fix: Callable[[AppliedFix], None] | None = None,
    abstract: bool = False,
    reduced: Job | None = None,
    libraries: Libraries = MappingProxyType({}),
    bundle_ops: bool | Sequence[str | Path] = False,
) -> Package:
    """Captures a job, proves the graphs equal to eager, and writes the package.

    The joint forward and backward graph for the CPU is derived and proven too, and kept beside the program; other devices derive theirs
    when the package is first compiled there.

    Args:
        job: model, loss, optimizer, schedule and an example batch.
        path: the package to write, a folder that does not exist.
        check: "usual" compares with eager on the example batch and on one of another number of rows; "thorough" on six further batches,
            of sizes drawn from those that the graph takes, under other seeds.
        strict: torch.export's mode. None: the non-strict one, and for a graph that it cannot follow the strict one, if that loses nothing;
            True: the strict one alone, which refuses whatever it would lose; False: the non-strict one alone. debug/capture.json has what
            was taken for each graph, and why.
        apply_suggested_fixes: where torch refuses the sizes that `Job.dynamic` declares, declare what it suggests instead. What was
            changed is recorded in debug/batch.json.
        on_fix: told each change.
        abstract: the model has no values (it is on the meta device, say): shapes alone are frozen, for planning. See docs/abstract.md.
        reduced: for an abstract package, a job of the same code with smaller sizes, which is compared with eager in its place.
        libraries: namespaces of other libraries' operators that the job calls -> the module or Python file that registers them, which is
            imported, and recorded as such; what is not named is found out. See docs/operators.md.
        bundle_ops: whether these libraries go into the package, as wheels made of what is installed; or wheels to take in their place.

    Raises:
        JobError: the job's description does not hold together.
        CaptureError: the model cannot be captured soundly.
        PackageError: a library cannot be imported, or not be bundled so that it can be loaded alone; an asset's name or media type is none.
        StorageError: the path is taken, or cannot be written; there is no such wheel; an asset is missing.
    """
    path, check = Path(path), Check(check)
    if path.exists():
        raise StorageError("it exists already", where=str(path), cure="Choose another path, or remove it.")
    if not path.absolute().parent.is_dir():
        raise StorageError("there is no such folder", where=str(path.absolute().parent), cure="Make it first.")
    asset_sources(job.assets)  # what is wrong with them is said before the work begins
    if abstract and strict:
        raise JobError("the strict mode needs a model that can be run, to see what it would lose", where="freeze", cure="Leave strict out.")
    import_libraries(libraries)
    if abstract or reduced is not None:
        if bundle_ops:
            raise JobError("an abstract package is not run, so it brings no operators", where="freeze", cure="Leave bundle_ops out.")
        if not abstract or apply_suggested_fixes:
            raise JobError("reduced goes with abstract, and apply_suggested_fixes without it", where="freeze", cure="See docs/abstract.md.")
        return freeze_abstract(job, path, reduced, check)
    wheels = () if isinstance(bundle_ops, bool) else tuple(given_wheel(Path(wheel)) for wheel in bundle_ops)
    declared, fixes = with_suggested_fixes(job) if apply_suggested_fixes else (job, ())
    for fix in fixes:
        if on_fix is not None:
            on_fix(fix)
    proven = prove(declared, check, strict)
    debug = {"batch": _batch_record(declared, fixes), "capture": {"check": check.value, "tracing": _tracing_record(proven.program)}}
    package = write_package(
        path,
        proven.program,
        proven.updates,
        proven.recipe,
        assets=job.assets,
        debug=debug,
        libraries=libraries,
        bundle=Bundler(wheels, libraries) if bundle_ops is not False else None,
    )
    keep_steps(package, proven.training_steps())
    return package


def _tracing_record(program: Program) -> dict[str, dict[str, str]]:
    """By graph, what debug/capture.json says of how it was captured."""
    graphs = program.graphs.items()
    return {name: {"mode": graph.tracing.mode, "why": graph.tracing.why} for name, graph in graphs if graph.tracing is not None}


def _batch_record(job: Job, fixes: Sequence[AppliedFix]) -> dict[str, object]:
    """debug/batch.json."""
    leaves = {name: leaf for batch in (*job.variants.values(), job.batch) for name, leaf in leaves_of(batch).items()}
    shapes = declared_shapes({name: dims for name, dims in job.dynamic.items() if name in leaves}, leaves)
    return {
        "constants": {name: value if value is None else str(value) for name, value in constants_of(job.batch).items()},
        "dynamic": {name: {str(dim): spelled(spec) for dim, spec in dims.items()} for name, dims in shapes.items()},
        "fixes": [{**asdict(fix), "dims": list(fix.dims)} for fix in fixes],
    }


def open(path: str | Path, *, libraries: Libraries = MappingProxyType({}), trust_extensions: bool = False) -> Package:
    """Opens a package; see `trainload.packaging.read.open_package`. Warns where operator libraries are others than it was made with.

    Args:
        path: its folder.
        libraries: namespaces of other libraries' operators that it may call -> the module or Python file that registers them, which is
            imported; None: they are registered already. Name only what you trust.
        trust_extensions: whether to load the operator libraries that the package brings, where `libraries` names no others. That runs code
            of its maker's: say so only of packages that you trust.
    """
    package = open_with(Path(path), libraries, trust_extensions=trust_extensions)
    for warning in library_warnings(package, libraries):
        warnings.warn(warning, stacklevel=2)
    return package


plan = make_plan


class RunOptions(TypedDict, total=False):
    """What `launch` and `dry_run` take beside package, plan and data.

    run_dir: the run's folder (journal, checkpoints); on storage that all nodes share. There must be no run in it. Required.
    steps: optimizer updates; None: the recipe's.
    eval_data: held-out data: evaluated before the first step and after the last one.
    eval_every: and every so many steps.
    eval_batches: at most so many global batches of each of its parts; None: all.
    checkpoint_every: steps between checkpoints; there is always one at the end.
    keep: how many of the newest checkpoints are kept; 2.
    keep_best: so many more, whose evaluations had the lowest losses; 0.
    keep_every: and those whose step is a multiple of it.
    output: where to write a package with the trained weights.
    sinks: where the run's numbers go beside its journal: "tensorboard" (files in the run's folder), "mlflow" (MLFLOW_TRACKING_URI).
    overrides: what of the package's training is changed: learning rates, schedule, clipping, frozen parameters, seed. Where
        parameters are frozen, `plan` is made for `overrides.apply(package)`.
    weights: which are evaluated and written, where the job keeps a running mean: "mean" or "last"; "mean".
    compile: False runs the graphs uncompiled.
    max_failures: how often in a row workers are restarted, without a new checkpoint between, before the run is given up; 3.
    hang_timeout: seconds without a sign of progress of a rank after which it is ended; 300. On Ray.
    start_timeout: the same before the first step; 3600.
    storage_patience: seconds for which storage may fail before the run is given up; 600.
    plans: others for the package, of other numbers of ranks and the same global batch (`plans_of_sizes`): the run takes the largest that
        there are nodes for, at its start and whenever nodes are lost or come. On Ray.
    node_patience: seconds for which a run waits for nodes that were lost or are taken; 1800.
    backend: "ray"; "local": one worker in this process; "torchrun": this process is one of torchrun's.
    address: of a Ray cluster; None: the one that this process is connected to, or a local one for this run.
    libraries: as for `open`; every worker imports them.
    trust_extensions: as for `open`; every worker loads them.
    policy: a policy file (docs/trust.md), beside the machine's and the environment's: the package must satisfy all of them, everywhere.
    """

    run_dir: Required[str | Path]
    steps: int | None
    eval_data: str | Path | None
    eval_every: int | None
    eval_batches: int | None
    checkpoint_every: int | None
    keep: int
    keep_best: int
    keep_every: int | None
    output: str | Path | None
    sinks: Sequence[SinkName]
    overrides: Overrides
    weights: Weights
    compile: bool
    max_failures: int
    hang_timeout: float
    start_timeout: float
    storage_patience: float
    node_patience: float
    plans: Sequence[Plan]
    backend: Backend
    address: str | None
    libraries: Libraries
    trust_extensions: bool
    policy: str | Path | None


def launch(
    package: Package, plan: Plan, data: str | Path, *, on_event: Callable[[Event], None] | None = None, **options: Unpack[RunOptions]
) -> RunResult:
    """Trains a package.

    Args:
        package: what is trained.
        plan: how; made for this package.
        data: Parquet file or folder, or npz, with exactly the package's inputs as columns, or those of one of its variants; or a mixture
            of these, a file that ends in .json: docs/variants.md.
        on_event: told everything that happens.
        options: see `RunOptions`.

    Raises:
        PolicyError: a policy does not let the package be run.
        PlanError: the plan is for another package, or was edited so that it does not fit.
        DataError: the data does not have the package's inputs.
        ClusterError: the cluster cannot hold the plan.
        StorageError: a path is taken or cannot be written. Up to here nothing was started.
        RunInterrupted: Ctrl-C; the run can be resumed.
        TrainingError: the workers failed too often, or the loss is not finite.
    """
    spec, _ = _checked(package, plan, data, options)
    backend = options.get("backend", "ray")
    if _leads(backend):  # torchrun's other ranks may find it made already
        _check_place(package, spec)
    return _run(package, spec, backend, options.get("address"), on_event or _ignore, new=True)


def prepare(package: Package, plan: Plan, data: str | Path, **options: Unpack[RunOptions]) -> Path:
    """Writes a run's folder, after all that `launch` checks before it starts anything but the cluster. `resume` then trains it.

    Args: as of `launch`. Returns: the folder. Raises: as `launch`, but for what the cluster and the training raise.
    """
    spec, _ = _checked(package, plan, data, options)
    _check_place(package, spec)
    write_spec(spec)
    return Path(spec.run_dir)


def resume(
    run_dir: str | Path,
    *,
    workers: int | None = None,
    strategy: Strategy | None = None,
    plan: Plan | None = None,
    backend: Backend | None = None,
    address: str | None = None,
    policy: str | Path | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> RunResult:
    """Continues a run from its last whole checkpoint, on as many workers as there are now.

    Args:
        run_dir: the run's folder.
        workers: None: as before.
        strategy: None: as before where that is possible for the number of workers.
        plan: another plan for the package, in place of both. Its global batch is the run's.
        backend: None: "local" for a run of one worker that is asked for so, else Ray.
        address: of a Ray cluster.
        policy: a policy file, beside those that the run was launched under and those that hold here.
        on_event: told everything that happens.

    Raises:
        IntegrityError: the package is not the one that the run was launched with.
        PlanError: the plan has another global batch; otherwise as `launch`.
    """
    folder = Path(run_dir).absolute()
    spec = read_spec(folder)
    demand_no_driver(folder)
    policies = tuple(dict.fromkeys((*spec.policies, *find_policies(None if policy is None else Path(policy)))))
    spec = spec.model_copy(update={"policies": policies})
    package = frozen_package(spec)
    if plan is not None:
        spec = spec.model_copy(update={"plan": _another_plan(plan, spec.plan, workers, strategy), "plans": ()})
    elif workers is not None or strategy is not None:
        cluster = Cluster(nodes=1, devices_per_node=workers or spec.plan.world_size, device=spec.plan.cluster.device)
        spec = spec.model_copy(
            update={"plan": replan(spec.overrides.apply(package, spec.steps), spec.plan, cluster, strategy), "plans": ()}
        )
    _check_request(package, spec)
    check_output(spec, new=False)
    return _run(package, spec, backend or "ray", address, on_event or _ignore, new=False)


def _another_plan(plan: Plan, before: Plan, workers: int | None, strategy: Strategy | None) -> Plan:
    if workers is not None or strategy is not None:
        raise PlanError("a plan says the number of workers and the strategy itself", where="resume", cure="Give the plan alone.")
    if plan.global_batch != before.global_batch:
        raise PlanError(
            "the plan has another global batch than the run",
            where="plan.global_batch",
            expected=str(before.global_batch),
            got=str(plan.global_batch),
            cure="Make a plan with the run's: its losses depend on it.",
        )
    return plan


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """What a launch would do. All of it was checked; nothing was started but one step of the first rank, whose results are forgotten.

    seconds: of what was done: checks, the graphs of all ranks, and, on one node, the parts of a `Trial`; what is in the node's cache by now
    takes less the next time. run_seconds: what the run would take at the pace of that step, if no rank waited for another; None under a
    pipeline, whose ranks cannot be tried out alone.
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
    free_disk_bytes: int
    seconds: dict[str, float]
    run_seconds: float | None


def dry_run(package: Package, plan: Plan, data: str | Path, **options: Unpack[RunOptions]) -> DryRunReport:
    """Does everything of a launch but train: package, policies, plan, the graphs of all ranks, data, cluster, paths, room on the disk, and
    one compiled step on one node. Arguments and errors are those of `launch`.
    """
    seconds: dict[str, float] = {}
    began = time.perf_counter()
    spec, (rows, eval_rows) = _checked(package, plan, data, options)
    _check_place(package, spec)
    seconds["checks"] = time.perf_counter() - began
    began = time.perf_counter()
    changed = spec.overrides.apply(package, spec.steps)
    simulate(changed, plan)
    seconds["simulate"] = time.perf_counter() - began
    key = build_key(changed, plan, device_of(plan)) if plan.cluster.device == "cpu" else ""
    already = bool(key) and (default_cache_dir() / "compiled" / key).is_dir()
    trial = _tried_out(spec, options.get("backend", "ray"), options.get("address"))
    if trial is not None:
        seconds |= {name: value for name, value in asdict(trial).items() if name != "compiled"}
    return DryRunReport(
        package=package.path,
        digest=package.digest,
        strategy=plan.strategy,
        workers=plan.world_size,
        steps=spec.steps,
        rows=rows,
        eval_rows=eval_rows,
        parameter_bytes_per_worker=plan.estimate.parameter_bytes,
        optimizer_bytes_per_worker=plan.estimate.optimizer_bytes,
        compiled_already=already,
        free_disk_bytes=shutil.disk_usage(existing_folder(Path(spec.run_dir))).free,
        seconds={name: round(value, 3) for name, value in seconds.items()},
        run_seconds=None if trial is None else trial.first_step + (spec.steps - 1) * trial.step,
    )


def _tried_out(spec: RunSpec, backend: Backend, address: str | None) -> Trial | None:
    """One step of a run's first rank; on Ray, where the run would begin. None where a rank cannot be tried out alone.

    Raises: ClusterError as `launch`, or where the devices are taken now.
    """
    alone = spec.plan.pipeline is None
    if backend != "ray":
        return try_out(spec, spec.plan.world_size) if alone else None
    import ray

    from trainload.launch.cluster.connection import connect
    from trainload.launch.cluster.nodes import demand_seats, nodes_of, seats
    from trainload.launch.cluster.tasks import tried_out

    started = connect(address)
    try:
        nodes = nodes_of(spec.plan.cluster.device)
        demand_seats(least_plan(spec), nodes)
        places = seats(spec.plan, nodes, free=False) or seats(least_plan(spec), nodes, free=False) or []
        return tried_out(spec, places[0], places.count(places[0])) if alone else None
    finally:
        if started:
            ray.shutdown()


def _ignore(event: Event) -> None:
    """For callers that do not watch."""


def _spec(package: Package, plan: Plan, data: str | Path, options: RunOptions) -> RunSpec:
    policy = options.get("policy")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in RunSpec.model_fields}

    def whole(path: str | Path | None) -> str | None:
        return None if path is None else str(Path(path).absolute())

    return RunSpec(
        **given
        | {
            "package": str(package.path),
            "plan": plan,
            "data": whole(data),
            "run_dir": whole(options["run_dir"]),
            "steps": options.get("steps") or package.recipe.steps,
            "eval_data": whole(options.get("eval_data")),
            "output": whole(options.get("output")),
            "plans": _in_order(plan, options.get("plans", ())),
            "libraries": {**dict.fromkeys(sorted(package.namespaces)), **absolute(options.get("libraries", {}))},
            "digest": package.digest,
            "policies": find_policies(None if policy is None else Path(policy)),
        }
    )


def _checked(package: Package, plan: Plan, data: str | Path, options: RunOptions) -> tuple[RunSpec, tuple[int, int | None]]:
    """The run that is asked for, once its package may be run and fits plan and data; and what `_check_request` returns."""
    spec = _spec(package, plan, data, options)
    demand_run(package, spec.policies)
    return spec, _check_request(package, spec)


def _in_order(plan: Plan, others: Sequence[Plan]) -> tuple[Plan, ...]:
    """All plans of an elastic run, the smallest first; none for others. Raises: PlanError where they are not of one run."""
    if not others:
        return ()
    found = {each.world_size: each for each in (*others, plan)}
    for each in found.values():
        _another_plan(each, plan, None, None)
    return tuple(found[world] for world in sorted(found))


def _check_request(package: Package, spec: RunSpec) -> tuple[int, int | None]:
    """Everything that can be known before anything starts. Returns: rows of the data and of the held-out data."""
    demand_weights(package)
    package.check_contents()
    package = spec.overrides.apply(package, spec.steps)
    for each in spec.plans or (spec.plan,):
        check_plan(each, package)
    count = spec.plan.rows_per_call
    rows = check_run_data(spec.data, package, count)
    eval_rows = check_run_data(spec.eval_data, package, count) if spec.eval_data is not None else None
    if spec.eval_data is None and (spec.eval_every is not None or spec.eval_batches is not None):
        raise DataError("an evaluation was asked for without held-out data", where="eval_data", cure="Give --eval-data.")
    return rows, eval_rows


def _leads(backend: Backend) -> bool:
    """Whether this process makes the run's folder, and writes what comes of it: the only one, or torchrun's rank 0."""
    if backend != "torchrun":
        return True
    from trainload.launch.local_run import torchrun_place

    return torchrun_place().rank == 0


def _check_place(package: Package, spec: RunSpec) -> None:
    """Demands a place for a new run, with room for the checkpoints that it keeps and for the one that is written beside them."""
    check_new_run(Path(spec.run_dir))
    check_output(spec, new=True)
    package = spec.overrides.apply(package, spec.steps)
    states, mean = state_counts(package), package.recipe.keeps_mean
    one = sum(b.length * item_bytes(b.dtype) * (1 + kept_per_element(b, states, mean)) for b in spec.plan.buckets)
    spacing = spec.checkpoint_every
    count = 1 if spacing is None else spec.retention.most(spec.steps // spacing, spacing) + 1
    free = shutil.disk_usage(existing_folder(Path(spec.run_dir))).free
    if free < count * one:
        raise StorageError(
            "the disk has no room for the run's checkpoints",
            where=spec.run_dir,
            expected=f"{count} x {one:,} bytes",
            got=f"{free:,} bytes free",
            cure="Make room, keep fewer checkpoints, or choose another --run-dir.",
        )


@contextmanager
def _recorded(spec: RunSpec, on_event: Callable[[Event], None], *, new: bool) -> Iterator[Callable[[Event], None]]:
    """Within it a run has its folder, and what it says goes to its sinks too: what is to be told of its events. `new`: it is made."""
    if new:
        write_spec(spec)
    with told(spec.sinks, Path(spec.run_dir), on_event) as tell:
        yield tell


def _run(
    package: Package, spec: RunSpec, backend: Backend, address: str | None, on_event: Callable[[Event], None], *, new: bool
) -> RunResult:
    if backend == "ray":
        _run_on_ray(spec, address, on_event, new=new)
    elif backend == "torchrun":
        from trainload.launch.local_run import demand_torchrun, run_under_torchrun

        place = demand_torchrun(spec)
        if place.rank == 0:
            with _recorded(spec, on_event, new=new) as tell, followed(Path(spec.run_dir), tell):
                run_under_torchrun(spec, place)
        else:
            run_under_torchrun(spec, place)
            spec = spec.model_copy(update={"output": None})  # rank 0 writes it
    elif backend == "local":
        from trainload.launch.local_run import demand_one_worker, run_in_process

        demand_one_worker(spec)
        with _recorded(spec, on_event, new=new) as tell, followed(Path(spec.run_dir), tell):
            run_in_process(spec)
    else:
        raise ClusterError("no such backend", expected="ray, local or torchrun", got=str(backend))
    return finish(spec, package)


def _run_on_ray(spec: RunSpec, address: str | None, on_event: Callable[[Event], None], *, new: bool) -> None:
    import ray

    from trainload.launch.cluster.connection import connect
    from trainload.launch.cluster.nodes import demand_seats, nodes_of
    from trainload.launch.cluster.supervisor import Supervisor

    started = connect(address)
    try:
        demand_seats(least_plan(spec), nodes_of(spec.plan.cluster.device))
        with _recorded(spec, on_event, new=new) as tell:
            Supervisor(spec, tell).run()
    finally:
        if started:
            ray.shutdown()
