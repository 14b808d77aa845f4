"""The command line.

Exit status: 0: success; 1: the work failed, or a run that had made steps was ended; 2: the request
was wrong. Results go to stdout; progress and errors go to stderr. With `--json` stdout holds
exactly one JSON value, for an error `{"error": {...}}`.

torch is imported by the commands, not by this module, so that `--help` and usage errors respond at
once.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import click

import trainload
from trainload.cli.commands import (
    builds,
    compare,
    deploy,
    exports,
    lines,
    list_settings,
    packages,
    planning,
    retrain,
    runs,
    show_graphs,
    store_commands,
    watching,
)
from trainload.cli.commands.execution import run_group
from trainload.cli.commands.manifests import trainjob as _trainjob  # noqa: F401  # adds its command
from trainload.cli.commands.observing import debugging, profiling, reporting
from trainload.cli.commands.overview import Overview
from trainload.cli.commands.setup import measuring, show_doctor, starting
from trainload.cli.commands.shared import (
    HintedUsage,
    LocalPath,
    OneOf,
    Place,
    json_option,
    new_package_option,
    working,
)
from trainload.cli.commands.shared import libraries as named_libraries
from trainload.cli.commands.shared import out as _out
from trainload.cli.commands.shared import print_json as _print_json
from trainload.cli.view import tables as view
from trainload.core.errors import StorageError
from trainload.core.logs import logs_on_stderr
from trainload.core.redaction import redacted
from trainload.core.suggestions import did_you_mean
from trainload.core.versions import check_supported_torch

if TYPE_CHECKING:
    from trainload.capture.job.definition import Job

_POLICY_COMMANDS = ("build", "evaluate", "launch", "migrate", "resume", "retrain", "verify")
"""Commands that run packages, or check that they may be run."""
_LOG_LEVELS = ("debug", "info", "warning", "error")
_LOG_VARIABLE = "TRAINLOAD_LOG_LEVEL"


@click.group(
    cls=Overview, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80}
)
@click.version_option(
    trainload.__version__,
    prog_name="trainload",
    message="%(prog)s %(version)s",
    help="Show the version and exit.",
)
@click.option(
    "--library",
    multiple=True,
    metavar="NS=MODULE",
    help="Allow the operators of the namespace NS, and import MODULE, which defines them.",
)
@click.option(
    "--trust-extensions",
    is_flag=True,
    help="Allow the operator libraries that packages bundle. Their code is run.",
)
@click.option(
    "--policy",
    type=LocalPath(),
    metavar="FILE",
    help="Policy that packages must satisfy, in addition to those of the machine.",
)
@click.pass_context
def commands(
    context: click.Context, library: tuple[str, ...], trust_extensions: bool, policy: Path | None
) -> None:  # the other options are read by commands.shared
    """Freeze a PyTorch training job; choose the parallelism at launch."""
    context.with_resource(logs_on_stderr(_log_level()))
    if policy is not None and context.invoked_subcommand not in _POLICY_COMMANDS:
        raise click.UsageError(f"--policy can only be used with {', '.join(_POLICY_COMMANDS)}.")


def _log_level() -> int:
    value = os.environ.get(_LOG_VARIABLE) or "warning"
    if value not in _LOG_LEVELS:
        raise HintedUsage(
            f"the environment variable {_LOG_VARIABLE} is {value!r}, expected one of"
            f" {', '.join(_LOG_LEVELS)}.",
            did_you_mean(value, _LOG_LEVELS),
        )
    return logging.getLevelNamesMapping()[value.upper()]


@click.command(short_help="Freeze a job.")
@click.argument("spec", type=Place())
@new_package_option
@click.option(
    "--check",
    type=OneOf(["usual", "thorough"]),
    default="usual",
    help="thorough: compare on more sizes and seeds.",
)
@click.option("--strict/--no-strict", default=None, help="Use only this mode of torch.export.")
@click.option("--explain-shapes", is_flag=True, help="Print the possible sizes of each dim first.")
@click.option(
    "--apply-suggested-fixes", is_flag=True, help="Declare the sizes that torch suggests."
)
@click.option("--abstract", is_flag=True, help="Freeze shapes without weights, for planning.")
@click.option(
    "--reduced", type=Place(), metavar="SPEC", help="A smaller job to compare, with --abstract."
)
@click.option(
    "--weights",
    "source",
    type=Place(),
    metavar="SOURCE",
    help="Weights of its launches: --abstract.",
)
@click.option("--bundle-ops", is_flag=True, help="Put operator libraries into the package.")
@click.option(
    "--wheel", "wheels", multiple=True, metavar="FILE", help="Bundle this wheel; may be repeated."
)
@click.option(
    "--asset", "assets", multiple=True, metavar="NAME[:TYPE]=PATH", help="Include a file or folder."
)
@json_option
def freeze(
    spec: str,
    output: Path,
    check: str,
    strict: bool | None,
    explain_shapes: bool,
    apply_suggested_fixes: bool,
    abstract: bool,
    reduced: str | None,
    source: str | None,
    bundle_ops: bool,
    wheels: tuple[str, ...],
    assets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Freeze the job that SPEC names and write its package.

    SPEC is path/to/file.py:name or package.module:name, where name is a trainload.Job or a function
    that returns one. The captured graphs are compared with eager PyTorch, loss and every gradient,
    before anything is written. The table of --explain-shapes is printed even if torch then rejects
    the sizes.
    """
    if output.exists():
        raise StorageError(
            "it exists already", where=str(output), hint="Choose another path, or remove it."
        )
    if abstract and (explain_shapes or apply_suggested_fixes):
        raise click.UsageError(
            "--abstract cannot be combined with --explain-shapes or --apply-suggested-fixes: use"
            " them on the reduced job."
        )
    if reduced is not None and not abstract:
        raise click.UsageError("--reduced requires --abstract.")
    if source is not None and not abstract:
        raise click.UsageError("--weights requires --abstract: other packages have weights.")
    libraries = named_libraries()
    # The job's own code may go to another folder, so paths are made absolute before it runs.
    target = Path.cwd() / output
    small_spec = _resolve_spec(reduced)
    own_wheels = tuple(str(Path.cwd() / wheel) for wheel in wheels)
    added = _asset_options(assets)
    weights_from = _absolute_source(source)
    check_supported_torch()
    began = time.perf_counter()
    from trainload.freezing.load_job import load_recorded_job

    # the job's own code may print
    with redirect_stdout(sys.stderr), working("reading the job"):
        recorded = load_recorded_job(spec, values=not abstract)
        job = _with_assets(recorded.job, added)
        from trainload.capture.parity.replays import Check
        from trainload.capture.shapes.shape_report import explain_shapes as shapes_of
        from trainload.freezing.freeze import freeze as freeze_job

        small = None if small_spec is None else load_recorded_job(small_spec, values=True)
        shapes = (
            {name: shapes_of(job, name) for name in _training_graphs(job)} if explain_shapes else {}
        )
    if not as_json:
        for name, report in shapes.items():
            if len(shapes) > 1:
                _out().print(f"graph {name}", highlight=False)
            view.print_shapes(_out(), report)
    fixes: list[Any] = []
    with redirect_stdout(sys.stderr), working("capturing, and comparing with eager PyTorch"):
        package = freeze_job(
            dataclasses.replace(recorded, job=job),
            target,
            check=Check(check),
            strict=strict,
            apply_suggested_fixes=apply_suggested_fixes,
            on_fix=fixes.append,
            abstract=abstract,
            reduced=small,
            libraries=libraries,
            bundle_ops=own_wheels or bundle_ops,
            weights_from=weights_from,
        )
    seconds = time.perf_counter() - began
    if as_json:
        explained = {"shapes": shapes} if explain_shapes else {}
        applied = {"fixes": fixes} if apply_suggested_fixes else {}
        _print_json(
            {
                "package": output,
                "digest": package.digest,
                "seconds": seconds,
                **explained,
                **applied,
            }
        )
    else:
        rows: list[tuple[str, Any]] = [
            ("package", str(output)),
            ("digest", package.digest),
            ("seconds", seconds),
        ]
        if package.manifest.variants:
            rows.append(("variants", f"the first, {', '.join(package.manifest.variants)}"))
        _out().print(view.table([*rows, *(("applied", str(fix)) for fix in fixes)]))


