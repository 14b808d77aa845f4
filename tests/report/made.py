"""Simulated runs: folders with the files that a driver would have written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from trainload.launching.run.journal import JOURNAL, Event, Journal
from trainload.launching.run.run_spec import RunSpec, write_spec
from trainload.sharding.plans.plan import NO_ESTIMATE, Cluster, Plan

BEGIN = 1_790_000_000.0
"""Start time of simulated runs, in seconds since 1970."""
VOID = frozenset({"meta", "link", "br", "wbr", "img", "input"})


def plan(world: int = 1) -> Plan:
    cluster = Cluster(nodes=world)
    return Plan(
        package="ab" * 32,
        cluster=cluster,
        strategy="zero3" if world > 1 else "single",
        global_batch=8,
        buckets=(),
        estimate=NO_ESTIMATE,
    )


def made_run(run_dir: Path, events: Iterable[Event], world: int = 1, **asked: Any) -> Path:
    """Create a run's folder with these events."""
    fields = {
        "package": "/packages/gpt.tl",
        "data": "/data/train.npz",
        "steps": 100,
        "digest": "cd" * 32,
        **asked,
    }
    write_spec(RunSpec(plan=plan(world), run_dir=str(run_dir), **fields))
    Journal(run_dir).append(list(events))
    return run_dir


def start(time: float, step: int = 0, world: int = 1) -> Event:
    nodes = [f"node{rank}" for rank in range(world)]
    workers = [f"{node}:{100 + rank}" for rank, node in enumerate(nodes)]
    said = {
        "step": step,
        "steps": 100,
        "world": world,
        "strategy": "zero3",
        "compiled": True,
        "workers": workers,
        "nodes": nodes,
    }
    return Event("start", said, BEGIN + time)


def step(time: float, number: int, loss: float = 1.0, **more: Any) -> Event:
    said = {
        "step": number,
        "steps": 100,
        "loss": loss,
        "metrics": {},
        "gradient_norm": 2.0,
        "data_wait": 0.1,
        "seconds": 1.0,
    }
    return Event("step", {**said, "rows_per_second": 8.0, **more}, BEGIN + time)


def steps(time: float, numbers: Sequence[int], **more: Any) -> list[Event]:
    """Return one step event per second; the first is one second after `time`."""
    return [step(time + passed, number, **more) for passed, number in enumerate(numbers, 1)]


def failure(time: float, **told: Any) -> Event:
    said = {
        "what": "death",
        "message": "rank 1 died",
        "ranks": [1],
        "nodes": [],
        "doing": {},
        "attempt": 1,
    }
    return Event(
        "failure", {**said, "action": "it restarts from its last checkpoint", **told}, BEGIN + time
    )


def event(time: float, kind: str, **data: Any) -> Event:
    return Event(kind, data, BEGIN + time)


FAULTY = [
    event(2, "stage", name="data", seconds=2.0),
    start(5, world=2),
    event(5, "eval", step=0, loss=4.0, metrics={"accuracy": 0.1}, seconds=0.5),
    *[
        step(
            5 + number, number, 4.0 - number * 0.1, mfu=0.3, memory=2**34, metrics={"accuracy": 0.5}
        )
        for number in range(1, 11)
    ],
    event(12, "checkpoint", step=6, seconds=0.5, bytes=10),
    event(16, "warning", message="a checkpoint could not be written"),
    failure(20, doing={"0": "in a step at step 10", "1": "saving at step 10"}, nodes=["node1"]),
    event(21, "resize", message="2 -> 1 ranks", world=1),
    start(30, step=6),
    *steps(30, range(6, 20)),
    event(40, "preemption", message="node node0 will be gone", node="node0", seconds_left=30.0),
    event(44, "end", step=20, steps=20),
]
"""Events of a run of two ranks with failures, restarts and warnings."""


def long_journal(run_dir: Path, count: int, spike_at: int, spike: float) -> None:
    """Write a journal of many steps without the overhead of events."""
    with (run_dir / JOURNAL).open("a") as file:
        for number in range(count):
            loss = (
                spike
                if number == spike_at
                else 3.0 / (1.0 + number * 1e-4) + (number * 7919 % 101) * 1e-3
            )
            told = {
                "step": number,
                "steps": count,
                "loss": loss,
                "metrics": {"accuracy": 0.5},
                "gradient_norm": 1.0,
                "data_wait": 0.001,
            }
            told |= {
                "seconds": 0.05,
                "rows_per_second": 160.0,
                "seconds_left": 1.0,
                "tokens_per_second": 1e6,
                "mfu": 0.4,
                "memory": 2**34,
            }
            file.write(
                json.dumps({"kind": "step", "time": BEGIN + number * 0.05, "data": told}) + "\n"
            )
            if number % 1000 == 999:
                saved = {"step": number + 1, "seconds": 1.0, "bytes": 1000}
                file.write(
                    json.dumps({"kind": "checkpoint", "time": BEGIN + number * 0.05, "data": saved})
                    + "\n"
                )


class Read(HTMLParser):
    """A page as parsed by a browser. Every element must be closed.

    Attributes:
        tags: tags of all elements, in order.
        attributes: (tag, name, value).
        texts: contents of elements, except style.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def values(self, name: str) -> list[str]:
        """Return the values of an attribute in all elements."""
        return [value for _, each, value in self.attributes if each == name]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style" and data.strip():
            self.texts.append(data.strip())

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
