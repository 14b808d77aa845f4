"""Commands of retraining: its configuration, one tick, the loop over ticks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainload.cli.commands import shared
from trainload.cli.commands.deploy import pod_options, pods_of, write_manifests
from trainload.cli.commands.packages import password_of
from trainload.cli.commands.shared import (
    DONE,
    FAILED,
    LocalPath,
    OneOf,
    Place,
    err,
    json_option,
    out,
    positive,
    print_json,
    write_text,
)
from trainload.cli.view import tables as view
from trainload.core.errors import RequestError, StorageError
from trainload.core.storage.places import Where, is_url
from trainload.core.versions import check_supported_torch

if TYPE_CHECKING:
    from trainload.retraining.config.config import Config
    from trainload.retraining.ticks.tick import Scheduler
    from trainload.retraining.ticks.tick_records import Ended

NOW = "now"
config_argument = click.argument("file", metavar="FILE", type=LocalPath())
config_or_url_argument = click.argument("file", metavar="FILE", type=Place())


@click.group(short_help="Retrain on new data.")
def retrain() -> None:
    """Train a line's current release again on new data, and promote the result if it is better."""


@retrain.command(short_help="Write a commented file.")
@config_argument
@json_option
def init(file: Path, as_json: bool) -> None:
    """Write a configuration FILE (YAML) of a retraining, with all keys and comments."""
    from trainload.retraining.config.file_template import TEMPLATE

    if file.exists():
        raise StorageError(
            "it exists already", where=str(file), hint="Choose another path, or remove it."
        )
    write_text(file, TEMPLATE)
    if as_json:
        print_json({"file": str(file)})
    else:
        out().print(
            view.table([("written", str(file)), ("next", f"trainload retrain check {file}")])
        )


@retrain.command(short_help="Print a file's JSON Schema.")
@json_option
def schema(as_json: bool) -> None:
    """Print the JSON Schema of a retraining's FILE, for editors and for checks without trainload.

    It covers keys, types and choices; `retrain check` checks more.
    """
    from trainload.retraining.config.config import Config

    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(),
    }
    if as_json:
        print_json(document)
    else:
        click.echo(json.dumps(document, indent=2))


@retrain.command(short_help="Check a file.")
@config_or_url_argument
@json_option
def check(file: str, as_json: bool) -> None:
    """Check FILE: its keys, values and expressions, and that they fit its package and store."""
    check_supported_torch()
    from trainload.retraining.config.config_file import read_config
    from trainload.retraining.preflight import check as checked

    config = read_config(file)
    with redirect_stdout(sys.stderr):
        result = checked(config, _stages(as_json=True))
    if as_json:
        print_json({"config": config.to_json(), **result})
    else:
        out().print(view.table([("line", f"{config.line} of {config.store}"), *result.items()]))


@retrain.command(short_help="Publish builds for its runs.")
@config_or_url_argument
@click.option(
    "--key",
    type=LocalPath(),
    required=True,
    metavar="FILE",
    help="Sign them with this private key, in PEM.",
)
@json_option
def build(file: str, key: Path, as_json: bool) -> None:
    """Compile the graphs for the runs of FILE, compare them, and publish them in its store.

    Ticks on machines like this one then compile nothing, if a policy trusts the key's owner
    (build_makers).
    """
    check_supported_torch()
    from trainload.retraining.config.config_file import read_config
    from trainload.retraining.retraining_builds import push_builds

    config = read_config(file)
    with redirect_stdout(sys.stderr):
        pushed = push_builds(
            config,
            _stages(as_json=as_json).open,
            key,
            password_of(key),
            lambda stage, seconds: _print_progress(f"{stage}: {seconds:.1f} s"),
        )
    if as_json:
        print_json(pushed)
        return
    rows: list[tuple[str, Any]] = [("store", config.store)]
    rows += [("build", f"{each.build} of job {each.job[:12]}") for each in pushed]
    out().print(view.table(rows))


@retrain.command(short_help="Run one scheduled time.")
@config_or_url_argument
@click.option(
    "--at", metavar="TIME", default=NOW, help="Scheduled time, UTC. Default: the last due."
)
@json_option
def tick(file: str, at: str, as_json: bool) -> int:
    """Run one scheduled time: data, training, comparison, promotion.

    If it is repeated, or run again after it was killed, it continues where it stopped, with the
    same result. If there is no new data, it reports that. Exit status 1: the tick failed.
    """
    check_supported_torch()
    from trainload.retraining.config.config_file import read_config

    config = read_config(file)
    scheduled = _parse_time(config, at)
    with redirect_stdout(sys.stderr):
        ended = _scheduler(config, as_json).tick(scheduled)
    _print_outcome(ended, as_json)
    return FAILED if ended.outcome == "failed" else DONE


