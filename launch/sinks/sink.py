"""Where a run's numbers go beside its journal: as its driver hears of them, from one process, whatever the number of ranks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from trainload.core.errors import ClusterError, StorageError
from trainload.launching.run.journal import Event
from trainload.launching.settings.run_settings import SinkName
from trainload.launching.sinks.protocol import Outcome, Sink

_OUTCOMES: Mapping[str, Outcome] = {"end": "ended", "stopped": "stopped", "failed": "failed"}
"""Kind of a run's last event -> what became of the run."""
_END_SECONDS = 30.0
_OF_STEPS = ("loss", "gradient_norm", "loss_scale", "seconds", "data_wait", "mfu", "memory", "tokens_per_second", "rows_per_second")


@contextmanager
def told(sinks: Sequence[SinkName], run_dir: Path, on_event: Callable[[Event], None]) -> Iterator[Callable[[Event], None]]:
    """Within it, what is to be told of a run's events so that sinks have their numbers; `on_event` is told as well, at once.

    Sinks are fed by a thread each, so that a server that does not answer holds up nobody. Where one does not take something, that is lost
    for it, and a warning says so, once in a row.

    Raises: StorageError where the library of a sink is not installed, or its server does not answer at the start.
    """
    with ExitStack() as stack:
        feeds = []
        for name in sinks:
            feed = _Feed(name, _opened(name, run_dir), on_event)
            stack.callback(feed.end)
            feeds.append(feed)

        def tell(event: Event) -> None:
            for feed in feeds:
                feed.queue.put(event)
            on_event(event)

        yield tell


class _Feed(threading.Thread):
    def __init__(self, name: str, sink: Sink, on_event: Callable[[Event], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._sink, self._on_event = sink, on_event
        self._done = 0
        self._outcome: Outcome = "failed"  # one of which no last event is told
        self._failing = False
        self.queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (event := self.queue.get()) is not None:
            self._done = _steps_done(event, self._done)
            self._outcome = _OUTCOMES.get(event.kind, "failed")
            self._try(partial(_pass_on, self._sink, event, self._done))
        self._try(partial(self._sink.close, self._outcome))

    def end(self) -> None:
        """All that was told is passed on, if that does not take too long."""
        self.queue.put(None)
        self.join(_END_SECONDS)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # a server may fail in any way; the run goes on, and says so
            if not self._failing:
                self._on_event(Event("warning", {"message": f"{self.name} does not take the run's numbers: {error}"}, time.time()))
            self._failing = True
        else:
            self._failing = False


def check_sinks(sinks: Sequence[SinkName], backend: str) -> None:
    """Check that a run's backend supports its sinks. Raises: ClusterError if one needs Ray."""
    if "prometheus" in sinks and backend != "ray":
        raise ClusterError(
            "prometheus goes with Ray, whose endpoints have the numbers",
            where="sinks",
            expected="the backend ray",
            got=backend,
            hint="Launch on Ray, or leave it out of sinks.",
        )


def check_sink_libraries(sinks: Sequence[SinkName]) -> None:
    """Check that the libraries of sinks are installed, in a process like the one that will drive the run: no other needs them.

    Raises: StorageError where one is not installed.
    """
    for name in sinks:
        with _naming_the_extra(name):
            _kind(name)


def numbers_of(event: Event) -> dict[str, float]:
    """The numbers of an event, by the names that they have everywhere: "loss", "metrics/accuracy", "evaluation/loss"."""
    data = event.data
    if event.kind == "step":
        found = {name: data[name] for name in _OF_STEPS if name in data}
        return found | {f"metrics/{name}": value for name, value in data["metrics"].items()}
    if event.kind == "eval":
        return {"evaluation/loss": data["loss"], **{f"evaluation/{name}": value for name, value in data["metrics"].items()}}
    if event.kind == "checkpoint":
        return {"checkpoint/seconds": data["seconds"], "checkpoint/bytes": float(data["bytes"])}
    return {}


def _steps_done(event: Event, before: int) -> int:
    if event.kind == "step":
        return int(event.data["step"]) + 1
    return int(event.data["step"]) if event.kind in ("start", "eval") else before


def _pass_on(sink: Sink, event: Event, done: int) -> None:
    step = int(event.data["step"]) if event.kind == "checkpoint" else done
    values = numbers_of(event)
    if values:
        sink.numbers(values, step, event.time)
    elif "message" in event.data:
        sink.text(event.kind, str(event.data["message"]), step, event.time)


def _extra(name: SinkName) -> str:
    """What is installed for a sink."""
    return "ray" if name == "prometheus" else name


@contextmanager
def _naming_the_extra(name: SinkName) -> Iterator[None]:
    """Within it a library that a sink needs and is not there has a hint. Raises: StorageError."""
    try:
        yield
    except ImportError as error:
        raise StorageError(
            f"{name} is not installed", where="sinks", got=str(error), hint=f"pip install 'trainload[{_extra(name)}]', or leave it out."
        ) from error


def _kind(name: SinkName) -> Callable[[Path], Sink]:
    """What opens a sink for the run of a folder. Raises: ImportError where its library is not there."""
    if name == "tensorboard":
        from trainload.launching.sinks.tensorboard import TensorBoard

        return TensorBoard
    if name == "prometheus":
        from trainload.launching.sinks.prometheus import Prometheus

        return Prometheus
    from trainload.launching.sinks.mlflow import Mlflow

    return Mlflow


def _opened(name: SinkName, run_dir: Path) -> Sink:
    with _naming_the_extra(name):
        return _kind(name)(run_dir)
