"""Commands of stores: push, pull, releases, promote, gc."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainload.cli.commands.shared import (
    LocalPath,
    Place,
    Transfer,
    err,
    json_option,
    new_package_option,
    out,
    positive,
    print_json,
    show_record,
    working,
)
from trainload.cli.view import tables as view
from trainload.cli.view.column_table import Columns
from trainload.core.errors import RequestError
from trainload.core.formatting import size
from trainload.core.versions import check_supported_torch

if TYPE_CHECKING:
    from trainload.packaging.stores.releases import Pointer, ReleaseState
    from trainload.retraining.config.config import Config


retraining_option = click.option(
    "--retraining", metavar="FILE", help="Tell MLflow and the webhooks of this retraining."
)
line_option = click.option("--line", metavar="NAME", help="Line. Default: the store's only one.")
store_argument = click.argument("store", metavar="STORE", type=Place())


@click.command(short_help="Publish a package.")
@click.argument("package", metavar="PKG", type=LocalPath())
@store_argument
@click.option("--line", metavar="NAME", help="Line. Default: the only one, or main.")
@click.option(
    "--promote/--no-promote", default=None, help="Make the release current. Default: yes."
)
@click.option("--only-if", metavar="N", help="Promote only if release N (or none) is current.")
@click.option("--reject", metavar="REASON", help="Publish the release as rejected.")
@click.option("--message", metavar="TEXT", default="", help="Message in the list of releases.")
@click.option("--fact", multiple=True, metavar="NAME=VALUE", help="Store a fact with the release.")
@click.option("--without-debug", is_flag=True, help="Do not send debug/.")
@json_option
def push(
    package: Path,
    store: str,
    line: str | None,
    promote: bool | None,
    only_if: str | None,
    reject: str | None,
    message: str,
    fact: tuple[str, ...],
    without_debug: bool,
    as_json: bool,
) -> None:
    """Publish a package as a release, or a build. Only files that the store lacks are sent.

    STORE is a folder, a URL such as s3://bucket/folder, oci://HOST/NAME:TAG, or hf://OWNER/NAME.
    An interrupted push continues where it stopped.
    """
    if reject is not None and (promote or only_if is not None):
        raise click.UsageError("--reject cannot be combined with --promote or --only-if.")
    if promote is False and only_if is not None:
        raise click.UsageError("--only-if cannot be combined with --no-promote.")
    check_supported_torch()
    from trainload.packaging.builds.build_folder import is_build
    from trainload.packaging.stores.push import PushReport
    from trainload.publishing import stores
    from trainload.publishing.hub import HubPushReport

    if is_build(package):
        if line is not None or promote is not None or only_if or reject or message or fact:
            raise click.UsageError("a build has no line, release, message or facts.")
        with Transfer("push") as transfer:
            pushed = stores.push_build(package, store, on_progress=transfer, on_wait=transfer.say)
        show_record(pushed, as_json)
        return
    with Transfer("push") as transfer:
        report = stores.push(
            package,
            store,
            line=line,
            promote=promote is not False,
            only_if=only_if,
            rejected=reject,
            message=message,
            facts=_parse_facts(fact),
            debug=not without_debug,
            on_progress=transfer,
            on_wait=transfer.say,
        )
    if as_json or isinstance(report, HubPushReport):
        show_record(report, as_json)
        return
    rows: list[tuple[str, Any]] = [("store", report.store)]
    if isinstance(report, PushReport):
        rows += [
            (
                "release",
                f"{report.line} {report.release}"
                + ("" if report.new else ", which already existed"),
            ),
            ("current", report.current or "none"),
        ]
    else:
        rows.append(("artifact", report.artifact))
    rows += [
        ("digest", report.digest),
        (
            "sent",
            f"{size(report.sent_bytes)} in {report.sent_files} files ({report.sent_bytes:,} bytes)",
        ),
        ("there already", f"{size(report.present_bytes)} ({report.present_bytes:,} bytes)"),
    ]
    out().print(view.table(rows))


@click.command(short_help="Fetch a package.")
@store_argument
@new_package_option
@line_option
@click.option("--release", metavar="N", help="Release number or latest. Default: current.")
@click.option(
    "--reuse",
    multiple=True,
    type=LocalPath(),
    metavar="PKG",
    help="Reuse files of another package.",
)
@click.option("--without-debug", is_flag=True, help="Do not fetch debug/.")
@json_option
def pull(
    store: str,
    output: Path,
    line: str | None,
    release: str | None,
    reuse: tuple[Path, ...],
    without_debug: bool,
    as_json: bool,
) -> None:
    """Fetch a release as a package: STORE, STORE#LINE, STORE#LINE/N or hf://OWNER/NAME@REVISION; or
    the package whose folder is at a URL. Every file is checked against its digest.

    Files that packages in the folder of PKG already have are linked, not fetched.
    """
    check_supported_torch()
    from trainload.publishing import stores
    from trainload.publishing.hub import HubPullReport

    with Transfer("pull") as transfer:
        report = stores.pull(
            store,
            output,
            line=line,
            release=release,
            debug=not without_debug,
            reuse=reuse,
            on_progress=transfer,
        )
    if as_json or isinstance(report, HubPullReport):
        show_record(report, as_json)
        return
    rows: list[tuple[str, Any]] = [
        ("package", str(report.path)),
        ("release", f"{report.line} {report.release}" if report.line else report.release or "-"),
        ("digest", report.digest),
        (
            "fetched",
            (
                f"{size(report.fetched_bytes)} in {report.fetched_files} files"
                f" ({report.fetched_bytes:,} bytes)"
            ),
        ),
        ("here already", f"{size(report.local_bytes)} ({report.local_bytes:,} bytes)"),
    ]
    out().print(view.table(rows))


@click.command(short_help="List releases.")
@store_argument
@click.option("--line", metavar="NAME", help="Only this line.")
@json_option
def releases(store: str, line: str | None, as_json: bool) -> None:
    """List a store's releases: number, status, package, parent, message."""
    check_supported_torch()
    from trainload.publishing import stores

    by_line = stores.releases(store, line=line)
    if as_json:
        print_json(
            {
                "store": store,
                "lines": {
                    name: [_state_json(state) for state in states]
                    for name, states in by_line.items()
                },
            }
        )
        return
    for name, states in by_line.items():
        table = Columns(
            ("release", "status", "package", "parent", "created", "bytes", "message"),
            title=f"line {name}",
            right={"bytes"},
        )
        for state in states:
            release = state.release
            row = (
                release.name,
                state.status,
                release.package[:12],
                _release_name(release.parent),
                release.created,
                size(release.bytes),
            )
            table.add(*row, _remark(state))
        out().print(table)