def _absolute_source(source: str | None) -> str | None:
    """Return a source of weights, which other machines can find."""
    from trainload.packaging.weight_sources.weight_source import source_of_weights

    return source_of_weights(source)


def _asset_options(texts: tuple[str, ...]) -> dict[str, tuple[str, str | None]]:
    """Parse --asset: name -> path and media type, from "NAME=PATH" or "NAME:TYPE/SUBTYPE=PATH"."""
    options = {}
    for text in texts:
        name, _, path = text.partition("=")
        name, _, media_type = name.partition(":")
        if not name or not path:
            raise click.UsageError(f"--asset {text}: expected NAME=PATH or NAME:TYPE/SUBTYPE=PATH.")
        options[name] = (str(Path.cwd() / path), media_type or None)
    return options


def _resolve_spec(spec: str | None) -> str | None:
    """Return a spec with its file's absolute path; a spec that names a module stays as it is."""
    place, colon, name = (spec or "").rpartition(":")
    return f"{Path.cwd() / place}{colon}{name}" if place.endswith(".py") else spec


def _with_assets(job: Job, options: dict[str, tuple[str, str | None]]) -> Job:
    """Return the job with further assets, which replace its own assets of the same names."""
    from trainload.capture.job.definition import Asset

    return dataclasses.replace(
        job,
        assets={
            **job.assets,
            **{name: Asset(path, kind) for name, (path, kind) in options.items()},
        },
    )


