"""Requests for runs, and all checks of a run that are possible before anything is started."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, SkipValidation

from trainload.core.errors import (
    CheckpointError,
    ClusterError,
    DataError,
    PlanError,
    RequestError,
    StorageError,
)
from trainload.core.storage.places import absolute_place, is_url, local_path
from trainload.core.suggestions import did_you_mean
from trainload.core.versions import VERSION, check_ray_installed
from trainload.launching.checkpoints.checkpoint_place import place_of, whole_place
from trainload.launching.checkpoints.reader import Checkpoint, usable_checkpoint
from trainload.launching.data.made_data import Data, InFiles, in_files, written
from trainload.launching.data.run_data import check_run_data
from trainload.launching.node.libraries import absolute, check_runnable
from trainload.launching.run.given_weights import given_weights, with_given
from trainload.launching.run.journal import Event
from trainload.launching.run.result import check_output
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_spec import RunSpec, at_place, check_new_run, read_spec
from trainload.launching.run.working_copy import viewed, working_copy
from trainload.launching.settings.run_settings import RunSettings, Settings
from trainload.launching.sinks.installed_sinks import check_sink_libraries, check_sinks
from trainload.packaging.libraries.op_libraries import Libraries
from trainload.packaging.package import Package, check_weights
from trainload.packaging.signatures.policy import find_policies
from trainload.packaging.weight_sources.weight_source import source_of_weights
from trainload.sharding.planner.check_plan import check_plan
from trainload.sharding.plans.buckets import item_bytes
from trainload.sharding.plans.estimate import kept_per_element, state_counts
from trainload.sharding.plans.plan import Plan
from trainload.sharding.plans.strategies import Strategy

Backend = Literal["ray", "local", "torchrun"]


class ExecutionOptions(Settings):
    """Options for the execution and observation of a run."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    backend: Annotated[Backend, SkipValidation()] = "ray"
    """`ray`; `local`: one worker in this process; `torchrun`: this process is one of torchrun's."""
    address: str | None = None
    """Address of a Ray cluster.

    Default: the one that this process is connected to, or a local one for this run.
    """
    policy: str | Path | None = None
    """Policy file (docs/guides/trust.md), in addition to those of the machine and the environment:
    the package must satisfy all of them.
    """
    on_event: Callable[[Event], None] | None = None
    """Receives every event of the run's journal."""


class PackageOptions(Settings):
    """Operators that a package may call, and its weights."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    libraries: Libraries = Field(default_factory=dict)
    """Custom operator libraries (see `open`). Every worker imports them."""
    trust_extensions: bool = False
    """True to load the operator libraries that the package contains (see `open`).

    Every worker loads them.
    """
    weights_from: str | Path | None = None
    """Source of the weights, in place of the package's: a safetensors file, a folder of such files
    (as from Hugging Face), a checkpoint of torch.distributed.checkpoint, a package, or a release.
    "init" computes the model's first values, with the run's seed. Each rank reads, or computes, its
    part.
    """
    partial_weights: bool = False
    """True if `weights_from` may lack tensors, which keep the package's values, and have others."""


class RunRequest(RunSettings, ExecutionOptions, PackageOptions):
    """Options of `launch` and `dry_run`, in addition to the package, the plan and the data."""

    run_dir: str | Path
    """Folder of the run (journal, checkpoints), on storage that all nodes share, or its URL.

    There must be no run in it.
    """
    eval_data: Annotated[Data | None, SkipValidation()] = None
    """Held-out data: evaluated before the first step and after the last one."""
    output: str | Path | None = None
    """Path or URL of the package with the trained weights."""
    plans: Sequence[Plan] = ()
    """Plans of the package for other numbers of ranks, with the same global batch
    (`plans_of_sizes`): the run uses the largest that there are nodes for, at its start and whenever
    nodes are lost or added. On Ray.
    """


def spec_of(
    package: Package,
    plan: Plan,
    data: InFiles,
    request: RunRequest,
    folder: Path,
    *,
    steps: int,
) -> RunSpec:
    """Return the requested run, in a folder or in a working copy."""
    policy, checkpoints = request.policy, request.checkpoints

    policies = find_policies(None if policy is None else Path(policy))
    partial = request.partial_weights
    given = source_of_weights(request.weights_from) or package.default_weights
    if partial and given is None:
        raise RequestError(
            "it has no effect without a source of weights",
            where="partial_weights",
            hint="Pass --weights too, or omit it.",
        )
    if given is not None and request.optimizer_from is not None:
        raise RequestError(
            "the state of an optimizer belongs to the weights of its run",
            where="optimizer_from",
            got=f"weights from {given}",
            hint="Omit one of the two.",
        )
    fields: dict[str, Any] = {name: getattr(request, name) for name in RunSettings.model_fields} | {
        "package": package.source or str(package.path),
        "plan": plan,
        "data": absolute_place(data.data),
        "made": data.made,
        "run_dir": str(folder),
        "nonce": secrets.token_hex(16),
        "checkpoints": None if checkpoints is None else whole_place(checkpoints),
        "steps": steps,
        "optimizer_from": _find_optimizer_state(request.optimizer_from, package),
        "eval_data": absolute_place(data.eval_data),
        "output": absolute_place(request.output),
        "plans": _order_plans(plan, request.plans),
        "libraries": {**dict.fromkeys(sorted(package.namespaces)), **absolute(request.libraries)},
        "trust_extensions": request.trust_extensions,
        "given": None
        if given is None
        else given_weights(
            package,
            given,
            policies,
            partial=partial,
            seed=request.overrides.seed,
        ),
        "digest": package.digest,
        "versions": versions(),
        "policies": policies,
    }
    return at_place(RunSpec(**fields), folder)