@click.command(short_help="Make a release current.")
@store_argument
@click.argument("release", metavar="N")
@line_option
@click.option("--only-if", metavar="N", help="Only if this release (or none) is current.")
@click.option("--reason", metavar="TEXT", default="", help="Reason, stored in the history.")
@click.option("--rejected", is_flag=True, help="Allow a rejected or rolled back release.")
@retraining_option
@json_option
def promote(
    store: str,
    release: str,
    line: str | None,
    only_if: str | None,
    reason: str,
    rejected: bool,
    retraining: str | None,
    as_json: bool,
) -> None:
    """Make release N the current release of its line: a candidate, or an earlier release."""
    check_supported_torch()
    from trainload.publishing import stores

    config = retraining_of(retraining, store, line)
    pointer = stores.promote(
        store, release, line=line, only_if=only_if, reason=reason, rejected=rejected
    )
    problems = announce_pointer(config, pointer)
    name = _release_name(pointer.release)
    if as_json:
        print_json(
            {
                "store": store,
                "line": pointer.line,
                "release": name,
                "digest": pointer.package,
                "created": pointer.created,
                **problems,
            }
        )
    else:
        out().print(
            view.table([("line", pointer.line), ("current", name), ("digest", pointer.package)])
        )


@click.command(short_help="Clean a store.")
@store_argument
@click.option(
    "--keep", type=positive, metavar="N", help="Keep files of the last N releases per line."
)
@click.option(
    "--line", "lines", multiple=True, metavar="NAME", help="Only this line. Default: all."
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="HOURS",
    default=24.0,
    help="Age of an abandoned push. Default: 24.",
)
@click.option("--dry-run", is_flag=True, help="Only report what would be removed.")
@json_option
def gc(
    store: str, keep: int | None, lines: tuple[str, ...], grace: float, dry_run: bool, as_json: bool
) -> None:
    """Remove files that no release needs, and with --keep those of old releases.

    A current release keeps its files. Records are kept, so the history can still be read.
    """
    check_supported_torch()
    from trainload.publishing import stores

    if lines and keep is None:
        raise click.UsageError("--line requires --keep.")
    with working("looking for files that nothing needs"):
        report = stores.gc(
            store, keep=keep, lines=lines or None, grace=grace * 3600, dry_run=dry_run
        )
    if as_json:
        print_json(report)
        return
    verb = "would remove" if dry_run else "removed"
    rows: list[tuple[str, Any]] = [
        ("store", report.store),
        (verb, f"{size(report.removed_bytes)} in {report.removed_blobs} files"),
        ("kept", f"{size(report.kept_bytes)} in {report.kept_blobs} files"),
        ("pushes", f"{report.live_pushes} under way, {report.dead_pushes} dead"),
    ]
    if report.removed_releases:
        rows.insert(1, ("releases", ", ".join(report.removed_releases)))
    out().print(view.table(rows))


