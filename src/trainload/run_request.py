"""What is asked of a run, and everything about it that can be known before anything starts."""

from __future__ import annotations

import difflib
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, get_args

from pydantic import ValidationError

import trainload
from trainload.capture.arguments import out_of_range, shown
from trainload.capture.errors import CheckpointError, ClusterError, DataError, PlanError, RequestError, StorageError
from trainload.launching.checkpoints.place import place_of, whole_place
from trainload.launching.checkpoints.read import Checkpoint, usable_checkpoint
from trainload.launching.data.files import is_url, local_path
from trainload.launching.data.run_data import check_run_data
from trainload.launching.libraries import absolute, check_runnable
from trainload.launching.overrides import Overrides
from trainload.launching.result import check_output
from trainload.launching.sinks.protocol import SinkName
from trainload.launching.sinks.sink import check_sink_libraries, check_sinks
from trainload.launching.spec import (
    RUN_FILE,
    RunSpec,
    Weights,
    check_new_run,
    read_spec,
)
from trainload.made_data import Data, InFiles, in_files, written
from trainload.packaging.credentials import check_no_credentials
from trainload.packaging.op_libraries import Libraries
from trainload.packaging.read import Package, check_weights
from trainload.packaging.signatures.policy import find_policies
from trainload.sharding.buckets import item_bytes
from trainload.sharding.check_plan import check_plan
from trainload.sharding.estimate import kept_per_element, state_counts
from trainload.sharding.plan import Plan
from trainload.sharding.strategies import Strategy

Backend = Literal["ray", "local", "torchrun"]


