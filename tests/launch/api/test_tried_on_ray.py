"""A trial step on a cluster that times out or fails with an error of Ray."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayError, WorkerCrashedError

from trainload.core.errors import ClusterError, TrainingError
from trainload.launching.cluster import tasks
from trainload.launching.cluster.reservation import DevicesTakenError
from trainload.launching.cluster.tasks import tried_out
from trainload.launching.run.run_spec import RunSpec

SPEC = RunSpec.model_construct(
    start_timeout=3600.0, plan=SimpleNamespace(cluster=SimpleNamespace(device="cpu"))
)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[RayError], list[str]]:
    """Function that makes `ray.get` raise an error. It returns the list of cancelled tasks."""
    task = SimpleNamespace(
        options=lambda **options: SimpleNamespace(remote=lambda *arguments: "the task")
    )

    def failing(error: RayError) -> list[str]:
        def get(reference: object, timeout: float) -> None:
            raise error

        cancelled: list[str] = []
        monkeypatch.setattr("ray.remote", lambda **options: lambda function: task)
        monkeypatch.setattr(tasks, "reserved", lambda *devices: nullcontext())
        monkeypatch.setattr("ray.get", get)
        monkeypatch.setattr("ray.cancel", lambda reference, force: cancelled.append(reference))
        return cancelled

    return failing


def test_one_that_gives_no_answer_is_taken_back_and_told_of(
    fail: Callable[[RayError], list[str]],
) -> None:
    cancelled = fail(GetTimeoutError("Get timed out"))
    with pytest.raises(
        ClusterError,
        match=(
            r"node here: .* did not finish in time \(expected a result within 3600 s, got"
            r" none\).*start_timeout"
        ),
    ):
        tried_out(SPEC, "here", 1)
    assert cancelled == ["the task"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WorkerCrashedError(), "The worker died unexpectedly"),
        (RayError("Traceback\n  in a file\nRuntimeError: boom"), r"got RuntimeError: boom"),
    ],
)
def test_one_that_fails_in_rays_words_is_told_of_by_the_last_line(
    fail: Callable[[RayError], list[str]], error: RayError, said: str
) -> None:
    fail(error)
    with pytest.raises(TrainingError, match=f"(?s)node here: the trial step failed.*{said}"):
        tried_out(SPEC, "here", 1)


def test_devices_that_something_else_has_taken_meanwhile_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reserved(*devices: object) -> None:
        raise DevicesTakenError("here")

    monkeypatch.setattr(tasks, "reserved", reserved)
    with pytest.raises(ClusterError, match=r"node here with CPUs: .*all devices are in use"):
        tried_out(SPEC, "here", 1)