def retraining_of(file: str | None, store: str, line: str | None) -> Config | None:
    """Read the retraining that is told of a change of a line; None if there is none.

    Raises RequestError if it is one of another line.
    """
    if file is None:
        return None
    from trainload.packaging.stores.store import Store
    from trainload.retraining.config.config_file import read_config

    config, place = read_config(file), Store(store)
    name = place.line(line)
    if (Store(config.store).url, config.line) != (place.url, name):
        raise RequestError(
            "this is the retraining of another line",
            where=f"--retraining {file}",
            expected=f"line {name} of {place.url}",
            got=f"line {config.line} of {config.store}",
        )
    return config


def announce_pointer(config: Config | None, pointer: Pointer) -> dict[str, tuple[str, ...]]:
    """Tell a retraining's model registry and webhooks of a change of its line.

    Returns:
        The problems, which are printed too, as a field of a command's JSON; {} without a
        retraining.
    """
    if config is None:
        return {}
    from trainload.packaging.stores.store import Store
    from trainload.retraining.ticks.announcements import announce

    problems = announce(config, Store(config.store), pointer=pointer)
    for problem in problems:
        err().print(f"warning: {problem}", markup=False, highlight=False, soft_wrap=True)
    return {"warnings": problems}


def _parse_facts(texts: tuple[str, ...]) -> dict[str, bool | int | float | str]:
    """Parse NAME=VALUE, where a value that is a number becomes one."""
    facts: dict[str, bool | int | float | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--fact {text}: expected NAME=VALUE.")
        facts[name] = _parse_value(value)
    return facts


def _parse_value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _release_name(release: str | None) -> str:
    from trainload.packaging.stores.releases import shown

    return shown(release) if release is not None else ""


def _remark(state: ReleaseState) -> str:
    reason = state.reason if state.status in ("rejected", "removed") else ""
    return "; ".join(text for text in (state.release.message, reason) if text)


def _state_json(state: ReleaseState) -> dict[str, Any]:
    release = state.release
    return {
        "release": release.name,
        "status": state.status,
        "reason": state.reason,
        "digest": release.package,
        "program": release.program,
        "weights": release.weights,
        "parent": _release_name(release.parent) or None,
        "created": release.created,
        "message": release.message,
        "facts": release.facts,
        "files": len(release.files),
        "bytes": release.bytes,
    }
