"""Failures of a run, their costs, and the use of the run's time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainload.launching.run.journal import GIVEN_UP, Event
from trainload.report.frame.words import hour
from trainload.report.runs.episodes import BROKE_OFF, Attempt
from trainload.report.runs.history import History


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure that ended an attempt or the run.

    Laws: the `lost` times of all failures between two steps add up to the time between these steps.
    Steps that were repeated are attributed to the first of these failures.

    Attributes:
        time: time when it was noticed, in seconds since 1970; for a run that broke off, time of its
            last message.
        what: death, node, hang, storage or error for an attempt; failed or broke off for the run.
        message: description of the failure.
        action: reaction to the failure.
        ranks: ranks that failed.
        nodes: nodes that failed.
        doing: rank -> its activity.
        noticed: seconds since the previous step, failure or start of the run.
        lost: its share of the seconds between the steps before and after it; None if there is no
            later step.
        again: number of steps that were repeated because of it; None likewise.
    """

    time: float
    what: str
    message: str
    action: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    doing: Mapping[int, str]
    noticed: float
    lost: float | None
    again: int | None


def failures_of(history: History, attempts: Sequence[Attempt]) -> tuple[Failure, ...]:
    """Return the failures of a run, in order."""
    started = attempts[0].started if attempts else math.inf
    early = [
        event
        for event in history.others
        if event.kind in ("failure", "failed") and event.time < started
    ]
    failures: list[Failure] = list(_read_failures(early, None, None))
    step_counts = [0] * len(failures)
    for index, attempt in enumerate(attempts):
        following = attempts[index + 1] if index + 1 < len(attempts) else None
        new = list(_read_failures(attempt.events, attempt, following))
        failures += new
        step_counts += [attempt.last] * len(new)
    return tuple(_add_costs(history, failures, step_counts))


def _read_failures(
    events: Sequence[Event], attempt: Attempt | None, following: Attempt | None
) -> Iterator[Failure]:
    """Yield the failures of one attempt, without their costs."""
    given_up = False
    for event in events:
        data = event.data
        if event.kind == "failure":
            given_up = data["action"] == GIVEN_UP
            doing = {int(rank): str(text) for rank, text in data["doing"].items()}
            ranks, nodes = tuple(data["ranks"]), tuple(map(str, data["nodes"]))
            yield Failure(
                event.time,
                data["what"],
                data["message"],
                data["action"],
                ranks,
                nodes,
                doing,
                0.0,
                None,
                None,
            )
        elif event.kind == "failed" and not given_up:
            yield Failure(
                event.time,
                "failed",
                f"{data['error']}: {data['message']}",
                _describe_restart(following),
                (),
                (),
                {},
                0.0,
                None,
                None,
            )
    if attempt is not None and attempt.outcome == "broke off":
        yield Failure(
            attempt.ended,
            "broke off",
            BROKE_OFF,
            _describe_restart(following),
            (),
            (),
            {},
            0.0,
            None,
            None,
        )


def _describe_restart(following: Attempt | None) -> str:
    return "not resumed" if following is None else f"resumed at {hour(following.prepared)}"


def _add_costs(
    history: History, failures: Sequence[Failure], step_counts: Sequence[int]
) -> Iterator[Failure]:
    """Yield failures with their costs.

    `step_counts` are the numbers of step events before each failure.
    """
    times, numbers = history.steps.time, history.steps.number
    for index, (failure, place) in enumerate(zip(failures, step_counts, strict=True)):
        first = index == 0 or step_counts[index - 1] != place
        last = index + 1 == len(failures) or step_counts[index + 1] != place
        before = float(times[place - 1]) if place else history.first or failure.time
        before = before if first else failures[index - 1].time
        noticed = max(0.0, failure.time - before)
        if place >= len(times):
            yield replace(failure, noticed=noticed)
            continue
        until = float(times[place]) if last else failure.time
        again = max(0, int(numbers[place - 1]) + 1 - int(numbers[place])) if place and first else 0
        yield replace(failure, noticed=noticed, lost=until - before, again=again)


def time_spent(
    history: History, attempts: Sequence[Attempt], failures: Sequence[Failure]
) -> dict[str, float]:
    """Return the use of the time between the first and last event -> seconds, in display order,
    without negligible ones.

    The duration of a step lasts until the next one, so it includes time that ranks wait for a
    checkpoint, which is subtracted.
    """
    seconds = history.steps.columns["seconds"]
    counted = float(seconds[history.steps.kept()].sum())
    saving = sum(
        float(event.data["seconds"])
        for event in history.of("stage")
        if event.data["name"] == "checkpoint"
    )
    away = sum(each.away[1] - each.away[0] for each in attempts if each.away is not None)
    waiting = sum(until - since for since, until in waits_of(history))
    uses = {
        "steps": max(0.0, counted - saving),
        "steps done again": float(seconds.sum()) - counted,
        "evaluations": sum(float(event.data["seconds"]) for event in history.of("eval")),
        "checkpoints": saving,
        "starting": max(0.0, sum(each.started - each.prepared for each in attempts) - waiting),
        "waiting for nodes or storage": waiting,
        "until failures were noticed": sum(
            each.noticed for each in failures if each.what != "broke off"
        ),
        "nobody drove it": away,
    }
    total = 0.0 if history.first is None or history.last is None else history.last - history.first
    uses["other"] = max(0.0, total - sum(uses.values()))
    return {name: spent for name, spent in uses.items() if spent >= 0.05}


def waits_of(history: History) -> list[tuple[float, float]]:
    """Return the times (from, to) in which the run's driver reported that it waited."""
    waits: list[tuple[float, float]] = []
    since: float | None = None
    for event in history.others:
        if event.kind == "waiting":
            since = event.time if since is None else since
        elif since is not None:
            waits.append((since, event.time))
            since = None
    if since is not None and history.last is not None:
        waits.append((since, history.last))
    return waits
