"""Profile steps of a rank on request: the steps as they run, and then a pass of the interpreted
graphs, which all ranks compute together.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainload.core.errors import StorageError, first_line
from trainload.launching.node.built_graphs import Built
from trainload.launching.node.process_groups import gathered
from trainload.launching.node.utilisation import used_bytes
from trainload.launching.profiling.interpreted_pass import InterpretedPass, State
from trainload.launching.profiling.live_tensors import Origin
from trainload.launching.profiling.profile_files import profile_folder, trace_file, write_profile
from trainload.launching.profiling.profile_result import (
    InterpretedProfile,
    Kind,
    RankProfile,
)
from trainload.launching.profiling.step_trace import STEP, StepTrace, span, spans_of, with_spans
from trainload.launching.profiling.trace_table import operators_of
from trainload.launching.run.activity import Activity, Phase
from trainload.launching.run.contact import Contact, Wanted
from trainload.launching.run.profile_request import ProfileRequest
from trainload.packaging.package import Package
from trainload.sharding.plans.estimate import of_rank
from trainload.sharding.plans.plan import Plan
from trainload.sharding.rewriting.rank_update import StateKey

PASSES = 3
"""Passes of the interpreted graphs."""


class HeldState(Protocol):
    """Tensors that a rank holds between steps; see `worker.rank_state.RankState`."""

    params: dict[str, Tensor]
    states: dict[StateKey, list[Tensor]]
    means: dict[str, Tensor]
    buffers: dict[str, Tensor]
    constants: dict[str, Tensor]
    scaling: dict[str, list[Tensor]]


class ProfiledEngine(Protocol):
    """The engine whose steps are profiled; see `worker.engine.Engine`."""

    built: Built

    @property
    def held(self) -> HeldState:
        """State of the rank between steps."""

    def repeat_turn(self, built: Built, /) -> None:
        """Compute forward and backward of the last turn again, by another build."""


@dataclass(slots=True)
class _Recording:
    """Steps that are being profiled.

    Attributes:
        request: the request.
        first: number of the first step, from 0.
        last: number of the last step, from 0.
        own: callables of the engine before; None on a rank that is not profiled.
        trace: trace of this rank; None likewise.
        error: why this rank has no trace.
        seconds: duration of the steps so far.
    """

    request: ProfileRequest
    first: int
    last: int
    own: Built | None = None
    trace: StepTrace | None = None
    error: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class Profiling:
    """Profiler of a rank. It does nothing until a profile is requested.

    All ranks call `agree` and `advance` after the same steps.

    Attributes:
        package: package that is trained.
        plan: plan of the run.
        rank: this rank.
        device: its device.
        engine: its engine.
        contact: its connection to the driver.
        control: group of all ranks for messages; None if there is one rank.
        activity: its activity.
        run_dir: the run's folder, or its URL.
        steps: length of the run.
        build: makes an interpreted build whose graphs know their source lines.
    """

    package: Package
    plan: Plan
    rank: int
    device: torch.device
    engine: ProfiledEngine
    contact: Contact
    control: dist.ProcessGroup | None
    activity: Activity
    run_dir: str
    steps: int
    build: Callable[[], Built]
    _asked: ProfileRequest | None = None
    _is_wanted: bool = False
    _last_id: str = ""
    _recording: _Recording | None = None
    _interpreted: Built | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End a recording that is not complete: this process may serve another attempt."""
        recording, self._recording = self._recording, None
        if recording is not None:
            self._stop(recording)

    @property
    def records(self) -> bool:
        """True while the steps of this rank are recorded."""
        return self._recording is not None and self._recording.trace is not None

    # Ranges of the trace

    def step(self, step: int) -> AbstractContextManager[Any]:
        """Return the context of a step."""
        return self._timed_step(step) if self._recording is not None else nullcontext()

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that is a range of the trace, if there is one."""
        return span(name) if self.records else nullcontext()

    def seen(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of a stream; waiting for each is a range of the trace, if there is
        one.
        """
        return spans_of(stream) if self.records else stream

    # Requests

    def wants(self, asked: Wanted) -> bool:
        """Take the pending request of the run on rank 0, and return True if it is a profile that
        can begin.
        """
        is_new = isinstance(asked, ProfileRequest) and asked.id != self._last_id
        self._asked = asked if is_new and isinstance(asked, ProfileRequest) else None
        return self._asked is not None and self._recording is None

    def agree(self, wanted: bool) -> None:
        """Note that rank 0 wants a profile; the same on all ranks."""
        self._is_wanted = wanted

    def advance(self, done: int) -> bool:
        """Complete a profile whose last step is done, and begin one that is wanted.

        Args:
            done: number of steps that are done.

        Returns:
            True if that took time.
        """
        recording = self._recording
        if recording is not None and done > recording.last:
            with self.activity.within(Phase.PROFILING):
                self._complete(recording)
            return True
        if self._is_wanted and done < self.steps:
            self._is_wanted = False
            with self.activity.within(Phase.PROFILING):
                self._begin(done)
            return True
        return False

    @contextmanager
    def _timed_step(self, step: int) -> Iterator[None]:
        began = time.perf_counter()
        with self.span(f"{STEP} {step + 1}"):
            yield
        if self._recording is not None:
            self._recording.seconds += time.perf_counter() - began

    def _begin(self, done: int) -> None:
        (request, *_) = gathered(self._asked, self.control)
        assert request is not None, "rank 0 wants a profile"
        self._last_id = request.id
        unknown = [rank for rank in request.ranks if not 0 <= rank < self.plan.world_size]
        if unknown:
            ranks = ", ".join(map(str, unknown))
            self._report(request, error=f"the run has {self.plan.world_size} ranks, and no {ranks}")
            return
        last = min(done + request.steps, self.steps) - 1
        recording = self._recording = _Recording(request, done, last)
        if self.rank not in request.ranks:
            return
        trace = StepTrace(self.device, self.rank, done + 1)
        try:
            trace.start()
        except RuntimeError as error:  # such as of another profiler of this process
            recording.error = first_line(error)
            return
        recording.trace, recording.own = trace, self.engine.built
        self.engine.built = with_spans(self.engine.built)

    def _stop(self, recording: _Recording) -> None:
        if recording.own is not None:
            self.engine.built = recording.own
        if recording.trace is not None:
            recording.trace.stop()

    def _complete(self, recording: _Recording) -> None:
        began = time.perf_counter()
        request, memory = recording.request, used_bytes(self.device)
        self._recording = None
        self._stop(recording)
        interpreted = None
        try:
            if not request.trace_only:
                interpreted = self._interpret(request)
        except RuntimeError as failure:  # such as of too little memory
            if self.control is not None:  # other ranks may wait for this one in a collective
                failure.add_note("Profiles with --trace-only do not compute interpreted graphs.")
                raise
            recording.error = f"the interpreted graphs cannot be computed: {first_line(failure)}"
        error = recording.error or self._write(recording, memory, interpreted)
        error = next(filter(None, gathered(error, self.control)), "")
        self._report(
            request,
            step=recording.first,
            steps=recording.last - recording.first + 1,
            ranks=list(request.ranks),
            where=profile_folder(recording.first + 1),
            seconds=time.perf_counter() - began,
            error=error,
        )

    def _write(
        self, recording: _Recording, memory: int, interpreted: InterpretedProfile | None
    ) -> str:
        """Write the files of this rank, if it was profiled; return why that failed, or ""."""
        if recording.trace is None:
            return ""
        steps = recording.last - recording.first + 1
        try:
            with TemporaryDirectory(prefix="trainload-") as folder:
                trace = Path(folder) / trace_file(self.rank)
                recording.trace.export(trace)
                profile = RankProfile(
                    self.rank,
                    socket.gethostname(),
                    self.device.type,
                    recording.first + 1,
                    steps,
                    recording.seconds / steps,
                    memory,
                    operators_of(trace, steps, is_gpu=self.device.type == "cuda"),
                    interpreted,
                )
                write_profile(self.run_dir, profile, trace)
        except (StorageError, OSError) as error:
            return f"rank {self.rank} cannot write its profile: {first_line(error)}"
        return ""

    def _report(self, request: ProfileRequest, **data: Any) -> None:
        if self.rank == 0:
            self.contact.write("profile", id=request.id, **data)
            self.contact.met(request)

    def _interpret(self, request: ProfileRequest) -> InterpretedProfile | None:
        """Compute the last turn again, interpreted, without an update. All ranks must call it.

        Returns:
            Times and memory of this rank; None if it is not profiled.
        """
        if self._interpreted is None:  # deriving the graphs takes longer than calling them
            self._interpreted = self.build()
        built, measured = self._interpreted, None
        if self.rank in request.ranks:
            measured = InterpretedPass(self.plan, self.rank, self.device, _state(self.engine.held))
            built = measured.measured(built)
        for _ in range(PASSES):
            if measured is not None:
                measured.begin()
            self.engine.repeat_turn(built)
        if measured is None:
            return None
        index = self.plan.pipeline_index(self.rank)
        return measured.result(of_rank(self.plan, self.package, index))


def _state(held: HeldState) -> State:
    """Return what a rank holds between steps, by origin."""
    state: dict[Origin, list[Tensor]] = {}
    for name, value in held.params.items():
        state.setdefault(Origin(Kind.PARAMETERS, bucket=name), []).append(value)
    for (name, _), values in held.states.items():
        state.setdefault(Origin(Kind.STATE, bucket=name), []).extend(values)
    for name, value in held.means.items():
        state.setdefault(Origin(Kind.STATE, bucket=name), []).append(value)
    for values in held.scaling.values():
        state.setdefault(Origin(Kind.STATE), []).extend(values)
    others = [*held.buffers.values(), *held.constants.values()]
    return {**state, Origin(Kind.OTHER): others}
