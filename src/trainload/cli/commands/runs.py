"""Commands that start and continue runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainload.cli.commands import shared
from trainload.cli.commands.execution import hold_until_end
from trainload.cli.commands.keeping import kept_run, stop_with_parent
from trainload.cli.commands.overview import DenseCommand, given_arguments
from trainload.cli.commands.planning import KINDS, make_plan
from trainload.cli.commands.run_handover import detach_run, keep_run
from trainload.cli.commands.shared import (
    DONE,
    Command,
    CountOf,
    HintedUsage,
    LocalPath,
    OneOf,
    Place,
    RunPlace,
    Span,
    data_option,
    driven_run_argument,
    err,
    json_option,
    positive,
    set_option,
    show_record,
)
from trainload.cli.view import run_progress as run_view
from trainload.core.errors import RunInterrupted, StorageError
from trainload.core.processes import interrupted_by_signals
from trainload.core.suggestions import did_you_mean
from trainload.core.versions import check_ray_installed, check_supported_torch
from trainload.launching.run.run_directory import (
    RUN_FILE,
    RunFolder,
    removed_unless_kept,
    resume_command,
)
from trainload.launching.run.run_place import place_name, url_of
from trainload.launching.settings.info import description_of, info_of
from trainload.launching.settings.parse import GivenSettings, parse_settings
from trainload.launching.settings.run_settings import BatchSettings, EvaluationSettings, RunSettings
from trainload.packaging.stores.references import run_name
from trainload.sharding.plans.strategies import STRATEGIES

if TYPE_CHECKING:
    from trainload.launching.api.request import Backend
    from trainload.launching.run.journal import Event
    from trainload.packaging.package import Package
    from trainload.sharding.plans.strategies import Strategy


def backend_option(command: Command) -> Command:
    """Add --backend."""
    choices = OneOf(["ray", "local", "torchrun"])
    return click.option(
        "--backend", type=choices, default="ray", show_default=True, help="Execution backend."
    )(command)


def strategy_option(command: Command) -> Command:
    """Add --strategy."""
    return click.option(
        "--strategy",
        type=OneOf(STRATEGIES),
        metavar="S",
        help="single, zero0 to zero3, or hybrid.",
    )(command)


def plan_options(command: Command) -> Command:
    """Add --plan, and the options of a plan that is made for the run: --workers and --strategy."""
    plan_option = click.option(
        "--plan",
        "plan_file",
        type=LocalPath(),
        metavar="FILE",
        help="Plan from `trainload plan`.",
    )
    workers_option = click.option(
        "--workers", type=CountOf(KINDS), metavar="N[/cuda]", help="Devices per node. Default: 1."
    )
    return plan_option(workers_option(strategy_option(command)))


def weights_options(command: Command) -> Command:
    """Add --weights and --partial-weights."""
    weights_option = click.option(
        "--weights",
        "weights_from",
        type=Place(),
        metavar="SOURCE",
        help="Weights to begin from.",
    )
    partial_option = click.option(
        "--partial-weights", is_flag=True, help="They may lack tensors or have others."
    )
    return weights_option(partial_option(command))


def setting_option(name: str) -> Callable[[Command], Command]:
    """Add the option of a setting that is a positive number.

    Its help is the first sentence of the setting's description.
    """
    field = RunSettings.model_fields[name]
    text = description_of(field).partition(". ")[0].rstrip(".")
    return click.option(info_of(field).option, name, type=positive, metavar="N", help=f"{text}.")


@click.command(short_help="Train a package.", cls=DenseCommand)
@click.argument("package", metavar="PKG", type=Place())
@data_option
@plan_options
@click.option("--nodes", type=Span(), metavar="N or A:B", help="Nodes, or an elastic range.")
@setting_option("steps")
@click.option(
    "--run-dir",
    type=RunPlace(),
    metavar="DIR",
    help="Folder or URL of the run. Default: in runs/.",
)
@click.option("--eval-data", type=Place(), metavar="DATA", help="Held-out data: path or URL.")
@setting_option("eval_every")
@setting_option("checkpoint_every")
@weights_options
@click.option("--output", metavar="PKG", help="Path or URL of the trained package.")
@backend_option
@click.option("--address", metavar="ADDRESS", help="Ray cluster (host:port). Default: local.")
@click.option("--no-compile", is_flag=True, help="Run the graphs without Inductor.")
@set_option("Setting: see `trainload settings`.")
@click.option("--detach", is_flag=True, help="Submit as a job of the cluster.")
@click.option("--dry-run", is_flag=True, help="Check everything and try one step.")
@json_option
def launch(
    package: str,
    data: str,
    plan_file: Path | None,
    workers: tuple[int, str] | None,
    strategy: Strategy | None,
    nodes: tuple[int, int] | None,
    steps: int | None,
    run_dir: Path | None,
    eval_data: str | None,
    eval_every: int | None,
    checkpoint_every: int | None,
    weights_from: str | None,
    partial_weights: bool,
    output: str | None,
    backend: Backend,
    address: str | None,
    no_compile: bool,
    assignments: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train a package, or a release STORE#LINE/N, on Ray by default."""
    if nodes is not None and nodes[1] > 1 and backend != "ray":
        raise click.UsageError(
            "--nodes requires Ray: torchrun and the local backend use the nodes that they are"
            " started on."
        )
    _check_ray(backend, address, detach=detach)
    if backend == "torchrun" and run_dir is None:
        raise click.UsageError(
            "--backend torchrun needs --run-dir: all ranks must name the same folder."
        )
    kept = kept_run()
    run_dir = (
        kept
        or run_dir
        or Path("runs") / f"{run_name(package)}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    )
    if kept is not None:
        stop_with_parent()
    elif address is not None and not (detach or dry_run or os.path.exists(run_dir / RUN_FILE)):
        return keep_run(run_dir.absolute(), address, as_json, launched=given_arguments())
    chosen = parse_settings(assignments)
    _check_one_plan(
        plan_file,
        workers,
        strategy,
        chosen,
        nodes if nodes is None or nodes[0] == nodes[1] else None,
    )
    if not detach:
        _connect_early(backend, address, (package, data), with_ranks=not dry_run)
    opened = shared.open_to_run(package)
    overrides = chosen.overrides
    changed = overrides.apply(opened, steps)
    if workers is None and backend == "torchrun":
        workers = (int(os.environ.get("WORLD_SIZE", "1")), "cpu")
    least, most = nodes or (1, 1)
    per_node, device = workers or (1, "cpu")
    if plan_file is not None:
        from trainload.sharding.plans.plan import read_plan

        plan = read_plan(plan_file)
    else:
        plan = make_plan(
            changed,
            _largest(changed, least, most, per_node, chosen),
            per_node,
            device,
            strategy,
            **chosen.batch,
        )
    options: dict[str, Any] = {
        "run_dir": run_dir.absolute(),
        "steps": steps,
        "eval_data": eval_data,
        "eval_every": eval_every,
        "checkpoint_every": checkpoint_every,
        "output": output,
        "backend": backend,
        "address": address,
        "compile": not no_compile,
        "libraries": shared.libraries(),
        "trust_extensions": shared.trusts_extensions(),
        "policy": shared.policy(),
        "overrides": overrides,
        "weights_from": weights_from,
        "partial_weights": partial_weights,
        **chosen.run,
    }
    if least < most:
        from trainload.sharding.planner.replan import plans_of_sizes

        options["plans"] = plans_of_sizes(changed, plan, range(least, most + 1))
    from trainload.launching.api import launch as launching

    if dry_run:
        with redirect_stdout(sys.stderr):
            report = launching.dry_run(opened, plan, data, **options)
        show_record(report, as_json)
        return DONE
    if detach:
        assert address is not None, "as _check_ray says"
        with removed_unless_kept(run_dir.absolute()) as folder:
            launching.prepare(opened, plan, data, **options)
            folder.is_created = True
            return detach_run(folder, address, as_json)
    result = _watch(
        lambda report: launching.launch(opened, plan, data, **options, on_event=report), run_dir
    )
    if _leads(backend):
        show_record(result, as_json)
    return DONE


@click.command(short_help="Evaluate a package.")
@click.argument("package", metavar="PKG", type=Place())
@data_option
@plan_options
@click.option("--nodes", type=positive, metavar="N", help="Number of nodes. Default: 1.")
@click.option(
    "--batches",
    "eval_batches",
    type=positive,
    metavar="N",
    help="Maximum number of global batches.",
)
@click.option(
    "--run-dir",
    type=RunPlace(),
    metavar="DIR",
    help="Folder or URL to keep; required with --address.",
)
@click.option(
    "--backend",
    type=OneOf(["ray", "local"]),
    default="ray",
    show_default=True,
    help="Execution backend.",
)
@click.option("--address", metavar="ADDRESS", help="Ray cluster (host:port). Default: local.")
@click.option("--no-compile", is_flag=True, help="Run the graphs without Inductor.")
@set_option("Setting, such as precision=bf16.")
@weights_options
@json_option
def evaluate(
    package: str,
    data: str,
    plan_file: Path | None,
    workers: tuple[int, str] | None,
    strategy: Strategy | None,
    nodes: int | None,
    eval_batches: int | None,
    run_dir: Path | None,
    backend: Backend,
    address: str | None,
    no_compile: bool,
    assignments: tuple[str, ...],
    weights_from: str | None,
    partial_weights: bool,
    as_json: bool,
) -> None:
    """Evaluate a package, or a release STORE#LINE/N, on rows: every row once, under any plan."""
    _check_ray(backend, address)
    chosen = parse_settings(assignments)
    settings = _of_an_evaluation(chosen)
    if (
        eval_batches is not None
        and settings.setdefault("eval_batches", eval_batches) != eval_batches
    ):
        raise click.UsageError(
            "--batches and --set eval_batches have different values: pass only one of them."
        )
    _check_one_plan(plan_file, workers, strategy, chosen, nodes)
    _connect_early(backend, address, (package, data))
    opened = shared.open_to_run(package)
    per_node, device = workers or (1, "cpu")
    changed = chosen.overrides.apply(opened)
    from trainload.sharding.plans.plan import read_plan

    plan = (
        read_plan(plan_file)
        if plan_file is not None
        else make_plan(changed, nodes or 1, per_node, device, strategy, **chosen.batch)
    )
    from trainload.launching.api import evaluate as evaluating

    with redirect_stdout(sys.stderr), shared.working("evaluating"):
        result = evaluating.evaluate(
            opened,
            plan,
            data,
            run_dir=run_dir,
            overrides=chosen.overrides,
            compile=not no_compile,
            backend=backend,
            address=address,
            libraries=shared.libraries(),
            trust_extensions=shared.trusts_extensions(),
            weights_from=weights_from,
            partial_weights=partial_weights,
            policy=shared.policy(),
            **settings,
        )
    show_record(result, as_json)


def _connect_early(
    backend: Backend, address: str | None, needed: Sequence[str], *, with_ranks: bool = True
) -> None:
    """Begin to connect to the run's cluster, until the end of this command.

    Not if that would be in vain: one of the paths that the command needs does not exist. Nor if
    torch is imported already, since then what follows takes less time than a cluster.
    """
    if backend == "ray" and "torch" not in sys.modules and all(map(_may_exist, needed)):
        from trainload.launching.cluster.connection import connecting_early

        click.get_current_context().with_resource(interrupted_by_signals())
        hold_until_end(connecting_early(address, with_ranks=with_ranks))


def _may_exist(source: str) -> bool:
    """Return False if a path does not exist.

    What may be something else than a path is not looked up: a URL, a function (python:...), a
    release in a store, a pattern.
    """
    return ":" in source or "#" in source or has_magic(source) or os.path.exists(source)


def _of_an_evaluation(chosen: GivenSettings) -> dict[str, Any]:
    """Return the settings of a run that an evaluation has as well.

    Raises: UsageError: another one is given.
    """
    known = {
        *(
            name
            for name, field in EvaluationSettings.model_fields.items()
            if not info_of(field).option
        ),
        "precision",
        "seed",
    }
    known.remove("overrides")
    wrong = next(
        (
            name
            for name in (*chosen.run, *sorted(chosen.overrides.model_fields_set))
            if name not in known
        ),
        None,
    )
    if wrong is not None:
        names = sorted({*known, *BatchSettings.model_fields})
        problem = f"an evaluation has no such setting; available: {', '.join(names)}."
        raise HintedUsage(f"--set {wrong}: {problem}", did_you_mean(wrong, names))
    return dict(chosen.run)


def _largest(package: Package, least: int, most: int, per_node: int, chosen: GivenSettings) -> int:
    """Return the largest number of nodes for which a run can be planned.

    The plans of the other sizes are derived from that plan.
    """
    if least == most:
        return most
    from trainload.sharding.planner.replan import largest_size

    return largest_size(package, range(least, most + 1), per_node, **chosen.batch)


def _check_ray(backend: Backend, address: str | None, *, detach: bool = False) -> None:
    """Check that Ray is installed if it is the backend, and has no options of it if it is not."""
    if backend != "ray" and (address is not None or detach):
        raise click.UsageError(
            f"{'--detach' if detach else '--address'} requires Ray: omit it, or omit --backend"
            f" {backend}."
        )
    if detach != (address or "").startswith(("http://", "https://")):
        raise click.UsageError(
            "--detach and the --address of a cluster's dashboard, http://HOST:8265, must be used"
            " together."
        )
    if backend == "ray":
        check_ray_installed()


def _check_one_plan(
    plan_file: Path | None,
    workers: tuple[int, str] | None,
    strategy: Strategy | None,
    chosen: GivenSettings,
    nodes: int | tuple[int, int] | None,
) -> None:
    """Check that no option is given that the plan decides.

    `nodes`: a number of them, not a range.
    """
    if plan_file is not None and (workers is not None or strategy is not None):
        raise click.UsageError(
            "--plan sets the workers and the strategy: omit --workers and --strategy."
        )
    if plan_file is not None and nodes is not None:
        raise click.UsageError(
            "--plan sets the number of nodes: omit --nodes, or make a plan for them."
        )
    if plan_file is not None and chosen.batch:
        raise click.UsageError(f"--plan sets {' and '.join(chosen.batch)}: omit it from --set.")


@click.command(short_help="Continue a run.")
@driven_run_argument
@click.option(
    "--workers", type=positive, metavar="N", help="Number of workers. Default: as before."
)
@strategy_option
@click.option(
    "--plan",
    "plan_file",
    type=LocalPath(),
    metavar="FILE",
    help="Another plan, instead of both.",
)
@backend_option
@click.option("--address", metavar="ADDRESS", help="Ray cluster (host:port). Default: local.")
@set_option("Change a setting: see `trainload settings`.")
@click.option("--detach", is_flag=True, help="Submit as a job of the cluster.")
@json_option
def resume(
    run_dir: Path,
    workers: int | None,
    strategy: Strategy | None,
    plan_file: Path | None,
    backend: Backend,
    address: str | None,
    assignments: tuple[str, ...],
    detach: bool,
    as_json: bool,
) -> int:
    """Continue a run from its last checkpoint, on the same or another number of workers."""
    from trainload.launching.run.working_copy import RunFiles, has_run

    if not (run_dir.is_dir() if url_of(run_dir) is None else has_run(run_dir)):
        raise StorageError(
            "there is no such run",
            where=place_name(run_dir),
            hint="Pass what was passed to `trainload launch --run-dir`.",
        )
    _check_ray(backend, address, detach=detach)
    check_supported_torch()
    changes = _changes(assignments)
    if kept_run() is not None:
        stop_with_parent()
    elif backend == "ray" and address is not None:
        from trainload.launching.run.driver import check_no_driver

        RunFiles(run_dir, journal=False).update()
        check_no_driver(run_dir)
        if changes:
            from trainload.launching.api.launch import change

            change(run_dir.absolute(), RunSettings(**changes))
        asked = {
            "--workers": workers,
            "--strategy": strategy,
            "--plan": None if plan_file is None else plan_file.absolute(),
        }
        others = [
            word
            for option, value in asked.items()
            if value is not None
            for word in (option, str(value))
        ]
        if detach:
            return detach_run(RunFolder(run_dir.absolute()), address, as_json, others)
        return keep_run(run_dir.absolute(), address, as_json, others=others)
    _connect_early(backend, address, (str(run_dir),))
    from trainload.sharding.plans.plan import read_plan

    plan = read_plan(plan_file) if plan_file is not None else None
    from trainload.launching.api import launch as launching

    def work(report: Callable[[Event], None]) -> Any:
        place = run_dir.absolute()
        options: dict[str, Any] = {
            "workers": workers,
            "strategy": strategy,
            "plan": plan,
            **changes,
        }
        return launching.resume(
            place,
            **options,
            backend=backend,
            address=address,
            policy=shared.policy(),
            on_event=report,
        )

    result = _watch(work, run_dir)
    if _leads(backend):
        show_record(result, as_json)
    return DONE


def _changes(assignments: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of a run that `--set` changes."""
    chosen = parse_settings(assignments, resuming=True)
    return {
        **chosen.run,
        **({"overrides": chosen.overrides} if chosen.overrides.model_fields_set else {}),
    }


def _leads(backend: Backend) -> bool:
    """Return True if this process prints the result of a run: the only one, or torchrun's rank
    0.
    """
    return backend != "torchrun" or os.environ.get("RANK", "0") == "0"


def _watch(work: Callable[[Callable[[Event], None]], Any], run_dir: Path) -> Any:
    """Run `work` with progress on the terminal. Ctrl-C stops it and prints how to continue."""
    try:
        # Ray prints there when a worker dies
        with run_view.RunView(err(), run_dir) as report, redirect_stdout(sys.stderr):
            return work(report)
    except KeyboardInterrupt:
        begun = os.path.exists(run_dir / RUN_FILE)
        hint = (
            f"Continue with: {resume_command(run_dir)}"
            if begun
            else "It had not started: launch it again."
        )
        raise RunInterrupted(
            "the run was interrupted", where=place_name(run_dir), hint=hint
        ) from None
