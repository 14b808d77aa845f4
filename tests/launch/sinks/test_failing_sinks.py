"""A run has the same losses and checkpoints whatever its sinks do, and one warning of it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.launch.sinks.test_sinks import step
from tests.ports import free_port

import trainload
from trainload.core.errors import StorageError
from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.sinks import sink as sinks
from trainload.launching.sinks.protocol import Outcome, Sink
from trainload.launching.sinks.sink import open_sinks
from trainload.packaging.package import Package

Patch = pytest.MonkeyPatch
METHODS = ("open", "event", "numbers", "text", "close")
Fault = Callable[[], None]


class Faulty:
    """A sink with a fault in one of its methods."""

    def __init__(self, method: str, fault: Fault) -> None:
        self._method, self._fault = method, fault
        self._meet("open")

    def _meet(self, method: str) -> None:
        if method == self._method:
            self._fault()

    def event(self, event: Event, step: int) -> None:
        self._meet("event")

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        self._meet("numbers")

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        self._meet("text")

    def close(self, outcome: Outcome, /) -> None:
        self._meet("close")


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """An event that is set after the test, for threads that hang."""
    event = threading.Event()
    yield event
    event.set()


def use(monkeypatch: Patch, make: Callable[[], Sink]) -> None:
    """Make `make` the sink "tensorboard"."""
    monkeypatch.setattr(sinks, "_open_sink", lambda name, run_dir: make())


def use_hanging(monkeypatch: Patch, method: str, released: threading.Event) -> None:
    """Make a sink whose method hangs "tensorboard", and let a run wait for that only briefly.

    It waits as usual for a sink to open that does open: that takes long on a slow machine.
    """
    use(monkeypatch, lambda: Faulty(method, lambda: assert_true(released.wait())))
    if method == "open":
        monkeypatch.setattr(sinks, "_OPEN_SECONDS", 0.2)
    monkeypatch.setattr(sinks, "_END_SECONDS", 0.2)


def trained(
    package: Package, data: Path, run_dir: Path, *names: str, backend: str = "local"
) -> tuple[list[float], dict[str, str], list[str]]:
    """Train, and return the losses, the digests of the checkpoints, and the warnings of sinks."""
    heard: list[Event] = []
    options: dict[str, Any] = {"steps": 4, "checkpoint_every": 2, "compile": False}
    options |= {"backend": backend, "sinks": names, "on_event": heard.append}
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(package, plan, data, run_dir=run_dir, **options)
    digests = {
        f"{path.parents[1].name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run_dir.rglob("*.safetensors")
    }
    warnings = [event.data["message"] for event in heard if event.kind == "warning"]
    return losses(read_events(run_dir)), digests, [text for text in warnings if "metrics" in text]


@pytest.fixture(scope="module")
def undisturbed(
    tiny: Package, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[float], dict[str, str]]:
    """Losses and checkpoints of a run without sinks."""
    found, digests, _ = trained(tiny, tiny_data, tmp_path_factory.mktemp("undisturbed") / "run")
    assert len(digests) == 2
    return found, digests


def raise_error() -> None:
    raise ConnectionError("the server is gone")


@pytest.mark.parametrize("method", ["open", "event", "numbers", "close"])
def test_a_sink_that_raises_changes_nothing_in_a_run(
    method: str,
    tiny: Package,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    undisturbed: tuple[list[float], dict[str, str]],
) -> None:
    use(monkeypatch, lambda: Faulty(method, raise_error))
    found, digests, warnings = trained(tiny, tiny_data, tmp_path / "run", "tensorboard")
    assert (found, digests) == undisturbed
    assert warnings == ["tensorboard did not accept the run's metrics: the server is gone"]


@pytest.mark.parametrize("method", ["open", "event", "numbers", "close"])
def test_a_sink_that_hangs_changes_nothing_in_a_run(
    method: str,
    tiny: Package,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    undisturbed: tuple[list[float], dict[str, str]],
    released: threading.Event,
) -> None:
    use_hanging(monkeypatch, method, released)
    found, digests, warnings = trained(tiny, tiny_data, tmp_path / "run", "tensorboard")
    assert (found, digests) == undisturbed
    (warning,) = warnings
    assert "within 0.2 s" in warning


@pytest.mark.slow
@pytest.mark.parametrize("method", ["open", "numbers", "close"])
def test_a_sink_that_hangs_changes_nothing_in_a_run_on_ray(
    method: str,
    ray_cluster: None,
    tiny: Package,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    undisturbed: tuple[list[float], dict[str, str]],
    released: threading.Event,
) -> None:
    use_hanging(monkeypatch, method, released)
    run_dir = tmp_path / "run"
    found, digests, warnings = trained(tiny, tiny_data, run_dir, "tensorboard", backend="ray")
    assert (found, digests) == undisturbed
    (warning,) = warnings
    assert "within 0.2 s" in warning


def assert_true(value: bool) -> None:
    assert value


class PanicError(BaseException):
    """An error that is no Exception, as extensions in Rust raise it."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [ValueError, SystemExit, StorageError, PanicError])
