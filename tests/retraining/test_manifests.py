"""Manifests that schedule ticks: a CronJob, a RayCronJob, a systemd timer."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainload.cli import main as cli
from trainload.core.errors import RequestError
from trainload.core.storage.open_files import open_files
from trainload.deploy.schedulers import calendar_of, crontab_of
from trainload.retraining.config.config import Timing
from trainload.retraining.ticks.tick_times import Cron, schedule_of

PODS = ("--image", "registry.example.com/trainload:1", "--claim", "storage:/trainload")


def file(tmp_path: Path, **changes: Any) -> Path:
    least = {
        "store": "s",
        "line": "gpt",
        "data": {"files": "x/*.parquet"},
        "evaluation": {"hold_out": 0.1},
        "schedule": {"cron": "30 2 * * 1-5", "zone": "Europe/Berlin"},
        "cluster": {"address": "auto", "nodes": 2},
    }
    path = tmp_path / "retrain.yaml"
    path.write_text(yaml.safe_dump({**least, **changes}))
    return path


def written(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert cli.run(["retrain", "manifest", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_configuration_at_a_url_needs_no_claim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_files("memory://manifests").replace("retrain.yaml", file(tmp_path).read_bytes())
    url = "memory://manifests/retrain.yaml"
    made = yaml.safe_load(written(capsys, "raycronjob", url, *PODS[:2]))
    job = made["spec"]["jobTemplate"]
    assert job["entrypoint"].endswith(f"retrain tick {url}")
    assert "persistentVolumeClaim" not in json.dumps(made)


def test_a_cronjob_runs_one_tick_and_never_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = yaml.safe_load(written(capsys, "cronjob", file(tmp_path), *PODS))
    spec = made["spec"]
    assert (made["kind"], spec["schedule"], spec["timeZone"], spec["concurrencyPolicy"]) == (
        "CronJob",
        "30 2 * * 1-5",
        "Europe/Berlin",
        "Forbid",
    )
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == [
        "python",
        "-m",
        "trainload",
        "retrain",
        "tick",
        "/trainload/retrain.yaml",
    ]
    assert (pod["restartPolicy"], pod["securityContext"]["runAsNonRoot"]) == ("Never", True)


def test_a_raycronjob_has_a_cluster_for_each_tick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = yaml.safe_load(
        written(capsys, "raycronjob", file(tmp_path), *PODS, "--secret", "store-keys")
    )
    job = made["spec"]["jobTemplate"]
    assert (made["kind"], made["spec"]["schedule"]) == ("RayCronJob", "30 2 * * 1-5")
    assert job["entrypoint"] == "exec python -m trainload retrain tick /trainload/retrain.yaml"
    workers = job["rayClusterSpec"]["workerGroupSpecs"][0]
    assert workers["replicas"] == 2
    assert workers["template"]["spec"]["containers"][0]["envFrom"] == [
        {"secretRef": {"name": "store-keys"}}
    ]


def test_its_ticks_must_run_on_that_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, cluster={"address": "10.0.0.1:6379"})
    assert cli.run(["retrain", "manifest", "raycronjob", str(path), *PODS]) == 2
    assert "cluster.address" in capsys.readouterr().err


def test_ticks_are_given_the_programs_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ("--library", "mine=mine.ops", "--trust-extensions")
    wanted = "python -m trainload --library mine=mine.ops --trust-extensions retrain tick"
    assert (
        cli.run(
            [*program, "retrain", "manifest", "raycronjob", str(file(tmp_path)), *PODS, "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["spec"]["jobTemplate"]["entrypoint"].startswith(
        f"exec {wanted}"
    )
    policy = tmp_path / "policy.toml"
    assert (
        cli.run(
            [
                *program,
                "--policy",
                str(policy),
                "retrain",
                "manifest",
                "systemd",
                str(file(tmp_path)),
            ]
        )
        == 0
    )
    assert (
        f"mine=mine.ops --trust-extensions --policy {policy} retrain tick"
        in capsys.readouterr().out
    )


def test_a_policy_of_this_machine_is_none_of_pods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(
            [
                "--policy",
                str(tmp_path / "policy.toml"),
                "retrain",
                "manifest",
                "cronjob",
                str(file(tmp_path)),
                *PODS,
            ]
        )
        == 2
    )
    assert "TRAINLOAD_POLICY" in capsys.readouterr().err


def test_yaml_and_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path)
    for kind in ("cronjob", "raycronjob"):
        assert json.loads(written(capsys, kind, path, *PODS, "--json")) == yaml.safe_load(
            written(capsys, kind, path, *PODS)
        )


def test_a_secret_in_the_clear_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(
            [
                "retrain",
                "manifest",
                "cronjob",
                str(file(tmp_path)),
                *PODS,
                "--env",
                "AWS_SECRET_ACCESS_KEY=abc",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert ("looks like a secret" in said, "abc" in said) == (True, False)


@pytest.mark.parametrize(
    ("every", "crontab"),
    [
        ("1m", "* * * * *"),
        ("15m", "*/15 * * * *"),
        ("1h", "0 * * * *"),
        ("6h", "0 */6 * * *"),
        ("1d", "0 0 * * *"),
        ("7d", "0 0 * * 4"),
    ],
)
def test_what_comes_every_so_often_comes_at_the_same_times_by_crontab(
    every: str, crontab: str
) -> None:
    timing = Timing.model_validate({"every": every})
    assert crontab_of(timing) == (crontab, "UTC")
    at = datetime(2026, 2, 27, 23, 59, 30, tzinfo=UTC)
    for _ in range(9):
        due = schedule_of(timing).next_after(at)
        assert Cron(crontab).next_after(at) == due
        at = due


@pytest.mark.parametrize("every", ["90s", "7m", "5h", "2d", "36h"])
def test_what_no_crontab_says_is_refused(every: str) -> None:
    with pytest.raises(
        RequestError,
        match=r"schedule\.every: this interval cannot be written as a crontab expression",
    ):
        crontab_of(Timing.model_validate({"every": every}))


CALENDARS = {
    "30 2 * * 1-5": "Mon,Tue,Wed,Thu,Fri *-*-* 2:30:00 Europe/Berlin",
    "*/15 * * * *": "*-*-* *:00/15:00 Europe/Berlin",
    "0 */6 1,15 * *": "*-*-1,15 00/6:0:00 Europe/Berlin",
    "5 4 * 1-3 *": "*-1..3-* 4:5:00 Europe/Berlin",
    "0 0 * * 0,6": "Sun,Sat *-*-* 0:0:00 Europe/Berlin",
    "0 9-17/2 * * 7": "Sun *-*-* 9..17/2:0:00 Europe/Berlin",
}


@pytest.mark.parametrize("crontab", CALENDARS)
def test_a_crontab_is_said_to_systemd(crontab: str) -> None:
    assert calendar_of(crontab, "Europe/Berlin") == CALENDARS[crontab]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("crontab", CALENDARS)
def test_systemd_means_the_same_by_it(crontab: str) -> None:
    text = calendar_of(crontab, "UTC")
    start = datetime(2026, 2, 27, 23, 0, tzinfo=UTC)
    command = [
        "systemd-analyze",
        "calendar",
        "--iterations",
        "6",
        "--base-time",
        f"{start:%Y-%m-%d %H:%M:%S} UTC",
        text,
    ]
    said = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={"TZ": "UTC", "PATH": "/usr/bin:/bin"},
    ).stdout
    found = [
        line.split(": ", 1)[1].strip()
        for line in said.splitlines()
        if "Next elapse" in line or "Iter" in line
    ]
    at, wanted = start, []
    for _ in range(6):
        at = Cron(crontab).next_after(at)
        wanted.append(f"{at:%a %Y-%m-%d %H:%M:%S} UTC")
    assert found == wanted


@pytest.mark.parametrize("crontab", ["0 0 13 * 5", "0 0 * JAN *", "0 0 L * *", "0 0 * * 5#3"])
def test_what_systemd_cannot_say_is_refused(crontab: str) -> None:
    with pytest.raises(RequestError, match="systemd cannot express this schedule"):
        calendar_of(crontab, "UTC")


def test_a_timer_and_its_service_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(capsys, "systemd", file(tmp_path), "--output", tmp_path / "units")
    service, timer = (
        (tmp_path / "units" / f"retrain-gpt.{kind}").read_text() for kind in ("service", "timer")
    )
    assert f"-m trainload retrain tick {tmp_path}/retrain.yaml\n" in service
    assert (
        "OnCalendar=Mon,Tue,Wed,Thu,Fri *-*-* 2:30:00 Europe/Berlin\n"
        "AccuracySec=1s\n"
        "Persistent=true\n" in timer
    )


def test_a_missed_tick_is_skipped_by_the_timer_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, schedule={"every": "1d", "missed": "skip"})
    assert "Persistent=false" in written(capsys, "systemd", path)


def test_there_must_be_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path, schedule=None)
    assert cli.run(["retrain", "manifest", "systemd", str(path)]) == 2
    assert "Set the key `schedule`" in capsys.readouterr().err
