"""The command line.

Exit status: 0 done, 1 the work failed, 2 the request was wrong. Results go to stdout; progress and errors go to stderr. With
`--json` stdout holds exactly one JSON value, for an error `{"error": {...}}`.

torch is imported by the commands, not by this module, so that `--help` and wrong options answer at once.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from rich.console import Console

import trainload
from trainload import view
from trainload.capture.errors import CaptureError, PackageError, PlanError, RequestError, RunInterrupted, StorageError, TrainloadError
from trainload.capture.versions import demand_supported_torch

if TYPE_CHECKING:
    from trainload.api import Backend
    from trainload.packaging.manifest import Manifest
    from trainload.packaging.read import Package
    from trainload.sharding.plan import Plan, Strategy

Command = TypeVar("Command", bound=Callable[..., Any])

DONE, FAILED, WRONG = 0, 1, 2
STRATEGIES = ("single", "zero0", "zero1", "zero3")

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
package_argument = click.argument("package", metavar="PKG", type=click.Path(path_type=Path))
positive = click.IntRange(min=1)


def device_option(command: Command) -> Command:
    """Add --device."""
    return click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Kind of device.")(command)


def backend_option(command: Command) -> Command:
    """Add --backend."""
    choices = click.Choice(["ray", "local", "torchrun"])
    return click.option("--backend", type=choices, default="ray", show_default=True, help="What runs it.")(command)


def strategy_option(command: Command) -> Command:
    """Add --strategy."""
    return click.option("--strategy", type=click.Choice(STRATEGIES), metavar="S", help=f"One of {', '.join(STRATEGIES)}.")(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(trainload.__version__, prog_name="trainload", message="%(prog)s %(version)s")
def commands() -> None:
    """Freeze a PyTorch training job; choose the parallelism at launch.

    \b
      trainload freeze job.py:job -o gpt.tl
      trainload launch gpt.tl --data train.parquet --workers 2 --strategy zero3

    The code that wrote the model is not needed after the freeze.

    Exit status: 0 done, 1 the work failed, 2 the request was wrong.
    """


@commands.command(short_help="Write a job's package.")
@click.argument("spec")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="PKG", help="The package to write.")
@click.option("--explain-shapes", is_flag=True, help="First print what each dim may be, and why.")
@click.option("--apply-suggested-fixes", is_flag=True, help="Declare the sizes that torch suggests.")
@json_option
def freeze(spec: str, output: Path, explain_shapes: bool, apply_suggested_fixes: bool, as_json: bool) -> None:
    """Write the package of the job that SPEC names.

    SPEC is path/to/file.py:name or package.module:name, where name is a trainload.Job or a function that returns one. The
    captured graphs are compared with eager PyTorch, loss and every gradient, before anything is written.

    The table of --explain-shapes is printed even where torch then refuses the sizes.
    """
    if output.exists():
        raise StorageError("it exists already", where=str(output), cure="Choose another path, or remove it.")
    demand_supported_torch()
    began = time.perf_counter()
    from trainload.spec import load_job

    with redirect_stdout(sys.stderr):  # the job's own code may print
        job = load_job(spec)
        from trainload import api

        shapes = api.explain_shapes(job) if explain_shapes else None
    if shapes is not None and not as_json:
        view.print_shapes(_out(), shapes)
    fixes: list[Any] = []
    with redirect_stdout(sys.stderr):
        package = api.freeze(job, output, apply_suggested_fixes=apply_suggested_fixes, on_fix=fixes.append)
    seconds = time.perf_counter() - began
    if as_json:
        explained = {} if shapes is None else {"shapes": shapes}
        applied = {"fixes": fixes} if apply_suggested_fixes else {}
        _print_json({"package": output, "digest": package.digest, "seconds": seconds, **explained, **applied})
    else:
        rows: list[tuple[str, Any]] = [("package", str(output)), ("digest", package.digest), ("seconds", seconds)]
        _out().print(view.table([*rows, *(("applied", str(fix)) for fix in fixes)]))


@commands.command(short_help="Say what a package holds.")
@package_argument
@json_option
def inspect(package: Path, as_json: bool) -> None:
    """Say what a package holds: its inputs, parameters, graphs and recipe."""
    opened = _open(package)
    manifest = opened.manifest
    if as_json:
        _print_json({"path": package, "digest": opened.digest, "manifest": manifest})
        return
    _out().print(view.table(_summary(package, opened.digest, manifest)))


@commands.command(short_help="Check every byte of a package.")
@package_argument
@json_option
def verify(package: Path, as_json: bool) -> None:
    """Check every byte of a package against its manifest, and its graphs.

    Exits with 1 where the package is damaged or unsafe, and names each file.
    """
    if not package.exists():
        raise PackageError("there is no such package", where=str(package))
    demand_supported_torch()
    from trainload.packaging.verify import verify_package

    report = verify_package(package)
    if as_json:
        _print_json(report)
    elif not report.problems:
        sound = f"{package}: {report.files} files, {view.size(report.bytes)}: every byte is what the manifest says"
        _out().print(sound, markup=False, highlight=False, soft_wrap=True)
    else:
        for problem in report.problems:
            _err().print(f"{package / problem.file}: {problem.problem}", markup=False, highlight=False, soft_wrap=True)
    if report.problems:
        raise click.exceptions.Exit(FAILED)


@commands.command(short_help="Spread a package over a cluster.")
@package_argument
@click.option("--nodes", type=positive, metavar="N", default=1, help="Nodes of the cluster. Default: 1.")
@click.option("--devices-per-node", type=positive, metavar="N", default=1, help="Devices of each node. Default: 1.")
@device_option
@strategy_option
@click.option("--global-batch", type=positive, metavar="N", help="Rows of one update. Default: the job's.")
@click.option("--accumulate", type=positive, metavar="N", default=1, help="Microbatches of one update. Default: 1.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Where to write the plan, as JSON.")
@json_option
def plan(
    package: Path,
    nodes: int,
    devices_per_node: int,
    device: str,
    strategy: Strategy | None,
    global_batch: int | None,
    accumulate: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Spread a package over a cluster of a given shape. Needs no cluster.

    The plan is data: buckets, placements and an estimate of memory and traffic.
    """
    if output is not None and output.exists():
        raise StorageError("it exists already", where=str(output), cure="Choose another path, or remove it.")
    made = _make_plan(_open(package), nodes, devices_per_node, device, strategy, global_batch=global_batch, accumulate=accumulate)
    if output is not None:
        _write_text(output, made.model_dump_json(indent=2) + "\n")
    if as_json:
        _print_json(made)
        return
    rows: list[tuple[str, Any]] = [
        ("cluster", f"{nodes} x {devices_per_node} {device}"),
        ("strategy", made.strategy),
        ("batch", f"{made.global_batch} rows = {made.world_size} ranks x {made.accumulate} microbatches x {made.rows_per_call} rows"),
        ("buckets", len(made.buckets)),
        *view.as_json(made.estimate).items(),
    ]
    if output is not None:
        rows.append(("plan", str(output)))
    _out().print(view.table(rows))


