"""The command that makes builds: build."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainload.cli.commands import shared
from trainload.cli.commands.packages import password_of
from trainload.cli.commands.planning import changed_by, plan_file_option, settings_option
from trainload.cli.commands.shared import (
    LocalPath,
    Place,
    Transfer,
    any_package_argument,
    err,
    json_option,
    out,
    positive,
    print_json,
)
from trainload.cli.view import tables as view
from trainload.core.formatting import size

if TYPE_CHECKING:
    from trainload.launching.api.make_build import BuildReport
    from trainload.packaging.stores.stored_builds import BuildPushReport

_file = LocalPath()


@click.command(short_help="Compile for a plan.")
@any_package_argument
@plan_file_option
@settings_option
@click.option(
    "--device",
    metavar="D",
    help="cpu, or a GPU to compile for without having it: h100, ...",
)
@click.option(
    "--verify",
    "verified",
    type=_file,
    metavar="BUILD",
    help="Compare the graphs of this build; compile nothing.",
)
@click.option(
    "--threads",
    type=positive,
    metavar="N",
    help="Threads of a worker. Default: as on this machine.",
)
@click.option("-o", "--output", type=_file, metavar="BUILD", help="Folder to write.")
@click.option(
    "--push", "store", type=Place(), metavar="STORE", help="Publish the build in a store."
)
@click.option("--key", type=_file, metavar="FILE", help="Sign it with this private key, in PEM.")
@json_option
def build(
    package: str,
    plan_file: Path,
    settings: tuple[str, ...],
    device: str | None,
    verified: Path | None,
    threads: int | None,
    output: Path | None,
    store: str | None,
    key: Path | None,
    as_json: bool,
) -> None:
    """Compile the graphs of PKG, a folder or STORE#LINE, for runs that load them from the store.

    Every graph is compared with the interpreted one. A launch of a release in STORE loads the build
    if a policy trusts its maker (build_makers). With --device, no run loads the build until
    --verify has compared it on a machine with that GPU.
    """
    if output is None and store is None:
        raise click.UsageError("pass -o BUILD, or --push STORE, or both.")
    if store is not None and key is None:
        raise click.UsageError("--push requires --key: nobody loads a build that is not signed.")
    if store is not None and "#" in store:
        raise click.UsageError("--push: a build belongs to a store, not to a line.")
    if verified is not None and (device is not None or threads is not None):
        raise click.UsageError("--verify takes graphs as they are: omit --device and --threads.")
    opened = changed_by(settings, shared.open_to_run(package), allowed={"deterministic"})
    from trainload.launching.api.make_build import build as make_build
    from trainload.launching.api.verified_build import verify_build
    from trainload.launching.settings.parse import parse_settings
    from trainload.publishing import trust
    from trainload.publishing.stores import push_build
    from trainload.sharding.plans.plan import read_plan

    plan = read_plan(plan_file)
    deterministic = bool(parse_settings(settings).run.get("deterministic", True))
    with tempfile.TemporaryDirectory() as scratch:
        folder = output or Path(scratch) / "build"
        if verified is not None:
            report = verify_build(
                verified, opened, plan, folder, deterministic=deterministic, on_stage=_show_stage
            )
        else:
            report = make_build(
                opened,
                plan,
                folder,
                threads=threads,
                device=device,
                deterministic=deterministic,
                on_stage=_show_stage,
            )
        if key is not None:
            trust.sign(folder, key, password=password_of(key))
        pushed = None
        if store is not None:
            with Transfer("push") as transfer:
                pushed = push_build(folder, store, on_progress=transfer, on_wait=transfer.say)
    if as_json:
        print_json(_as_json(report, output, pushed))
        return
    rows: list[tuple[str, Any]] = [] if output is None else [("build", str(output))]
    if pushed is not None:
        rows += [
            ("store", pushed.store),
            ("sent", f"{size(pushed.sent_bytes)} in {pushed.sent_files} files"),
        ]
    rows += [
        ("graphs", str(report.graphs)),
        ("bytes", size(report.bytes)),
        *((name.replace("_", " "), str(value)) for name, value in _facts(report).items()),
        ("compared", "all graphs" if not report.unverified else f"all but {_listed(report)}"),
        *(("interpreted", text) for text in report.interpreted),
    ]
    out().print(view.table(rows))


def _show_stage(stage: str, seconds: float) -> None:
    err().print(f"{stage}: {seconds:.1f} s", markup=False, highlight=False, soft_wrap=True)


def _listed(report: BuildReport) -> str:
    return ", ".join(report.unverified) + ", so no run loads it"


def _facts(report: BuildReport) -> dict[str, Any]:
    return {**report.target.toolchain, **report.target.architecture}


def _as_json(
    report: BuildReport, output: Path | None, pushed: BuildPushReport | None
) -> dict[str, Any]:
    return {
        "build": output,
        "key": report.target.key,
        "job": report.target.job,
        "toolchain": report.target.toolchain,
        "architecture": report.target.architecture,
        "graphs": report.graphs,
        "unverified": report.unverified,
        "interpreted": report.interpreted,
        "bytes": report.bytes,
        "seconds": report.seconds,
        "pushed": pushed,
    }