def test_the_first_of_consecutive_failures_is_one_warning(
    method: str, error: type[BaseException], tmp_path: Path, monkeypatch: Patch
) -> None:
    def fail() -> None:
        raise error("no")

    use(monkeypatch, lambda: Faulty(method, fail))
    heard: list[Event] = []
    with open_sinks(["tensorboard"], tmp_path, heard.append, new=False) as tell:
        tell(Event("note", {"message": "hello"}, 1.0))
        tell(step(0)) if method not in ("text", "close") else None
    assert [event.kind for event in heard].count("warning") == 1


def test_hanging_sinks_are_waited_for_together(
    tmp_path: Path, monkeypatch: Patch, released: threading.Event
) -> None:
    use_hanging(monkeypatch, "close", released)
    waits: list[float] = []
    monkeypatch.setattr(
        sinks._Feed, "join", lambda feed, seconds: waits.append(seconds), raising=True
    )
    with open_sinks(["tensorboard"] * 3, tmp_path, lambda event: None):
        pass
    assert len(waits) == 3
    assert max(waits) <= 0.2


def test_a_sink_that_can_be_made_later_receives_the_run_from_its_beginning(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    attempts: list[int] = []
    steps: list[int] = []
    received = threading.Event()

    class Late(Faulty):
        def __init__(self) -> None:
            attempts.append(1)
            super().__init__("open", raise_error if len(attempts) < 2 else lambda: None)

        def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
            steps.append(step)
            if step == 3:
                received.set()

    use(monkeypatch, Late)
    with open_sinks(["tensorboard"], tmp_path, lambda event: None) as tell:
        for number in range(3):
            tell(step(number))
        assert received.wait(60)
    assert steps == [1, 2, 3]


def test_a_sink_that_accepts_nothing_holds_a_limited_number_of_events(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(sinks, "_MAX_BUFFERED", 10)
    buffer = sinks._EventBuffer()
    for number in range(100):
        buffer.put(step(number))
    buffer.end()
    assert [event.data["step"] for event in iter(buffer.get, None)] == list(range(90, 100))


def test_a_resumed_run_begins_without_a_server_that_refuses_it(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def refuse() -> Sink:
        raise StorageError("MLflow did not accept the run")

    use(monkeypatch, refuse)
    heard: list[Event] = []
    with open_sinks(["mlflow"], tmp_path, heard.append, new=False) as tell:
        tell(step(0))
    assert [event.kind for event in heard] == ["warning", "step"]


def test_a_collector_that_is_away_changes_nothing_in_a_run(
    tiny: Package,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    undisturbed: tuple[list[float], dict[str, str]],
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    found, digests, warnings = trained(tiny, tiny_data, tmp_path / "run", "opentelemetry")
    assert (found, digests) == undisturbed
    (warning,) = warnings
    assert "the OpenTelemetry collector did not accept" in warning


@pytest.mark.parametrize("method", ["numbers", "text", "close"])
def test_a_sink_that_loses_a_method_is_one_warning(
    method: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    sink = Faulty("", raise_error)
    monkeypatch.setattr(sink, method, property())
    use(monkeypatch, lambda: sink)
    heard: list[Event] = []
    with open_sinks(["tensorboard"], tmp_path, heard.append, new=False) as tell:
        tell(Event("note", {"message": "hello"}, 1.0))
        tell(step(0))
    assert [event.kind for event in heard].count("warning") == 1


def test_a_sink_cannot_change_the_events_of_others(tmp_path: Path, monkeypatch: Patch) -> None:
    class Changing(Faulty):
        def event(self, event: Event, step: int) -> None:
            event.data.clear()  # type: ignore[attr-defined]  # it is a dict

    use(monkeypatch, lambda: Changing("", raise_error))
    event = step(0)
    with open_sinks(["tensorboard"], tmp_path, lambda event: None) as tell:
        tell(event)
    assert event == step(0)


def warning_of(problem: str, folder: Path, monkeypatch: Patch) -> str:
    """Return the warning about a sink that raises an error with this text."""

    def fail() -> None:
        raise ConnectionError(problem)

    use(monkeypatch, lambda: Faulty("numbers", fail))
    heard: list[Event] = []
    with open_sinks(["tensorboard"], folder, heard.append) as tell:
        tell(step(0))
    (warning,) = [event.data["message"] for event in heard if event.kind == "warning"]
    return str(warning)


def test_a_warning_of_a_sink_is_one_line_of_limited_length(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    page = "the server responds\n" + "<p>sorry</p>\n" * 1000
    warning = warning_of(page, tmp_path, monkeypatch)
    assert "metrics: the server responds <p>sorry</p> <p>" in warning
    assert len(warning.splitlines()) == 1
    assert len(warning) < 600


def test_a_warning_of_a_sink_shows_no_password(tmp_path: Path, monkeypatch: Patch) -> None:
    problem = "cannot reach https://me:hunter2@tracker.example.org/api"
    warning = warning_of(problem, tmp_path, monkeypatch)
    assert "cannot reach https://me:***@tracker.example.org/api" in warning