def _find_optimizer_state(source: str | Path | None, package: Package) -> str | None:
    """Return the path of the checkpoint from which a run loads its initial optimizer state.

    Raises:
        CheckpointError: there is no complete checkpoint, or it belongs to a run that did not
            produce this package.
    """
    if source is None:
        return None
    run, checkpoints = local_path(source), None
    if is_url(source):
        with viewed(source) as view:
            of_run = (view.folder / RUN_FILE).exists()
            spec = read_spec(view.folder) if of_run else None
        place = (
            place_of(Path(), whole_place(source))
            if spec is None
            else place_of(spec.run_dir, spec.checkpoints)
        )
    else:
        if (run / RUN_FILE).exists():
            checkpoints = read_spec(run.absolute()).checkpoints
        place = place_of(run.absolute(), checkpoints)
    usable = usable_checkpoint(place)
    if usable.path is None:
        raise CheckpointError(
            "there is no usable checkpoint to load the optimizer state from",
            where=str(source),
            got="; ".join(usable.rejected) or "no checkpoints",
        )
    made_from = Checkpoint.open(usable.path).index.package
    if made_from not in (package.digest, package.manifest.parent):
        raise CheckpointError(
            "the optimizer state is from a different run than the one that produced the package",
            where=str(source),
            expected=f"a run of package {package.manifest.parent or package.digest}",
            got=made_from,
            hint="Specify the run whose output the package is, or start with a fresh optimizer.",
        )
    return str(usable.path)


