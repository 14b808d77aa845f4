"""Sinks of a run's numbers beside its journal.

The driver feeds them, so there is one writer for any number of ranks. Whatever a sink does, the run
has the same results: a failing one costs a warning, and a hanging one `_OPEN_SECONDS` at the start
and `_END_SECONDS` at the end.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainload.core.errors import StorageError, raised
from trainload.core.redaction import redacted
from trainload.launching.run.journal import Event
from trainload.launching.sinks.installed_sinks import check_is_sink, load_sink, naming_extra
from trainload.launching.sinks.protocol import Outcome, Sink

_OUTCOMES: Mapping[str, Outcome] = {"end": "ended", "stopped": "stopped", "failed": "failed"}
"""Kind of a run's last event -> outcome of the run."""
_OPEN_SECONDS = 30.0
"""Time for which a run waits for its sinks before it begins."""
_END_SECONDS = 30.0
"""Time for which a run waits for its sinks after its end."""
_MAX_BUFFERED = 50_000
"""Number of the latest events that are buffered for a sink that does not accept them yet."""
_LONGEST_PAUSE = 60.0
"""Maximum time between two attempts to make a sink."""
_MAX_WARNING = 500
"""Number of characters of a sink's own text in a warning."""
_WAITING = "waiting"
"""Failure of a sink that has not responded yet."""
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
    sinks: Sequence[str], run_dir: Path, on_event: Callable[[Event], None], *, new: bool = True
) -> Iterator[Callable[[Event], None]]:
    """Open sinks for the context, and yield a callback that passes events to them and to
    `on_event`.

    Each sink has its own thread, so that an unresponsive server blocks nothing. Numbers that a sink
    fails to accept are lost for it; the first of consecutive failures is reported as a warning. If
    a sink cannot be made yet, its events are buffered until it can.

    Args:
        sinks: names of the sinks.
        run_dir: the run's folder.
        on_event: receives all events, and the warnings about sinks.
        new: True if the run is new, so that it is better rejected than not tracked.

    Raises:
        StorageError: the run is new, and a sink refuses it: its library is not installed, or its
            server is unavailable.
    """
    feeds: list[_Feed] = []
    try:
        for name in sinks:
            feeds.append(_Feed(name, partial(_open_sink, name, run_dir), on_event, new=new))
        until = time.monotonic() + _OPEN_SECONDS
        for feed in feeds:
            feed.await_sink(until)

        def tell(event: Event) -> None:
            for feed in feeds:
                feed.events.put(event)
            on_event(event)

        yield tell
    finally:
        for feed in feeds:
            feed.events.end()
        until = time.monotonic() + _END_SECONDS
        for feed in feeds:
            feed.await_end(until)


class _EventBuffer:
    """The latest events that a sink has not received yet."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_MAX_BUFFERED)
        self._changed = threading.Condition()
        self._is_ended = False

    def put(self, event: Event) -> None:
        """Append an event. If there are too many, the oldest is lost."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def end(self) -> None:
        """Say that no event follows."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def get(self) -> Event | None:
        """Wait for the next event; None after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._is_ended)
            return self._events.popleft() if self._events else None

    def ends_within(self, seconds: float) -> bool:
        """Wait for a time; return True as soon as no event follows."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_ended, seconds)


class _Feed(threading.Thread):
    """Thread that makes a sink, passes events to it, and closes it.

    Args:
        name: name of the sink.
        make: makes the sink.
        on_event: receives the warnings.
        new: True if the run is new; see `open_sinks`.
    """

    def __init__(
        self, name: str, make: Callable[[], Sink], on_event: Callable[[Event], None], *, new: bool
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._make, self._on_event, self._is_new = make, on_event, new
        self._step = 0
        self._outcome: Outcome = "failed"  # for a run without a last event
        self._failing: frozenset[str] = frozenset()
        self._is_tried = threading.Event()
        self._refusal: StorageError | None = None
        self.events = _EventBuffer()
        self.start()

    def await_sink(self, until: float) -> None:
        """Wait until a time, by `time.monotonic`, for the first attempt to make the sink.

        Raises:
            StorageError: the run is new, and the sink refuses it.
        """
        if not self._is_tried.wait(max(0.0, until - time.monotonic())):
            self._is_new = False  # from now on a refusal is too late
            self._warn(
                _WAITING,
                f"it did not respond within {_OPEN_SECONDS:g} s; the run begins without it",
            )
        if self._refusal is not None:
            raise self._refusal

    def await_end(self, until: float) -> None:
        """Wait until a time, by `time.monotonic`, until all events are passed on."""
        self.join(max(0.0, until - time.monotonic()))
        if self.is_alive():
            self._warn(_WAITING, f"it did not accept the last of them within {_END_SECONDS:g} s")

    def run(self) -> None:
        """Feed the sink until the run is over."""
        sink = self._made()
        if sink is None:
            return
        while (event := self.events.get()) is not None:
            self._step = _steps_done(event, self._step)
            self._outcome = _OUTCOMES.get(event.kind, "failed")
            for method, call in _calls(sink, event, self._step):
                if not self._call_sink(method, call):
                    break
        self._call_sink("close", lambda: sink.close(self._outcome))

    def _made(self) -> Sink | None:
        """Return the sink, however many attempts that takes; None if the run is over before, or is
        refused.
        """
        made: list[Sink] = []
        pause = 1.0
        while True:
            self._call_sink("open", lambda: made.append(self._make()))
            self._is_tried.set()
            if made:
                return made[0]
            if self._refusal is not None or self.events.ends_within(pause):
                return None
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _call_sink(self, method: str, call: Callable[[], object]) -> bool:
        """Call a method of the sink, and return True if that did not fail."""
        try:
            call()
        # a server may fail in any way, and libraries raise SystemExit, or panics of Rust that are
        # no Exceptions; the run continues
        except BaseException as error:  # noqa: BLE001
            if isinstance(error, StorageError) and self._is_new and not self._is_tried.is_set():
                self._refusal = error
            else:
                self._warn(method, str(error) or raised(error))
            return False
        self._failing -= {method, _WAITING}
        return True

    def _warn(self, method: str, problem: str) -> None:
        """Report a failure, unless it follows another one."""
        if not self._failing:
            line = " ".join(problem.split())[:_MAX_WARNING]  # servers respond with whole pages
            message = redacted(f"{self.name} did not accept the run's metrics: {line}")
            self._on_event(Event("warning", {"message": message}, time.time()))
        self._failing = self._failing | {method}


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


def _calls(sink: Sink, event: Event, steps_done: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the calls of a sink for an event, with the names of its methods."""
    step = int(event.data["step"]) if event.kind == "checkpoint" else steps_done
    values = numbers_of(event)
    if values:
        yield "numbers", lambda: sink.numbers(values, step, event.time)
    elif "message" in event.data:
        message = str(event.data["message"])
        yield "text", lambda: sink.text(event.kind, message, step, event.time)
    receive = getattr(sink, "event", None)  # of an EventSink
    if receive is not None:
        # others receive the event as well, whatever this sink does with its own
        yield "event", lambda: receive(copy.deepcopy(event), step)


def _open_sink(name: str, run_dir: Path) -> Sink:
    with naming_extra(name):
        sink = load_sink(name)(run_dir)
    check_is_sink(name, sink)
    return sink
