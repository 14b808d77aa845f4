"""State of a run, in a file that its driver replaces every second, for `trainload status` and other
readers.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trainload.core.atomic import replace_file
from trainload.core.canonical_json import canonical_json
from trainload.core.logs import log_handled
from trainload.core.processes import has_ended, this_process
from trainload.launching.run.activity import Doing
from trainload.launching.run.journal import Event

_log = logging.getLogger(__name__)

STATE_FILE = "state.json"
STATE_SECONDS = 1.0
"""Interval between two writes, in seconds."""
FRESH_SECONDS = 15.0
"""Seconds without a write after which a driver is considered lost, unless its process is known to
be alive.
"""

Phase = Literal["waiting", "running", "ended", "stopped", "failed", "lost"]
"""waiting: for nodes, or for workers to restart. stopped: on request. lost: the driver ended
without writing a final state.
"""


class Summary(BaseModel):
    """Summary of a run's events.

    Attributes:
        step: number of finished steps. steps: length of the run.
        loss, gradient_norm, tokens_per_second, rows_per_second: values of the last step.
        seconds_left: estimated time until the last step.
        data_wait: fraction of the time of the last steps that rank 0 waited for data.
        mfu: model FLOPs utilization of the last steps. memory: bytes on the rank that uses most.
        evaluation: loss of the last evaluation; evaluated_at: its step.
        checkpoint: step of the last published checkpoint, None if there is none;
            checkpoint_time: its time, in seconds since 1970.
        world: number of ranks of the last attempt. strategy: strategy of its plan.
        starts: number of attempts that reached the training loop. failures: number of failed
            attempts. warnings: number of warnings.
        last_failure: description of the last failure.
        message: why the run stopped or failed, what it waits for, or the reaction to a failure.
            error: name of the error that ended the run.
        phase: waiting, running, ended, stopped or failed.
        updated: time of the last event.
    """

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    steps: int = 0
    loss: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None
    rows_per_second: float | None = None
    seconds_left: float | None = None
    data_wait: float | None = None
    mfu: float | None = None
    memory: int | None = None
    evaluation: float | None = None
    evaluated_at: int | None = None
    checkpoint: int | None = None
    checkpoint_time: float | None = None
    world: int = 0
    strategy: str = ""
    starts: int = 0
    failures: int = 0
    warnings: int = 0
    last_failure: str = ""
    message: str = ""
    error: str = ""
    phase: Phase = "waiting"
    updated: float = 0.0

    @classmethod
    def of(cls, events: Iterable[Event]) -> Summary:
        """Summarize events."""
        summary = cls()
        for event in events:
            summary.take(event)
        return summary

    def take(self, event: Event) -> None:
        """Add an event."""
        data = event.data
        self.updated = event.time
        match event.kind:
            case "start":
                self.step, self.steps, self.world, self.strategy = (
                    data["step"],
                    data["steps"],
                    data["world"],
                    data["strategy"],
                )
                self.starts += 1
                self.phase, self.message, self.error, self.data_wait = "running", "", "", None
                self.mfu = None
            case "step":
                self.step, self.loss, self.gradient_norm = (
                    data["step"] + 1,
                    data["loss"],
                    data["gradient_norm"],
                )
                self.tokens_per_second, self.rows_per_second = (
                    data.get("tokens_per_second"),
                    data.get("rows_per_second"),
                )
                self.seconds_left = data.get("seconds_left")
                share = min(1.0, data.get("data_wait", 0.0) / max(data["seconds"], 1e-9))
                self.data_wait = _mean(self.data_wait, share)
                self.mfu = _mean(self.mfu, data["mfu"]) if "mfu" in data else None
                self.memory = data.get("memory")
            case "eval":
                self.evaluation, self.evaluated_at = data["loss"], data["step"]
            case "checkpoint":
                self.checkpoint, self.checkpoint_time = data["step"], event.time
            case "failure":
                self.failures += 1
                self.last_failure = data["message"]
                self.phase, self.message = "waiting", data["action"]
            case "warning":
                self.warnings += 1
            case "waiting":
                self.phase, self.message = "waiting", data["message"]
            case "end":
                self.phase, self.step, self.seconds_left = "ended", data["step"], 0.0
            case "failed" | "stopped":
                self.phase, self.message, self.error = event.kind, data["message"], data["error"]


def _mean(before: float | None, value: float) -> float:
    """Return a running mean over about twenty values."""
    return value if before is None else 0.95 * before + 0.05 * value


class RankSeen(BaseModel):
    """The last report of a rank to the driver.

    Attributes:
        node: Ray's id of the node, or a host name.
        age: seconds since the report.
        doing: description of the activity.
        memory: bytes in use.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: str
    pid: int
    age: float
    phase: str
    step: int | None
    doing: str
    memory: int

    @classmethod
    def of(cls, node: str, pid: int, age: float, doing: Doing) -> RankSeen:
        """Return the record of a rank's report."""
        return cls(
            node=node,
            pid=pid,
            age=round(age, 1),
            phase=doing.phase,
            step=doing.step,
            doing=str(doing),
            memory=doing.memory,
        )


class RunState(BaseModel):
    """The state of a run at one time.

    Attributes:
        time: seconds since 1970.
        host, pid: host and process of the driver. process: its id by `this_process`; "" if unknown.
        attempt: number of the attempt since the driver started.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    host: str
    pid: int
    process: str = ""
    attempt: int
    over: bool
    summary: Summary
    ranks: dict[int, RankSeen]

    @property
    def alive(self) -> bool:
        """True if its driver is alive, as far as is known on this machine."""
        if self.over:
            return False
        ended = has_ended(self.process)
        return abs(time.time() - self.time) < FRESH_SECONDS if ended is None else not ended

    @property
    def of_another(self) -> bool:
        """True if its driver is alive and is not this process."""
        return self.alive and (
            self.process != this_process()
            if self.process
            else (self.host, self.pid) != (socket.gethostname(), os.getpid())
        )

    @property
    def phase(self) -> Phase:
        """Phase of the run."""
        return self.summary.phase if self.over or self.alive else "lost"


def write_state(
    run_dir: Path, attempt: int, summary: Summary, ranks: dict[int, RankSeen], *, over: bool = False
) -> RunState:
    """Replace the file, from the process that drives the run.

    `over` is True if the driver ends now. Returns the new state. Raises OSError.
    """
    state = RunState(
        time=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        process=this_process(),
        attempt=attempt,
        over=over,
        summary=summary,
        ranks=dict(ranks),
    )
    put_state(run_dir, state)
    return state


def put_state(run_dir: Path, state: RunState) -> None:
    """Replace the file with a driver's state. Raises OSError."""
    replace_file(
        run_dir / STATE_FILE,
        canonical_json(_replace_non_finite(state.model_dump(mode="json"))),
        durable=False,
    )


def _replace_non_finite(value: object) -> object:
    """Replace numbers that JSON cannot represent by None."""
    if isinstance(value, dict):
        return {key: _replace_non_finite(each) for key, each in value.items()}
    return (
        None
        if isinstance(value, float) and (value != value or abs(value) == float("inf"))
        else value
    )


def read_state(run_dir: Path) -> RunState | None:
    """Return the last state that a driver wrote; None if there is none that can be read."""
    try:
        content = (run_dir / STATE_FILE).read_bytes()
    except OSError:
        return None
    return parse_state(content, str(run_dir / STATE_FILE))


def parse_state(content: bytes, where: str) -> RunState | None:
    """Parse a driver's state; None if it is damaged."""
    try:
        return RunState.model_validate_json(content)
    except ValidationError as error:
        log_handled(_log, f"{where} is damaged", error)
        return None
