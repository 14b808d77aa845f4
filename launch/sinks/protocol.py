"""The interface of sinks.

A distribution provides a sink as an entry point of the group `trainload.sinks`:

    [project.entry-points."trainload.sinks"]
    csv = "our_sinks:CsvSink"

It is a class, or a function, that is called with the run's folder. `--set sinks=csv` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

from trainload.launching.run.journal import Event

Outcome = Literal["ended", "stopped", "failed"]


class Sink(Protocol):
    """A receiver of a run's numbers.

    It is made by the run's driver, with the run's folder (`pathlib.Path`) as the only argument, and
    called by one thread, so it may wait for a server. If it raises an exception, the run continues,
    and the first of consecutive failures is reported as a warning. If it cannot be made, the run
    tries again later. A new launch is rejected if making it raises `StorageError` at once, which is
    for wrong settings and servers that refuse the run.

    A resumed run makes its sink again, with the same folder. Files that a sink writes there are
    published if the run is at a URL; of these, only those whose names begin with "sink-" are there
    again when the run is resumed on another machine.

    Example:
        class CsvSink:
            def __init__(self, run_dir: Path) -> None:
                self._file = open(run_dir / "numbers.csv", "a")

            def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
                self._file.writelines(f"{step},{name},{values[name]}\\n" for name in values)

            def text(self, kind: str, message: str, step: int, time: float) -> None:
                self._file.write(f"{step},{kind},{message!r}\\n")

            def close(self, outcome: str) -> None:
                self._file.close()

        sink: trainload.Sink = CsvSink(Path("."))
        sink.numbers({"loss": 0.5, "metrics/accuracy": 0.75}, step=1, time=0.0)
        sink.close("ended")
    """

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Receive the numbers after `step` updates. `time` is in seconds since 1970."""

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        """Receive an event after `step` updates."""

    def close(self, outcome: Outcome, /) -> None:
        """Close the sink: the run has ended, was stopped, or has failed."""


@runtime_checkable
class EventSink(Sink, Protocol):
    """A sink that also receives the events of the journal, each after its numbers or its text.

    Example:
        class Steps:
            def __init__(self, run_dir: Path) -> None:
                self.kinds: list[str] = []

            def event(self, event: trainload.Event, step: int) -> None:
                self.kinds.append(event.kind)

            def numbers(self, values: Mapping[str, float], step: int, time: float) -> None: ...
            def text(self, kind: str, message: str, step: int, time: float) -> None: ...
            def close(self, outcome: str) -> None: ...

        assert isinstance(Steps(Path(".")), trainload.EventSink)
    """

    def event(self, event: Event, step: int) -> None:
        """Receive an event after `step` updates."""
