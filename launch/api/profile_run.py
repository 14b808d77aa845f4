"""Profile the next steps of a run that is running."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.core.atomic import create_file
from trainload.core.errors import RequestError, StorageError, TrainingError
from trainload.launching.profiling.profile_files import read_profile, trace_file
from trainload.launching.profiling.profile_result import RankProfile
from trainload.launching.run.journal import Event, Follower
from trainload.launching.run.profile_request import PROFILE_FILE, ProfileRequest
from trainload.launching.run.run_place import files_of, place_name, record_files
from trainload.launching.run.run_spec import read_spec
from trainload.launching.run.run_state import RunState
from trainload.launching.run.working_copy import RunFiles, reported_state, viewed

_LOOK_SECONDS = 0.2
_LOOK_SECONDS_AT_URL = 1.0
_LATE_SECONDS = 60.0
"""Time in which both the result and the end of the request are published."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of some steps of a run.

    Attributes:
        run: folder or URL of the run.
        step: number of the first profiled step, from 1.
        steps: number of profiled steps, fewer than requested if the run had fewer left.
        folder: folder or URL of the files: for each rank a trace in Chrome's format,
            `rank-N.trace.json.gz`, and its tables, `rank-N.json`.
        ranks: the profile of each rank that was requested.
        seconds: time for which the run waited.

    Example:
        def slowest_lines(run_dir: str) -> list[str]:
            profile = trainload.profile(run_dir, steps=3)
            return [line.line for line in profile.ranks[0].interpreted.lines[:5]]
    """

    run: str
    step: int
    steps: int
    folder: str
    ranks: tuple[RankProfile, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "run": self.run,
            "step": self.step,
            "steps": self.steps,
            "folder": self.folder,
            "seconds": round(self.seconds, 3),
            "ranks": [
                {"trace": f"{self.folder}/{trace_file(each.rank)}", **each.as_json()}
                for each in self.ranks
            ],
        }


def profile(
    run_dir: str | Path,
    *,
    steps: int = 3,
    rank: int | Sequence[int] = 0,
    trace_only: bool = False,
) -> Profile:
    """Profile the next steps of a run that is running, and wait for the result.

    The steps are traced as they run. Then all ranks compute forward and backward of the last step
    again, interpreted, and the requested ranks measure time by line and memory by module. The run's
    results do not change.

    Args:
        run_dir: folder or URL of the run.
        steps: number of steps.
        rank: rank, or ranks, to profile.
        trace_only: True to leave out the interpreted graphs, which need more memory than compiled
            ones.

    Raises:
        RequestError: the number of steps is not positive, or the run does not have the rank.
        StorageError: there is no such run, it is not running, another profile of it is not
            complete, or its storage cannot be reached.
        TrainingError: the run has ended, or its attempt has failed, before the profile was
            complete.

    Example:
        profile = trainload.profile("runs/first", steps=2)
        print(profile.ranks[0].operators[0], profile.folder)
    """
    ranks = (rank,) if isinstance(rank, int) else tuple(dict.fromkeys(rank))
    with viewed(run_dir) as files:
        return request_profile(files, steps, ranks, trace_only=trace_only).result()


def request_profile(
    files: RunFiles, steps: int, ranks: Sequence[int], *, trace_only: bool = False
) -> RequestedProfile:
    """Request a profile of a run's next steps, without waiting for it.

    Args:
        files: the run.
        steps: number of steps.
        ranks: ranks to profile.
        trace_only: see `profile`.

    Returns:
        The requested profile.

    Raises:
        RequestError, StorageError: see `profile`.
    """
    if steps < 1:
        raise RequestError(
            "there is nothing to profile", where="steps", expected="1 or more", got=str(steps)
        )
    if not ranks:
        raise RequestError(
            "there is nothing to profile", where="rank", expected="a rank", got="none"
        )
    state = _require_alive(files)
    _check_ranks(ranks, state.summary.world or read_spec(files.folder).plan.world_size)
    requested = RequestedProfile(
        files, ProfileRequest(secrets.token_hex(8), steps, tuple(ranks), trace_only)
    )
    content = requested.request.to_json()
    place = place_name(files.folder)
    remote = files_of(files.folder)
    try:
        is_created = (
            create_file(files.folder / PROFILE_FILE, content)
            if remote is None
            else remote.create(PROFILE_FILE, content)
        )
    except OSError as error:
        raise StorageError(
            f"the request cannot be written: {error.strerror}", where=place
        ) from error
    if not is_created:
        raise StorageError(
            "another profile of the run is not complete yet",
            where=f"{place}/{PROFILE_FILE}",
            hint="Wait for it, and request this one again.",
        )
    return requested


class RequestedProfile:
    """A profile that is requested.

    Args:
        files: the run, whose journal is followed from now on.
        request: the request, which is about to be made.

    Attributes:
        request: the request.
    """

    def __init__(self, files: RunFiles, request: ProfileRequest) -> None:
        self.request = request
        self._files = files
        self._follower = Follower(files.folder, from_end=True)

    def result(self) -> Profile:
        """Wait for the profile, and return it.

        Raises:
            StorageError, TrainingError: see `profile`.
        """
        files, event = self._files, self._wait()
        place = place_name(files.folder)
        if event.data["error"]:
            raise TrainingError(
                "the profile is not complete",
                where=place,
                got=event.data["error"],
                hint="Request it again.",
            )
        first, records = event.data["step"] + 1, record_files(files.folder)
        return Profile(
            place,
            first,
            event.data["steps"],
            f"{place}/{event.data['where']}",
            tuple(read_profile(records, first, rank) for rank in self.request.ranks),
            event.data["seconds"],
        )

    def _wait(self) -> Event:
        """Return the event that reports the end of the profile, once the request is withdrawn, so
        that the next one can be made.

        Raises:
            TrainingError: there will be none.
        """
        files = self._files
        end: Event | None = None
        since = time.monotonic()
        while True:
            state = reported_state(files)
            is_gone = not (files.folder / PROFILE_FILE).exists()
            for event in self._follower.new():  # after the state, so that the last one is seen
                if event.kind == "profile" and event.data["id"] == self.request.id:
                    end = event
            if is_gone == (end is not None):
                since = time.monotonic()
            is_late = time.monotonic() - since > _LATE_SECONDS
            if end is not None and (is_gone or not state.alive or is_late):
                return end
            if not state.alive:
                raise TrainingError(
                    "the run has ended before the profile was complete",
                    where=place_name(files.folder),
                    got=f"phase {state.phase}",
                    hint="Request fewer steps, or a profile of a longer run.",
                )
            if is_gone and is_late:
                raise TrainingError(
                    "the request was withdrawn",
                    where=place_name(files.folder),
                    hint="Request it again.",
                )
            time.sleep(_LOOK_SECONDS_AT_URL if files.is_at_url else _LOOK_SECONDS)


def _check_ranks(ranks: Sequence[int], world: int) -> None:
    """Raise RequestError if a run of `world` ranks lacks one of `ranks`."""
    unknown = [rank for rank in ranks if not 0 <= rank < world]
    if unknown:
        raise RequestError(
            "the run does not have this rank",
            where="rank",
            expected=f"0 to {world - 1}",
            got=", ".join(map(str, unknown)),
        )


def _require_alive(files: RunFiles) -> RunState:
    """Return the state of a run that is running.

    Raises StorageError if it is not.
    """
    state = reported_state(files)
    if not state.alive:
        raise StorageError(
            "the run is not running",
            where=place_name(files.folder),
            got=f"phase {state.phase}",
            hint="Only steps of a running job can be profiled. `trainload debug --statistics`"
            " computes a step of any run again.",
        )
    return state