@commands.command(short_help="Train a package.")
@package_argument
@click.option("--data", required=True, metavar="PATH", help="Training data: Parquet or npz.")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), metavar="FILE", help="A plan that `trainload plan` wrote.")
@click.option("--workers", type=positive, metavar="N", help="Without a plan: workers. Default: 1.")
@strategy_option
@device_option
@click.option("--steps", type=positive, metavar="N", help="Updates. Default: the job's.")
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="What the run keeps. Default: in runs/.")
@click.option("--eval-data", metavar="PATH", help="Held-out data.")
@click.option("--eval-every", type=positive, metavar="N", help="Updates between two evaluations.")
@click.option("--eval-batches", type=positive, metavar="N", help="Batches of one evaluation.")
@click.option("--checkpoint-every", type=positive, metavar="N", help="Updates between two checkpoints.")
@click.option("--output", type=click.Path(path_type=Path), metavar="PKG", help="Where to write the trained package.")
@backend_option
@click.option("--address", metavar="ADDRESS", help="Of a Ray cluster. Default: a local one.")
@click.option("--no-compile", is_flag=True, help="Run the graphs uncompiled.")
@click.option("--max-failures", type=click.IntRange(min=0), metavar="N", default=3, help="Restarts of a run. Default: 3.")
@click.option("--dry-run", is_flag=True, help="Check everything, start nothing.")
@json_option
def launch(
    package: Path,
    data: str,
    plan_file: Path | None,
    workers: int | None,
    strategy: Strategy | None,
    device: str,
    steps: int | None,
    run_dir: Path | None,
    eval_data: str | None,
    eval_every: int | None,
    eval_batches: int | None,
    checkpoint_every: int | None,
    output: Path | None,
    backend: Backend,
    address: str | None,
    no_compile: bool,
    max_failures: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train a package, on Ray unless told otherwise."""
    if plan_file is not None and (workers is not None or strategy is not None):
        raise click.UsageError("--plan says how many workers and which strategy: leave out --workers and --strategy.")
    if backend == "torchrun" and run_dir is None:
        raise click.UsageError("--backend torchrun needs --run-dir: all ranks must name the same folder.")
    opened = _open(package)
    if workers is None and backend == "torchrun":
        workers = int(os.environ.get("WORLD_SIZE", "1"))
    made = _read_plan(plan_file) if plan_file is not None else _make_plan(opened, 1, workers or 1, device, strategy)
    run_dir = run_dir or Path("runs") / f"{package.stem}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    options: dict[str, Any] = {
        "run_dir": run_dir.absolute(),
        "steps": steps,
        "eval_data": eval_data,
        "eval_every": eval_every,
        "eval_batches": eval_batches,
        "checkpoint_every": checkpoint_every,
        "output": output.absolute() if output is not None else None,
        "backend": backend,
        "address": address,
        "compile": not no_compile,
        "max_failures": max_failures,
    }
    from trainload import api

    if dry_run:
        with redirect_stdout(sys.stderr):
            report = api.dry_run(opened, made, data, **options)
        _show(report, as_json)
        return
    result = _watch(lambda report: api.launch(opened, made, data, **options, on_event=report), run_dir)
    if _leads(backend):
        _show(result, as_json)


@commands.command(short_help="Continue a run that was interrupted.")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--workers", type=positive, metavar="N", help="Workers. Default: as before.")
@strategy_option
@backend_option
@click.option("--address", metavar="ADDRESS", help="Of a Ray cluster. Default: a local one.")
@json_option
def resume(run_dir: Path, workers: int | None, strategy: Strategy | None, backend: Backend, address: str | None, as_json: bool) -> None:
    """Continue a run from its last checkpoint, on as many workers as there are now."""
    if not run_dir.is_dir():
        raise StorageError("there is no such run", where=str(run_dir), cure="Give the folder that `trainload launch --run-dir` was given.")
    demand_supported_torch()
    from trainload import api

    def work(report: Callable[[view.Event], None]) -> Any:
        return api.resume(run_dir.absolute(), workers=workers, strategy=strategy, backend=backend, address=address, on_event=report)

    result = _watch(work, run_dir)
    if _leads(backend):
        _show(result, as_json)


def _leads(backend: Backend) -> bool:
    """Whether this process says what came of a run: the only one, or torchrun's rank 0."""
    return backend != "torchrun" or os.environ.get("RANK", "0") == "0"


def _open(path: Path) -> Package:
    if not path.exists():
        raise PackageError("there is no such package", where=str(path))
    demand_supported_torch()
    from trainload import api

    return api.open(path)


def _make_plan(package: Package, nodes: int, devices: int, device: str, strategy: Strategy | None, **options: Any) -> Plan:
    from trainload import api
    from trainload.sharding.plan import Cluster

    cluster = Cluster.model_validate({"nodes": nodes, "devices_per_node": devices, "device": device})
    return api.plan(package, cluster, strategy, **options)


def _read_plan(path: Path) -> Plan:
    from pydantic import ValidationError

    from trainload.sharding.plan import Plan

    if not path.is_file():
        raise PlanError("there is no such plan", where=str(path), cure="Make one: trainload plan PKG -o FILE.")
    try:
        return Plan.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PlanError(f"this is not a plan: {place}: {first['msg']}", where=str(path)) from error


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"it cannot be written: {error.strerror}", where=str(path)) from error