def _training_graphs(job: Job) -> list[str]:
    """Return the names of the job's training graphs."""
    from trainload.capture.tracing.targets import targets_of

    return [target.name for target in targets_of(job) if target.training]


# Rows of the help hold two commands, so groups of even size make the most of a screen of 24 lines.
commands.add_group(
    "Set up", starting.init, show_doctor.doctor, starting.completion, reporting.dashboard
)
commands.add_group(
    "Freeze",
    freeze,
    packages.inspect,
    packages.verify,
    compare.diff,
    show_graphs.show,
    show_graphs.ops,
    show_graphs.transform,
    packages.fill,
)
commands.add_group("Plan", planning.plan, planning.simulate, measuring.measure, builds.build)
commands.add_group(
    "Run",
    runs.launch,
    runs.resume,
    runs.evaluate,
    watching.stop,
    list_settings.settings,
    deploy.manifest,
)
commands.add_group(
    "Observe",
    watching.status,
    watching.logs,
    watching.runs,
    reporting.report,
    profiling.profile,
    debugging.debug,
)
commands.add_group(
    "Share",
    store_commands.push,
    store_commands.pull,
    store_commands.releases,
    exports.export,
    packages.sign,
    store_commands.gc,
)
commands.add_group(
    "Retrain",
    retrain.retrain,
    store_commands.promote,
    lines.rollback,
    lines.history,
    lines.lineage,
    lines.migrate,
)


def run(arguments: Sequence[str]) -> int:
    """Run one command line, without the program's name. Returns the exit status."""
    return run_group(commands, arguments)


def _complain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error, without secrets."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))


def _make_streams_usable() -> None:
    """Open streams that the caller has closed, so that no other file takes their place, and let
    stdout escape what its encoding lacks, as stderr does.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a stream that was opened on a file looks up its position, which a terminal that has taken
        # the file's descriptor since does not have; it escapes from now on all the same
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def main() -> NoReturn:
    """Run the console script."""
    _make_streams_usable()
    sys.excepthook = _complain
    status = run(sys.argv[1:])
    connection = sys.modules.get("trainload.launching.cluster.connection")
    if connection is not None and connection.abandon():
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
