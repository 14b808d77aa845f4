"""Sinks of a run's numbers beside its journal.

The driver feeds them, so there is one writer for any number of ranks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainload.core.errors import ClusterError, StorageError
from trainload.launching.run.journal import Event
from trainload.launching.settings.run_settings import SinkName
from trainload.launching.sinks.protocol import Outcome, Sink

_OUTCOMES: Mapping[str, Outcome] = {"end": "ended", "stopped": "stopped", "failed": "failed"}
"""Kind of a run's last event -> outcome of the run."""
_END_SECONDS = 30.0
_STEP_NUMBERS = (
    "loss",
    "gradient_norm",
    "loss_scale",
    "seconds",
    "data_wait",
    "mfu",
    "memory",
    "tokens_per_second",
    "rows_per_second",
)


@contextmanager
def open_sinks(
    sinks: Sequence[SinkName], run_dir: Path, on_event: Callable[[Event], None]
) -> Iterator[Callable[[Event], None]]:
    """Open sinks for the context, and yield a callback that passes events to them and to
    `on_event`.

    Each sink has its own thread, so that an unresponsive server blocks nothing. Numbers that a sink
    fails to accept are lost for it; the first of consecutive failures is reported as a warning.

    Raises:
        StorageError: the library of a sink is not installed, or its server does not respond at the
            start.
    """
    with ExitStack() as stack:
        feeds = []
        for name in sinks:
            feed = _Feed(name, _open_sink(name, run_dir), on_event)
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
        self._step = 0
        self._outcome: Outcome = "failed"  # for a run without a last event
        self._failing = False
        self.queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (event := self.queue.get()) is not None:
            self._step = _steps_done(event, self._step)
            self._outcome = _OUTCOMES.get(event.kind, "failed")
            self._call_sink(partial(_pass_on, self._sink, event, self._step))
        self._call_sink(partial(self._sink.close, self._outcome))

    def end(self) -> None:
        """Wait, for a limited time, until all events are passed on."""
        self.queue.put(None)
        self.join(_END_SECONDS)

    def _call_sink(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # a server may fail in any way; the run continues with a warning
            if not self._failing:
                self._on_event(
                    Event(
                        "warning",
                        {"message": f"{self.name} did not accept the run's metrics: {error}"},
                        time.time(),
                    )
                )
            self._failing = True
        else:
            self._failing = False


def check_sinks(sinks: Sequence[SinkName], backend: str) -> None:
    """Raise ClusterError if a sink needs Ray and the run's backend is another one."""
    if "prometheus" in sinks and backend != "ray":
        raise ClusterError(
            "prometheus requires Ray, whose endpoints serve the metrics",
            where="sinks",
            expected="backend ray",
            got=backend,
            hint="Launch on Ray, or remove it from sinks.",
        )


def check_sink_libraries(sinks: Sequence[SinkName]) -> None:
    """Raise StorageError if the library of a sink is not installed.

    Only the driver of the run needs them.
    """
    for name in sinks:
        with _naming_extra(name):
            _sink_class(name)


def numbers_of(event: Event) -> dict[str, float]:
    """Return the numbers of an event by their names in all sinks: "loss", "metrics/accuracy",
    "evaluation/loss", "statistics/layers.3.mlp/rms".
    """
    data = event.data
    if event.kind == "step":
        numbers = {name: data[name] for name in _STEP_NUMBERS if name in data}
        return numbers | {f"metrics/{name}": value for name, value in data["metrics"].items()}
    if event.kind == "eval":
        return {
            "evaluation/loss": data["loss"],
            **{f"evaluation/{name}": value for name, value in data["metrics"].items()},
        }
    if event.kind == "statistics":
        return dict(_statistics(data))
    if event.kind == "checkpoint":
        return {"checkpoint/seconds": data["seconds"], "checkpoint/bytes": float(data["bytes"])}
    return {}


def _statistics(data: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    graph = f"{data['graph']}." if "graph" in data else ""
    for each in (*data["activations"], *data["parameters"]):
        name = each.get("parameter") or ".".join(
            filter(None, (each["module"] or "model", each["operator"]))
        )
        number = f".{each['number'] + 1}" if each.get("number") else ""
        for measure, value in each.items():
            if isinstance(value, float):
                yield f"statistics/{graph}{name}{number}/{measure}", value


def _steps_done(event: Event, before: int) -> int:
    if event.kind == "step":
        return int(event.data["step"]) + 1
    return int(event.data["step"]) if event.kind in ("start", "eval") else before


def _pass_on(sink: Sink, event: Event, steps_done: int) -> None:
    step = int(event.data["step"]) if event.kind == "checkpoint" else steps_done
    values = numbers_of(event)
    if values:
        sink.numbers(values, step, event.time)
    elif "message" in event.data:
        sink.text(event.kind, str(event.data["message"]), step, event.time)


def _extra_of(name: SinkName) -> str:
    """Return the extra of trainload that a sink needs."""
    return "ray" if name == "prometheus" else name


@contextmanager
def _naming_extra(name: SinkName) -> Iterator[None]:
    """Convert an ImportError within the context into a StorageError that names the extra to
    install.
    """
    try:
        yield
    except ImportError as error:
        raise StorageError(
            f"{name} is not installed",
            where="sinks",
            got=str(error),
            hint=f"Run `pip install 'trainload[{_extra_of(name)}]'`, or remove it from sinks.",
        ) from error


def _sink_class(name: SinkName) -> Callable[[Path], Sink]:
    """Return the class of a sink, which is called with a run's folder.

    Raises ImportError if its library is not installed.
    """
    if name == "tensorboard":
        from trainload.launching.sinks.tensorboard import TensorBoard

        return TensorBoard
    if name == "prometheus":
        from trainload.launching.sinks.prometheus import Prometheus

        return Prometheus
    from trainload.launching.sinks.mlflow import Mlflow

    return Mlflow


def _open_sink(name: SinkName, run_dir: Path) -> Sink:
    with _naming_extra(name):
        return _sink_class(name)(run_dir)