class RunOptions(TypedDict, total=False):
    """What `launch` and `dry_run` take beside package, plan and data.

    run_dir: the run's folder (journal, checkpoints); on storage that all nodes share. There must be no run in it. Required.
    steps: optimizer updates; None: the recipe's.
    eval_data: held-out data: evaluated before the first step and after the last one.
    eval_every: and every so many steps.
    eval_batches: at most so many global batches of each of its parts; None: all.
    checkpoint_every: steps between checkpoints; there is always one at the end.
    checkpoints: a folder or fsspec URL (s3://bucket/folder) for them, which all nodes reach and no other run uses; None: in the run's.
    keep: how many of the newest checkpoints are kept; 2.
    keep_best: so many more, whose evaluations had the lowest losses; 0.
    keep_every: and those whose step is a multiple of it.
    output: where to write a package with the trained weights.
    sinks: where the run's numbers go beside its journal: "tensorboard" (files in the run's folder), "mlflow" (MLFLOW_TRACKING_URI),
        "prometheus" (the endpoints of the Ray cluster: docs/watching.md).
    optimizer_from: the folder of the run that made this package, or that of its checkpoints: the optimizer's state, running means and
        losses' scales go on as they were at its end. The schedule begins anew, and so does the count of steps.
    overrides: what of the package's training is changed: learning rates, schedule, clipping, frozen parameters, seed, adapters. Where
        parameters are frozen or get adapters, `plan` is made for `overrides.apply(package)`.
    weights: which are evaluated and written, where the job keeps a running mean: "mean" or "last"; "mean".
    compile: False runs the graphs uncompiled.
    require_compiled: True ends the run where a graph would run interpreted, since its compiled form differs or cannot be had.
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
    eval_data: Data | None
    eval_every: int | None
    eval_batches: int | None
    checkpoint_every: int | None
    checkpoints: str | Path | None
    keep: int
    keep_best: int
    keep_every: int | None
    output: str | Path | None
    sinks: Sequence[SinkName]
    optimizer_from: str | Path | None
    overrides: Overrides
    weights: Weights
    compile: bool
    require_compiled: bool
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


_PATHS = ("run_dir", "output", "checkpoints", "optimizer_from", "policy")
"""Options that are paths."""


def check_options(options: Mapping[str, Any], kind: type) -> None:
    """Check the names of options against a TypedDict, and the types of those that are paths. Raises: RequestError: one is wrong."""
    known = kind.__annotations__
    for name in options:
        if name not in known:
            alike = difflib.get_close_matches(name, known)
            raise RequestError(
                "there is no such option",
                where=name,
                expected=f"one of {', '.join(sorted(known))}",
                cure=f"Perhaps {alike[0]} is meant." if alike else "What of the training is changed goes into overrides.",
            )
    for name in _PATHS:
        value = options.get(name)
        if not (value is None or isinstance(value, str | Path)):
            raise RequestError("is of the wrong type", where=name, expected="a path", got=shown(value))


def spec_of(package: Package, plan: Plan, data: InFiles, options: RunOptions) -> RunSpec:
    """The run that is asked for. Raises: RequestError: an option is out of its range."""
    policy, checkpoints = options.get("policy"), options.get("checkpoints")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in RunSpec.model_fields}

    def whole(path: str | Path | None) -> str | None:
        if path is not None:
            check_no_credentials(str(path))
        return None if path is None else str(path) if str(path).startswith("${") or is_url(path) else str(local_path(path).absolute())

    given |= {
        "package": package.source or str(package.path),
        "plan": plan,
        "data": whole(data.data),
        "made": data.made,
        "run_dir": whole(options["run_dir"]),
        "checkpoints": None if checkpoints is None else whole_place(checkpoints),
        "steps": package.recipe.steps if options.get("steps") is None else options["steps"],
        "optimizer_from": _state_of(options.get("optimizer_from"), package),
        "eval_data": whole(data.eval_data),
        "output": whole(options.get("output")),
        "plans": _in_order(plan, options.get("plans", ())),
        "libraries": {**dict.fromkeys(sorted(package.namespaces)), **absolute(options.get("libraries", {}))},
        "digest": package.digest,
        "versions": versions(),
        "policies": find_policies(None if policy is None else Path(policy)),
    }
    try:
        return RunSpec(**given)
    except ValidationError as error:
        raise out_of_range(error, RequestError) from error


def _state_of(source: str | Path | None, package: Package) -> str | None:
    """The checkpoint whose optimizer's state a run begins with.

    Raises:
        CheckpointError: there is none that is whole, or it is of a run that has not made this package.
    """
    if source is None:
        return None
    run, checkpoints = local_path(source), None
    if is_url(source):
        place = place_of(Path(), whole_place(source))
    else:
        if (run / RUN_FILE).exists():
            checkpoints = read_spec(run.absolute()).checkpoints
        place = place_of(run.absolute(), checkpoints)
    usable = usable_checkpoint(place)
    if usable.path is None:
        raise CheckpointError(
            "there is no checkpoint to take the optimizer's state from",
            where=str(source),
            got="; ".join(usable.rejected) or "none is there",
        )
    made_from = Checkpoint.open(usable.path).index.package
    if made_from not in (package.digest, package.manifest.parent):
        raise CheckpointError(
            "the optimizer's state is that of another run than the one that made the package",
            where=str(source),
            expected=f"a run of package {package.manifest.parent or package.digest}",
            got=made_from,
            cure="Name the run whose output the package is, or leave the optimizer to begin anew.",
        )
    return str(usable.path)


def versions() -> dict[str, str]:
    """Of python, trainload, torch and ray: what a run is launched with; without what is not installed."""
    found = {"python": platform.python_version(), "trainload": trainload.__version__}
    for name in ("torch", "ray"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextmanager
def checked(
    package: Package, plan: Plan, data: Data, options: RunOptions, *, least_steps: int = 1
) -> Iterator[tuple[RunSpec, tuple[int, int | None]]]:
    """The run that is asked for, once its package may be run and fits plan and data; and what `check_rows` returns. It has
    `least_steps` at least.

    Within it the run is made, or the files of its data go that were made for it.
    """
    check_options(options, RunOptions)
    if not options.get("run_dir"):
        raise RequestError("is missing", where="run_dir", expected="a folder for the run", cure="Give it: run_dir='runs/first'.")
    eval_data, backend = options.get("eval_data"), options.get("backend", "ray")
    check_backend(backend, options.get("address"))
    run_dir = Path(options["run_dir"]).absolute()
    check_sinks(options.get("sinks", ()), backend)
    if leads(backend) and not (options.get("address") or "").startswith(("http://", "https://")):  # the sinks of a job are its cluster's
        check_sink_libraries(options.get("sinks", ()))
    given = in_files(data, eval_data, run_dir, alone=backend != "torchrun")
    spec = spec_of(package, plan, given, options)
    if spec.steps < least_steps:
        raise RequestError("a run has one step at least", where="steps", expected="1 or more", got=f"{spec.steps}", cure="Use evaluate.")
    check_runnable(package, spec.policies)
    check_package(package, spec)
    if leads(backend):  # torchrun's other ranks may find it made already
        check_place(package, spec)
    with written(given, run_dir):
        yield spec, check_rows(package, spec)


def _in_order(plan: Plan, others: Sequence[Plan]) -> tuple[Plan, ...]:
    """All plans of an elastic run, the smallest first; none for others. Raises: PlanError where they are not of one run."""
    if not others:
        return ()
    found = {each.world_size: each for each in (*others, plan)}
    for each in found.values():
        another_plan(each, plan, None, None)
    return tuple(found[world] for world in sorted(found))


def another_plan(plan: Plan, before: Plan, workers: int | None, strategy: Strategy | None) -> Plan:
    """A plan for a run that has had another one.

    Raises: PlanError: the run's losses would be others; workers or strategy are given beside it.
    """
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


def check_package(package: Package, spec: RunSpec) -> None:
    """Everything that can be known of package and plans before anything starts."""
    check_weights(package)
    package.check_contents()
    frozen, package = package, spec.overrides.apply(package, spec.steps)
    for each in spec.plans or (spec.plan,):
        if each.package == frozen.digest != package.digest:
            raise PlanError(
                "the plan is for the package as it was frozen, and the run changes its graphs",
                where="plan.package",
                expected=package.digest,
                got=each.package,
                cure="Make it with the same settings: trainload plan --set, or trainload.plan(overrides.apply(package), ...).",
            )
        check_plan(each, package)


def check_rows(package: Package, spec: RunSpec) -> tuple[int, int | None]:
    """Everything that can be known of the data. Returns: rows of the data and of the held-out data."""
    if spec.eval_data is None and (spec.eval_every is not None or spec.eval_batches is not None):
        raise DataError("an evaluation was asked for without held-out data", where="eval_data", cure="Give --eval-data.")
    package = spec.overrides.apply(package, spec.steps)
    count = spec.plan.rows_per_call
    rows = check_run_data(spec.data, package, count)
    eval_rows = check_run_data(spec.eval_data, package, count) if spec.eval_data is not None else None
    return rows, eval_rows


def check_backend(backend: Backend, address: str | None) -> None:
    """Raises: ClusterError: there is none of this name; RequestError: it has no cluster that could have this address."""
    if backend not in get_args(Backend):
        raise ClusterError("no such backend", expected=" or ".join(get_args(Backend)), got=str(backend))
    if backend != "ray" and address is not None:
        raise RequestError("an address is one of a Ray cluster", where="address", got=f"backend {backend}", cure="Leave one of them out.")


def leads(backend: Backend) -> bool:
    """Whether this process makes the run's folder, and writes what comes of it: the only one, or torchrun's rank 0."""
    if backend != "torchrun":
        return True
    from trainload.launching.local_run import torchrun_place

    return torchrun_place().rank == 0


def check_place(package: Package, spec: RunSpec) -> None:
    """Check that a new run can be made, with room for its checkpoints and for the one that is written beside them. What must be
    written later is tried now.
    """
    check_new_run(Path(spec.run_dir))
    place = place_of(Path(spec.run_dir), spec.checkpoints)
    place.check_new()
    check_output(spec, new=True)
    package = spec.overrides.apply(package, spec.steps)
    states, mean = state_counts(package), package.recipe.keeps_mean
    one = sum(b.length * item_bytes(b.dtype) * (1 + kept_per_element(b, states, mean)) for b in spec.plan.buckets)
    spacing = spec.checkpoint_every
    count = 1 if spacing is None else spec.retention.most(spec.steps // spacing, spacing) + 1
    free = place.free_bytes()
    if free is not None and free < count * one:
        raise StorageError(
            "the disk has no room for the run's checkpoints",
            where=place.where,
            expected=f"{count} x {one:,} bytes",
            got=f"{free:,} bytes free",
            cure="Make room, keep fewer checkpoints, or choose another place for them.",
        )