def _watch(work: Callable[[Callable[[view.Event], None]], Any], run_dir: Path) -> Any:
    """Do `work` in view of the user. Ctrl-C ends it and says how to go on."""
    try:
        with view.RunView(_err()) as report, redirect_stdout(sys.stderr):  # Ray prints there when a worker dies
            return work(report)
    except KeyboardInterrupt:
        begun = (run_dir / "run.json").exists()
        cure = f"Continue with: trainload resume {shlex.quote(str(run_dir))}" if begun else "It had not begun: launch it again."
        raise RunInterrupted("the run was interrupted", where=str(run_dir), cure=cure) from None


def _summary(path: Path, digest: str, manifest: Manifest) -> list[tuple[str, Any]]:
    tensors = [p for p in manifest.parameters if p.alias_of is None]
    aliases = len(manifest.parameters) - len(tensors)
    count = sum(_product(p.shape) for p in tensors)
    frozen = sum(_product(p.shape) for p in tensors if not p.trainable)
    recipe = manifest.recipe
    inputs = manifest.graphs["train"].inputs
    rows: list[tuple[str, Any]] = [
        ("package", str(path)),
        ("digest", digest),
        ("parameters", f"{count:,} in {len(tensors)} tensors" + (f", {aliases} tied" if aliases else "")),
        ("inputs", ", ".join(f"{i.name} {i.dtype}[{', '.join(str(n) for n in i.shape)}]" for i in inputs)),
        ("graphs", ", ".join(manifest.graphs)),
        ("optimizer", f"{recipe.optimizer}, {len(recipe.groups)} groups"),
        ("run", f"{recipe.steps} steps of {recipe.global_batch} rows, seed {recipe.seed}"),
        ("operators", len(manifest.ops) + len(manifest.higher_order_ops)),
        ("bytes", sum(entry.size for entry in manifest.files.values())),
    ]
    if frozen:
        rows.insert(3, ("frozen", f"{frozen:,} parameters"))
    if recipe.clip_norm is not None:
        rows.insert(-2, ("clipping", f"gradient norm {recipe.clip_norm}"))
    if manifest.parent is not None:
        rows.append(("parent", manifest.parent))
    return rows


