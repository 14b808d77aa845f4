"""The folder of a run after a launch that submits the run to the cluster as a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.exceptions import AuthenticationError

from trainload.cli import main as cli
from trainload.core.errors import ClusterError, StorageError
from trainload.launching.cluster import connection, jobs
from trainload.packaging.package import Package

ADDRESS = "http://127.0.0.1:8265"


class Status:
    def __init__(self, over: bool) -> None:
        self._over = over

    def is_terminal(self) -> bool:
        return self._over


@dataclass(frozen=True)
class Known:
    """A job that the cluster already had."""

    submission_id: str | None
    status: Status


class Jobs:
    """Fake client for a cluster's jobs.

    `submit` is called by each submission, `look` returns the status of a job, `known` are earlier
    jobs. `submitted`: (id, entrypoint) of each submission.
    """

    def __init__(
        self,
        submit: Callable[[], object] = lambda: None,
        look: Callable[[], Status] = lambda: Status(False),
        known: Sequence[Known] = (),
    ) -> None:
        self._submit, self._look, self._known = submit, look, known
        self.submitted: list[tuple[str, str]] = []

    def list_jobs(self) -> Sequence[Known]:
        return self._known

    def submit_job(self, entrypoint: str, submission_id: str) -> None:
        self._submit()
        self.submitted.append((submission_id, entrypoint))

    def get_job_status(self, name: str) -> Status:
        return self._look()

    def get_job_logs(self, name: str) -> str:
        return "so it is\n"


def raising(error: BaseException) -> Callable[[], Status]:
    def call() -> Status:
        raise error

    return call


@pytest.fixture
def detached(
    tiny: Package, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Jobs], int]:
    """Function that launches a detached run in runs/one; it returns the exit status.

    Its argument is the fake client.
    """
    monkeypatch.setattr(jobs, "_BEGIN_SECONDS", 0.3)
    monkeypatch.setattr(jobs, "_LOOK_SECONDS", 0.05)

    def launch(cluster: Jobs) -> int:
        monkeypatch.setattr(jobs, "_client", lambda address: cluster)
        arguments = [
            "launch",
            tiny.path,
            "--data",
            tiny_data,
            "--steps",
            "2",
            "--run-dir",
            tmp_path / "runs" / "one",
        ]
        return cli.run([*map(str, arguments), "--address", ADDRESS, "--detach"])

    return launch


def test_a_run_is_resumed_as_a_job_with_a_name_of_its_own(
    detached: Callable[[Jobs], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert detached(Jobs()) == 0
    cluster = Jobs(known=[Known("trainload-one", Status(True)), Known(None, Status(False))])
    monkeypatch.setattr(jobs, "_client", lambda address: cluster)
    run_dir = tmp_path / "runs" / "one"
    assert (
        cli.run(["resume", str(run_dir), "--address", ADDRESS, "--detach", "--workers", "1"]) == 0
    )
    assert cluster.submitted == [
        ("trainload-one-2", f"python -m trainload resume {run_dir} --address auto --workers 1")
    ]


@pytest.mark.parametrize(
    "options", [["--detach"], ["--address", ADDRESS], ["--detach", "--address", "head:6379"]]
)
def test_a_dashboards_address_and_detach_go_together(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    assert cli.run(["resume", str(tmp_path / "run"), *options]) == 2
    assert "--detach and the --address of a cluster's dashboard" in capsys.readouterr().err


def is_there(tmp_path: Path) -> bool:
    return (tmp_path / "runs" / "one" / "run.json").is_file()


def test_a_job_that_waits_for_its_turn_finds_its_folder(
    detached: Callable[[Jobs], int], tmp_path: Path
) -> None:
    assert detached(Jobs()) == 0
    assert is_there(tmp_path)


def test_a_job_whose_cluster_says_nothing_for_a_while_finds_its_folder(
    detached: Callable[[Jobs], int], tmp_path: Path
) -> None:
    assert detached(Jobs(look=raising(ConnectionError("no answer")))) == 0
    assert is_there(tmp_path)


def test_a_job_that_nobody_waits_for_any_more_finds_its_folder(
    detached: Callable[[Jobs], int], tmp_path: Path
) -> None:
    assert detached(Jobs(look=raising(KeyboardInterrupt()))) == 1
    assert is_there(tmp_path)


def test_a_job_that_may_have_been_taken_finds_its_folder(
    detached: Callable[[Jobs], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert detached(Jobs(submit=raising(ConnectionError("no answer")))) == 1
    assert is_there(tmp_path)
    assert (
        "the cluster did not confirm whether it accepted the job (got no answer)"
        in capsys.readouterr().err
    )


def test_a_job_that_is_refused_leaves_no_folder(
    detached: Callable[[Jobs], int], tmp_path: Path
) -> None:
    assert detached(Jobs(submit=raising(RuntimeError("it already exists")))) == 2
    assert not (tmp_path / "runs").exists()


def test_a_job_that_ends_before_it_has_begun_leaves_no_folder(
    detached: Callable[[Jobs], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert detached(Jobs(look=lambda: Status(True))) == 1
    assert not (tmp_path / "runs").exists()
    assert "the driver ended before it started the run (got so it is)" in capsys.readouterr().err


@pytest.mark.parametrize("over", [False, True])
def test_a_job_whose_storage_fails_is_named(
    detached: Callable[[Jobs], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    over: bool,
) -> None:
    def fail(run_dir: Path) -> None:
        raise StorageError("the store does not respond")

    def submit() -> None:
        monkeypatch.setattr(jobs, "state_at", fail)

    assert detached(Jobs(submit, lambda: Status(over))) == 0
    assert "trainload-one" in capsys.readouterr().out
    assert is_there(tmp_path)


def test_storage_that_fails_before_the_submission_leaves_no_folder(
    detached: Callable[[Jobs], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run_dir: Path) -> None:
        raise StorageError("the store does not respond")

    monkeypatch.setattr(jobs, "state_at", fail)
    cluster = Jobs()
    assert detached(cluster) == 2
    assert cluster.submitted == []
    assert not (tmp_path / "runs").exists()


def test_a_cluster_that_asks_for_a_token_takes_no_job_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "check_listener", lambda address: None)
    monkeypatch.setattr(
        "ray.job_submission.JobSubmissionClient",
        lambda address: raising(AuthenticationError("no token was found"))(),
    )
    with pytest.raises(ClusterError, match=r"no token was found.*RAY_AUTH_TOKEN"):
        jobs.submit(ADDRESS, Path("run"), [])


def test_a_cluster_that_asks_for_a_token_is_not_joined_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "check_listener", lambda address: None)
    monkeypatch.setattr(connection, "asks_for_token", lambda address: False)
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(
        "ray.init", lambda **options: raising(AuthenticationError("no token was found"))()
    )
    with (
        pytest.raises(ClusterError, match=r"no token was found.*RAY_AUTH_TOKEN"),
        connection.connected("127.0.0.1:6379"),
    ):
        pass