@retrain.command(short_help="Run ticks as they are due.")
@config_or_url_argument
@click.option("--every", metavar="TIME", help="Interval, such as 6h, instead of FILE's.")
@click.option("--cron", metavar="TEXT", help="Crontab expression, instead of FILE's.")
@click.option("--zone", metavar="NAME", help="Time zone of --cron. Default: UTC.")
@click.option("--ticks", type=positive, metavar="N", help="Exit after N ticks.")
@json_option
def run(
    file: str,
    every: str | None,
    cron: str | None,
    zone: str | None,
    ticks: int | None,
    as_json: bool,
) -> None:
    """Run ticks as they are due, until SIGTERM or Ctrl-C; a running tick is finished first."""
    check_supported_torch()
    from trainload.retraining.config.config import checked
    from trainload.retraining.config.config_file import read_config
    from trainload.retraining.service import serve

    config = read_config(file)
    if zone is not None and cron is None:
        raise click.UsageError("--zone requires --cron.")
    if every is not None or cron is not None:
        schedule_options = {"every": every, "cron": cron, "zone": zone or "UTC"}
        missed = {} if config.schedule is None else {"missed": config.schedule.missed}
        schedule = {
            name: value for name, value in schedule_options.items() if value is not None
        } | missed
        config = checked(config.to_json() | {"schedule": schedule}, "the command line")
    timing = _timing(config)
    scheduler = _scheduler(config, as_json)

    def run_tick(scheduled: datetime) -> None:
        with redirect_stdout(sys.stderr):
            ended = scheduler.tick(scheduled)
        _print_outcome(ended, as_json)

    assert config.schedule is not None
    serve(
        timing,
        config.schedule.missed,
        run_tick,
        scheduler.last_done,
        on_event=_print_progress,
        ticks=ticks,
    )