def _product(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _show(result: Any, as_json: bool) -> None:
    if as_json:
        _print_json(result)
    else:
        _out().print(view.record_table(result))


def _out() -> Console:
    return Console(file=sys.stdout)


def _err() -> Console:
    return Console(file=sys.stderr)


def _print_json(value: Any) -> None:
    sys.stdout.write(view.dump_json(value) + "\n")


def _report(arguments: Sequence[str], kind: str, message: str, status: int, **details: object) -> int:
    """Say what went wrong, once: on stderr one line, a page if it has findings; or with --json an object on stdout. Returns `status`."""
    if "--json" in arguments:
        _print_json({"error": {"kind": kind, "message": message, "exit": status, **{k: v for k, v in details.items() if v}}})
    else:
        sys.stderr.write(f"trainload: {message if details.get('findings') else ' '.join(message.split())}\n")
    return status


def run(arguments: Sequence[str]) -> int:
    """Run one command line, without the program's name. Returns the exit status."""
    try:
        status = commands.main(list(arguments), prog_name="trainload", standalone_mode=False)
    except TrainloadError as error:
        status = WRONG if isinstance(error, RequestError) else FAILED
        details: dict[str, object] = {"where": error.where, "expected": error.expected, "got": error.got, "cure": error.cure}
        if isinstance(error, CaptureError):
            details["findings"] = [finding.as_json() for finding in error.findings]
        return _report(arguments, type(error).__name__, str(error), status, problem=error.problem, **details)
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(error.format_message() + "\n")
        return WRONG
    except click.ClickException as error:
        return _report(arguments, "UsageError", error.format_message(), WRONG)
    except click.Abort:
        return _report(arguments, "Interrupted", "interrupted", FAILED)
    return status if isinstance(status, int) else DONE


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:]))
