"""Schedulers for `trainload retrain tick`: a Kubernetes CronJob, a KubeRay RayCronJob, a systemd
timer.

The lease and the records of ticks already prevent concurrent ticks and handle missed ones, so the
schedulers need not; they are configured to do so nevertheless.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import timedelta

from trainload.core.errors import RequestError
from trainload.deploy.kuberay import (
    HEAD_CPUS,
    Json,
    Pods,
    check_label,
    container_of,
    metadata_of,
    pod_of,
    ray_job_spec,
)
from trainload.retraining.config.config import Timing

MOST_NAME = 35
"""Maximum length of a RayCronJob's name, to which a time and KubeRay's suffixes are appended."""
_DAY = timedelta(days=1)
_LATE_SECONDS = 600
_FIELD = re.compile(r"(\*|[0-9]{1,2}(-[0-9]{1,2})?)(/[0-9]{1,2})?")
_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def crontab_of(timing: Timing) -> tuple[str, str]:
    """Return a schedule as a crontab with its time zone.

    Raises:
        RequestError: no crontab has these times.
    """
    if timing.cron is not None:
        return " ".join(timing.cron.split()), timing.zone
    assert timing.every is not None, "a schedule is one or the other"
    minutes, remainder = divmod(timing.every, timedelta(minutes=1))
    if not remainder and timing.every == 7 * _DAY:
        return "0 0 * * 4", "UTC"  # 1970 began on a Thursday
    if not remainder and minutes and not _DAY % timing.every:
        if minutes < 60 and 60 % minutes == 0:
            return (f"*/{minutes} * * * *" if minutes > 1 else "* * * * *"), "UTC"
        if minutes % 60 == 0:
            hours = minutes // 60
            return (
                "0 0 * * *" if hours == 24 else f"0 */{hours} * * *" if hours > 1 else "0 * * * *"
            ), "UTC"
    raise RequestError(
        "this interval cannot be written as a crontab expression",
        where="schedule.every",
        expected="minutes that divide an hour, hours that divide a day, 1d or 7d; or the key cron",
        got=f"{timing.every}",
    )


def cron_job(pods: Pods, timing: Timing, tick: Sequence[str]) -> Json:
    """Return a CronJob whose pod runs one tick, on an existing Ray cluster or by itself.

    Args:
        pods: description of its pod.
        timing: schedule.
        tick: command that runs a tick, with paths in the pod.
    """
    check_label(pods.name, "--name", most=52)
    crontab, zone = crontab_of(timing)
    container = container_of(
        pods,
        "tick",
        HEAD_CPUS if pods.devices < HEAD_CPUS else pods.devices,
        {"memory": pods.memory},
    )
    container["command"] = list(tick)
    pod = pod_of(pods, container, ranks=1, token=False)
    spec = {
        "schedule": crontab,
        "timeZone": zone,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": _LATE_SECONDS,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 3,
        "jobTemplate": {
            "spec": {"backoffLimit": 2, "template": {"spec": {"restartPolicy": "Never", **pod}}}
        },
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": metadata_of(pods),
        "spec": spec,
    }


def ray_cron_job(pods: Pods, timing: Timing, tick: Sequence[str]) -> Json:
    """Return a RayCronJob: each tick has its own cluster, which is deleted when the tick has ended.

    Args:
        pods: its pods.
        timing: schedule.
        tick: command that runs a tick, with paths in the pods. Its `cluster.address` must be auto.
    """
    check_label(pods.name, "--name", most=MOST_NAME, letter=True)
    crontab, zone = crontab_of(timing)
    command = shlex.join(["exec", *tick])
    spec = {
        "schedule": crontab,
        "timeZone": zone,
        "jobTemplate": ray_job_spec(pods, command, None, 1),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCronJob",
        "metadata": metadata_of(pods),
        "spec": spec,
    }


def systemd_units(name: str, timing: Timing, tick: Sequence[str], folder: str) -> dict[str, str]:
    """Return a systemd service that runs one tick, and a timer that starts it: file name -> text.

    Args:
        name: name of both units.
        timing: schedule.
        tick: command that runs a tick.
        folder: working directory of the command.

    Raises:
        RequestError: systemd cannot express the schedule.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", name):
        raise RequestError(
            "this is not a valid name of a unit",
            where="--name",
            expected="letters, digits and _ . -",
            got=name,
        )
    crontab, zone = crontab_of(timing)
    service = f"""\
[Unit]
Description=Retraining {name}: one tick
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
WorkingDirectory={_escape(folder)}
ExecStart={" ".join(_quote(word) for word in tick)}
KillSignal=SIGTERM
# Secrets and settings, one NAME=value in a line, readable by this service alone:
EnvironmentFile=-/etc/trainload/{name}.env
"""
    timer = f"""\
[Unit]
Description=Retraining {name}: when it is due

[Timer]
OnCalendar={calendar_of(crontab, zone)}
AccuracySec=1s
Persistent={"true" if timing.missed == "once" else "false"}

[Install]
WantedBy=timers.target
"""
    return {f"{name}.service": service, f"{name}.timer": timer}


def calendar_of(crontab: str, zone: str) -> str:
    """Convert a crontab to systemd's OnCalendar format.

    Raises:
        RequestError: systemd cannot express it: days of the month and days of the week together,
            which cron combines with "or"; names; L and #.
    """
    fields = crontab.split()
    minute, hour, day, month, weekday = fields
    if any(
        not _FIELD.fullmatch(part) for field in fields for part in field.split(",")
    ) or "*" not in (day[:1], weekday[:1]):
        raise RequestError(
            "systemd cannot express this schedule",
            where="schedule.cron",
            expected="numbers, ranges, lists and steps; days of the month or of the week, not both",
            got=crontab,
            hint="Use `trainload retrain run`, which waits for it itself.",
        )
    weekdays = "" if weekday == "*" else f"{_weekdays(weekday)} "
    return (
        f"{weekdays}*-{_times(month, 1)}-{_times(day, 1)} {_times(hour, 0)}:{_times(minute, 0)}:00"
        f" {zone}"
    )


def _times(field: str, first: int) -> str:
    """Convert a field of numbers. `first` is the smallest value, with which */5 begins."""
    parts = []
    for part in field.split(","):
        span, slash, step = part.partition("/")
        begin = f"{first:02d}" if span == "*" and slash else span.replace("-", "..")
        parts.append(f"{begin}/{step}" if slash else begin)
    return ",".join(parts)


def _weekdays(field: str) -> str:
    days: list[int] = []
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = ("0-6" if span == "*" else span).partition("-")
        days += range(int(first), int(last or (first if not step else 6)) + 1, int(step or 1))
    return ",".join(dict.fromkeys(_DAYS[day] for day in sorted(day % 7 for day in days)))


def _quote(word: str) -> str:
    """Quote a word of a command for a unit file."""
    text = _escape(word).replace("$", "$$")
    return (
        text
        if re.fullmatch(r"[A-Za-z0-9_@%+=:,./$-]+", text)
        else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    )


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def as_text(units: dict[str, str]) -> str:
    """Concatenate units, each under its file name."""
    return "\n".join(f"# {name}\n{text}" for name, text in units.items())