def versions() -> dict[str, str]:
    """Return the versions of python, trainload, torch and ray; those that are not installed are
    left out.
    """
    installed = {"python": platform.python_version(), "trainload": VERSION}
    for name in ("torch", "ray"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A requested run that can start.

    Attributes:
        spec: the run.
        package: what is trained: the frozen package with the run's overrides.
        rows, eval_rows: numbers of rows of the data and of the held-out data.
    """

    spec: RunSpec
    package: Package
    rows: int
    eval_rows: int | None


@contextmanager
def checked(
    package: Package, plan: Plan, data: Data, request: RunRequest, *, evaluates_only: bool = False
) -> Iterator[CheckedRun]:
    """Yield the requested run, once the package may be run and fits plan and data.

    The caller creates the run inside the context; if it does not, files that were written for the
    run's data are removed. With `evaluates_only` the run has zero steps.
    """
    backend = request.backend
    if not request.run_dir:
        raise RequestError(
            "is missing",
            where="run_dir",
            expected="a folder for the run",
            hint="Pass it, for example run_dir='runs/first'.",
        )
    check_backend(backend, request.address)
    check_sinks(request.sinks, backend)
    # a job uses the sinks of its cluster
    if leads(backend) and not (request.address or "").startswith(("http://", "https://")):
        check_sink_libraries(request.sinks)
    with working_copy(request.run_dir) as folder:
        files = in_files(data, request.eval_data, folder, alone=backend != "torchrun")
        steps = 0 if evaluates_only else request.steps or package.recipe.steps
        spec = spec_of(package, plan, files, request, folder, steps=steps)
        check_runnable(package, spec.policies)
        trained = check_package(package, spec)
        if leads(backend):  # torchrun's other ranks may find it made already
            check_place(trained, spec)
        with written(files, folder):
            rows, eval_rows = check_rows(trained, spec)
            yield CheckedRun(spec, trained, rows, eval_rows)


def _order_plans(plan: Plan, others: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return all plans of an elastic run, smallest first; () if the run is not elastic.

    Raises PlanError if the plans do not fit one run.
    """
    if not others:
        return ()
    by_size = {each.world_size: each for each in (*others, plan)}
    for each in by_size.values():
        another_plan(each, plan, None, None)
    return tuple(by_size[world] for world in sorted(by_size))


def another_plan(plan: Plan, before: Plan, workers: int | None, strategy: Strategy | None) -> Plan:
    """Return `plan` after checking that it can replace a run's earlier plan.

    Raises:
        PlanError: the global batch differs, which would change the run's losses; or workers or
            strategy are passed as well.
    """
    if workers is not None or strategy is not None:
        raise PlanError(
            "a plan cannot be combined with a number of workers or a strategy",
            where="resume",
            hint="Pass only the plan, which sets both.",
        )
    if plan.global_batch != before.global_batch:
        raise PlanError(
            "the plan's global batch differs from the run's",
            where="plan.global_batch",
            expected=str(before.global_batch),
            got=str(plan.global_batch),
            hint="Make a plan with the run's global batch: the losses depend on it.",
        )
    return plan


def check_package(frozen: Package, spec: RunSpec) -> Package:
    """Check a run's package and plans.

    Returns: the package that is trained: the frozen one with the run's overrides.
    """
    frozen = with_given(frozen, spec.given, spec.policies)
    check_weights(frozen)
    frozen.check_contents()
    package = with_given(spec.overrides.apply(frozen, spec.steps), spec.given, spec.policies)
    for each in spec.plans or (spec.plan,):
        if each.package == frozen.digest != package.digest:
            raise PlanError(
                "the plan was made for the unmodified package, but this run changes the package's"
                " graphs",
                where="plan.package",
                expected=package.digest,
                got=each.package,
                hint=(
                    "Make the plan with the same settings: trainload plan --set, or"
                    " trainload.plan(overrides.apply(package), ...)."
                ),
            )
        check_plan(each, package)
        if spec.cuda_graphs:
            _check_cuda_graphs(each)
    return package


def _check_cuda_graphs(plan: Plan) -> None:
    """Check that the training graphs of a plan may be recorded as CUDA graphs."""
    cannot = {
        "a cluster of CPUs": plan.cluster.device != "cuda",
        "a pipeline, whose stages keep the results of several calls": plan.pipeline is not None,
        "offload, which allocates memory of the host during a call": plan.offload > 0,
    }
    found = [what for what, is_so in cannot.items() if is_so]
    if found:
        raise RequestError(
            "calls of this plan cannot be recorded as CUDA graphs",
            where="cuda_graphs",
            expected="a plan for GPUs without a pipeline or offload",
            got=" and ".join(found),
            hint="Leave cuda_graphs at false, or make another plan.",
        )


def check_rows(package: Package, spec: RunSpec) -> tuple[int, int | None]:
    """Check the data, and return its number of rows and that of the held-out data (None if there is
    none).
    """
    if spec.eval_data is None and (spec.eval_every is not None or spec.eval_batches is not None):
        raise DataError(
            "evaluation during training needs held-out data",
            where="eval_data",
            hint="Pass --eval-data.",
        )
    count = spec.plan.rows_per_call
    rows = check_run_data(spec.data, package, count)
    eval_rows = (
        check_run_data(spec.eval_data, package, count) if spec.eval_data is not None else None
    )
    return rows, eval_rows


def check_backend(backend: Backend, address: str | None) -> None:
    """Raise ClusterError if the backend is unknown or not installed, and RequestError if an address
    is passed that it does not use.
    """
    if backend not in get_args(Backend):
        raise ClusterError(
            "no such backend",
            expected=" or ".join(get_args(Backend)),
            got=str(backend),
            hint=did_you_mean(str(backend), get_args(Backend)),
        )
    if backend != "ray" and address is not None:
        raise RequestError(
            "an address requires the Ray backend",
            where="address",
            got=f"backend {backend}",
            hint="Omit the address or the backend.",
        )
    if backend == "ray":
        check_ray_installed()


def leads(backend: Backend) -> bool:
    """Return True if this process creates the run's folder and writes its result: all but
    torchrun's ranks above 0.
    """
    if backend != "torchrun":
        return True
    from trainload.launching.worker.local_run import torchrun_place

    return torchrun_place().rank == 0


def check_place(package: Package, spec: RunSpec) -> None:
    """Check that a new run can be made, with room for its checkpoints and the one that is being
    written. package: what is trained.

    What must be written later is tried now.
    """
    check_new_run(spec.folder)
    place = place_of(spec.run_dir, spec.checkpoints)
    place.check_new()
    check_output(spec, new=True)
    states, mean = state_counts(package), package.recipe.keeps_mean
    one = sum(
        b.length * item_bytes(b.dtype) * (1 + kept_per_element(b, states, mean))
        for b in spec.plan.buckets
    )
    spacing = spec.checkpoint_every
    count = 1 if spacing is None else spec.retention.most(spec.steps // spacing, spacing) + 1
    free = place.free_bytes()
    if free is not None and free < count * one:
        raise StorageError(
            "there is not enough disk space for the run's checkpoints",
            where=place.where,
            expected=f"{count} x {one:,} bytes",
            got=f"{free:,} bytes free",
            hint="Free some disk space, keep fewer checkpoints, or store them in another place.",
        )