@retrain.command(short_help="Write what calls ticks.")
@click.argument("kind", type=OneOf(["cronjob", "raycronjob", "systemd"]), metavar="KIND")
@config_or_url_argument
@click.option("--image", metavar="IMAGE", help="Container image with trainload and Ray.")
@click.option("--claim", metavar="NAME[:PATH]", help="Volume claim for FILE, store, runs and data.")
@click.option("--memory", default="8Gi", metavar="SIZE", help="Memory of each pod. Default: 8Gi.")
@click.option("--name", help="Resource name. Default: retrain-LINE.")
@pod_options
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="PATH",
    help="Output file, or folder for systemd.",
)
@json_option
def manifest(
    kind: str,
    file: str,
    image: str | None,
    claim: str | None,
    memory: str,
    name: str | None,
    namespace: str | None,
    patches: tuple[Path, ...],
    secrets: tuple[str, ...],
    env: tuple[str, ...],
    service_account: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a cronjob or raycronjob for Kubernetes, or a systemd timer.

    Each calls `trainload retrain tick FILE` at FILE's scheduled times. For Kubernetes, FILE must be
    in the claim's volume, under its name, or at a URL; then no claim is needed.
    """
    from trainload.deploy.schedulers import as_text, cron_job, ray_cron_job, systemd_units
    from trainload.retraining.config.config_file import read_config

    config = read_config(file)
    _timing(config)
    assert config.schedule is not None, "it has a schedule, or there would be no timing"
    name = name or f"retrain-{config.line.replace('_', '-').replace('.', '-')}"
    if kind == "systemd":
        of_pods = (image, claim, secrets, env, service_account, namespace, patches)
        if any(of_pods):
            raise click.UsageError(
                "systemd units have no pods: omit --image, --claim and other options of pods."
            )
        policy = shared.policy()
        before = [
            *shared.program_options(),
            *([] if policy is None else ["--policy", str(policy.absolute())]),
        ]
        units = systemd_units(
            name,
            config.schedule,
            _tick_command(sys.executable, before, file if is_url(file) else Path(file).absolute()),
            str(Path.cwd() if is_url(file) else Path(file).absolute().parent),
        )
        if as_json:
            print_json(units)
        elif output is None:
            click.echo(as_text(units), nl=False)
        else:
            output.mkdir(parents=True, exist_ok=True)
            for unit, text in units.items():
                write_text(output / unit, text)
        return
    if image is None or (claim is None and not is_url(file)):
        raise click.UsageError(f"{kind} needs --image, and --claim unless FILE is at a URL.")
    if shared.policy() is not None:
        raise click.UsageError(
            "--policy is a file on this machine: pods find theirs through TRAINLOAD_POLICY (--env),"
            " or in their image."
        )
    cluster = config.cluster
    pods = pods_of(
        claim,
        env,
        name=name,
        image=image,
        nodes=(cluster.nodes, cluster.nodes),
        devices=cluster.workers,
        gpu=cluster.device == "cuda",
        memory=memory,
        namespace=namespace,
        secrets=secrets,
        service_account=service_account,
    )
    if kind == "raycronjob" and (cluster.backend, cluster.address) != ("ray", "auto"):
        raise RequestError(
            "the ticks of a RayCronJob run on the cluster that it creates",
            where="cluster.address",
            expected="auto",
            got=str(cluster.address),
        )
    place = file if is_url(file) else Path(pods.mount) / Path(file).name
    words = _tick_command("python", shared.program_options(), place)
    document = (ray_cron_job if kind == "raycronjob" else cron_job)(pods, config.schedule, words)
    write_manifests([document], patches, output, as_json=as_json)


@retrain.command(short_help="Hand over what is current.")
@config_or_url_argument
@json_option
def handover(file: str, as_json: bool) -> None:
    """Export the current release for serving, as configured in FILE, for example after `trainload
    rollback`.

    A promotion does this automatically, and so does the next tick after a rollback.
    """
    check_supported_torch()
    from trainload.packaging.stores.releases import shown
    from trainload.packaging.stores.store import Store
    from trainload.retraining.config.config_file import read_config

    config = read_config(file)
    if config.handover is None:
        raise RequestError(
            "no handover is configured",
            where=f"{file}, handover",
            hint="Set this key: `trainload retrain init` shows it.",
        )
    pointer = Store(config.store).current(config.line)
    if pointer is None:
        raise RequestError(
            "no release is current",
            where=f"{config.store}, line {config.line}",
            hint="Run a tick first.",
        )
    record = {"line": config.line, "release": shown(pointer.release), "reason": pointer.reason}
    with redirect_stdout(sys.stderr):
        release = _stages(as_json=as_json).hand_over(config, record)
    if as_json:
        print_json(record)
    else:
        out().print(
            view.table(
                [
                    ("release", f"{config.line} {shown(release)}"),
                    ("place", f"{config.handover.place}/current"),
                ]
            )
        )


def _tick_command(python: str, before: Sequence[str], file: Where) -> list[str]:
    """Return the command line of a tick; `before` are the program's own options."""
    return [python, "-m", "trainload", *before, "retrain", "tick", str(file)]


def _timing(config: Config) -> Any:
    from trainload.retraining.ticks.tick_times import schedule_of

    if config.schedule is None:
        raise RequestError(
            "there is no schedule",
            where="schedule",
            hint="Set the key `schedule`, or pass --every or --cron.",
        )
    return schedule_of(config.schedule)


def _parse_time(config: Config, at: str) -> datetime:
    if at == NOW:
        due: datetime = _timing(config).last_until(datetime.now(UTC))
        return due
    try:
        when = datetime.fromisoformat(at)
    except ValueError as error:
        raise RequestError(
            "this is not a time",
            where="--at",
            expected="a time such as 2026-11-23T06:00:00Z",
            got=at,
        ) from error
    if when.tzinfo is None:
        raise RequestError(
            "the time has no time zone", where="--at", expected=f"{at}Z, or {at}+01:00", got=at
        )
    return when.astimezone(UTC)


def _scheduler(config: Config, as_json: bool) -> Scheduler:
    from trainload.retraining.ticks.checks import check_config
    from trainload.retraining.ticks.tick import Scheduler

    check_config(config)
    return Scheduler(config, _stages(as_json=as_json), _print_progress)


def _stages(*, as_json: bool) -> Any:
    from trainload.retraining.ticks.tick_stages import Opening, Stages

    policy = shared.policy()
    return Stages(
        Opening(
            shared.libraries(), shared.trusts_extensions(), None if policy is None else Path(policy)
        ),
        _print_progress,
    )


def _print_progress(text: str) -> None:
    err().print(text, markup=False, highlight=False, soft_wrap=True)


def _print_outcome(ended: Ended, as_json: bool) -> None:
    if as_json:
        print_json(ended)
        return
    from trainload.packaging.stores.releases import shown

    rows: list[tuple[str, Any]] = [
        ("tick", ended.tick),
        ("outcome", ended.outcome),
        ("reason", ended.reason),
    ]
    if ended.release is not None:
        rows.append(("release", f"{ended.line} {shown(ended.release)}"))
    out().print(view.table(rows))
