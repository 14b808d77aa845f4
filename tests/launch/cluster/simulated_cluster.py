"""A cluster in memory, with a clock of its own, for tests of a run's driver.

Ranks report to a real `Mailbox`, and the driver writes real journals and states.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError, GetTimeoutError

from trainload.core.errors import TrainloadError
from trainload.launching.cluster.attempt import AttemptError
from trainload.launching.cluster.mailbox import Beat, Collected, Mailbox, NodeReport
from trainload.launching.cluster.node_actor import RankFailure
from trainload.launching.cluster.nodes import Node
from trainload.launching.cluster.states import Placing, Running, State
from trainload.launching.cluster.supervised_run import SupervisedRun
from trainload.launching.cluster.supervisor import Supervisor
from trainload.launching.run.activity import Doing, Phase
from trainload.launching.run.contact import Request, Wanted
from trainload.launching.run.driver import CheckDriver
from trainload.launching.run.journal import Event
from trainload.launching.run.run_spec import RunSpec

STEPS = 40
PATIENCE = 600.0
HANG_SECONDS = 30.0
MAX_FAILURES = 3


class Clock:
    """A clock that stands still until `now` is changed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def plan_of(world: int) -> Any:
    """Return what the driver reads of a plan for `world` nodes of one CPU."""
    return SimpleNamespace(
        world_size=world,
        tensor_ranks=1,
        shard_ranks=None,
        pipeline=None,
        cluster=SimpleNamespace(device="cpu", devices_per_node=1, nodes=world),
    )


def spec_of(run_dir: Path, worlds: Sequence[int] = (2,)) -> RunSpec:
    """Return a run whose plans have these numbers of ranks."""
    plans = tuple(plan_of(world) for world in worlds)
    return RunSpec.model_construct(
        run_dir=str(run_dir),
        plan=plans[0],
        plans=plans if len(plans) > 1 else (),
        steps=STEPS,
        storage_patience=PATIENCE,
        node_patience=PATIENCE,
        max_failures=MAX_FAILURES,
        hang_timeout=HANG_SECONDS,
        start_timeout=10 * HANG_SECONDS,
        straggler_factor=1.5,
    )


class SimulatedAttempt:
    """An attempt whose ranks are controlled by a test.

    Attributes:
        step: number of steps that the run has completed.
        killed: ranks that the driver has killed.
        at_work: True until the attempt is over.
    """

    def __init__(self, cluster: SimulatedCluster, number: int, seats: Sequence[str]) -> None:
        self._cluster = cluster
        self._number = number
        self._reports = 0
        self.seats = tuple(seats)
        self.trains = threading.Event()
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.step = cluster.saved
        self.killed: tuple[int, ...] = ()
        self.request: Wanted = Request.NONE

    @property
    def at_work(self) -> bool:
        return not self.ended.is_set()

    def kill(self, ranks: Sequence[int]) -> None:
        self.killed = tuple(ranks)
        self.die(*ranks)

    def end(self) -> None:
        self.ended.set()

    # Actions of the ranks, which tests call

    def report(
        self,
        *events: Event,
        phase: Phase = Phase.STEP,
        failure: TrainloadError | None = None,
        met: Sequence[Wanted] = (),
        worked: Mapping[int, tuple[int, float]] = MappingProxyType({}),
    ) -> None:
        """Report as the ranks' nodes do, and receive the pending request.

        `worked`: rank -> number of steps, and seconds of its own work in them.
        """
        self._reports += 1
        beats = [
            Beat(
                rank,
                seat,
                100 + rank,
                f"GPU {rank + 4}",
                Doing(phase, self.step, self._reports, "", 0, "", "", 0, *worked.get(rank, ())),
            )
            for rank, seat in enumerate(self.seats)
        ]
        self.request, *_ = self._cluster.mailbox.report(
            self._number,
            self.seats[0],
            self._reports,
            NodeReport(list(events), beats, {}, list(met), failure),
        )

    def take_step(self) -> None:
        """Complete a step, and what is due after it."""
        self.trains.set()
        self.step += 1
        self.report(
            Event(
                "step",
                {"step": self.step - 1, "loss": 1.5, "gradient_norm": 0.5, "seconds": 0.1},
                1.0,
            )
        )
        if self.step == STEPS:
            self.report(Event("end", {"step": STEPS, "steps": STEPS}, 1.0))
            self.end()
        elif self.request is Request.STOP:
            self.save()
            self.report(met=[Request.STOP])
            self.end()
        elif self.request is Request.CHECKPOINT:
            self.save()
            self.report(met=[Request.CHECKPOINT])

    def save(self) -> None:
        """Publish a checkpoint of the current step."""
        self._cluster.saved = self.step
        self.report(Event("checkpoint", {"step": self.step, "seconds": 0.1, "bytes": 1}, 1.0))

    def die(self, *ranks: int) -> None:
        """End with the death of ranks."""
        self.fail(AttemptError(dict.fromkeys(ranks, RankFailure(died=True, text="killed")), ()))

    def lose(self, node: str) -> None:
        """End with the loss of a node."""
        ranks = [rank for rank, seat in enumerate(self.seats) if seat == node]
        self.fail(AttemptError(dict.fromkeys(ranks, RankFailure(died=True, text="gone")), (node,)))

    def raise_error(self, error: TrainloadError, phase: Phase = Phase.STEP) -> None:
        """End with an error of a rank."""
        self.report(failure=error, phase=phase)
        self.fail(AttemptError({0: RankFailure(died=False, text=str(error))}, ()))

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        if self.at_work:
            self.error = error
            self.end()


class SimulatedCluster:
    """A cluster of nodes with one CPU each.

    Attributes:
        alive: ids of the nodes that work.
        listed: ids of the nodes that Ray considers alive.
        leaving: ids of nodes that are about to be removed.
        taken: ids of nodes that something else uses.
        mailbox: the run's mailbox.
        attempts: all attempts.
        saved: step of the last checkpoint.
        answers: True if the cluster responds.
        closed: True once the driver has released the nodes.
    """

    def __init__(self, *nodes: str) -> None:
        self.alive = set(nodes)
        self.listed = set(nodes)
        self.leaving: set[str] = set()
        self.taken: set[str] = set()
        self.mailbox = Mailbox()
        self.attempts: list[SimulatedAttempt] = []
        self.saved = 0
        self.answers = True
        self.closed = False

    @property
    def attempt(self) -> SimulatedAttempt:
        """The last attempt."""
        return self.attempts[-1]

    def nodes(self) -> list[Node]:
        self._check()
        return [
            Node(node, "", 1, 0 if node in self.taken else 1, node in self.leaving)
            for node in sorted(self.listed)
        ]

    def unreachable(self, nodes: Collection[str]) -> set[str]:
        return set(nodes) - self.alive

    def start(self, spec: RunSpec, number: int, seats: Sequence[str]) -> SimulatedAttempt:
        self._check()
        assert not any(attempt.at_work for attempt in self.attempts), "two attempts at a time"
        assert not set(seats) & (self.leaving | self.taken), "a rank is where it must not be"
        assert len(seats) == spec.plan.world_size
        self.mailbox.begin(number)
        self.attempts.append(SimulatedAttempt(self, number, seats))
        for seat in set(seats) - self.alive:  # Ray does not know yet
            self.attempt.lose(seat)
        return self.attempt

    def collect(self, request: Wanted, written: int, number: int) -> Collected:
        self._check()
        return self.mailbox.collect(request, written, number)

    def release(self) -> None:
        assert not any(attempt.at_work for attempt in self.attempts), "its nodes are in use"

    def close(self) -> None:
        self.closed = True
        for attempt in self.attempts:
            attempt.end()

    def _check(self) -> None:
        if not self.answers:
            raise GetTimeoutError("no answer")

    def vanish(self) -> None:
        """Lose the cluster for good."""

        def collect(request: Wanted, written: int, number: int) -> Collected:
            raise ActorDiedError

        self.answers = False
        self.collect = collect  # type: ignore[method-assign]


class Driver:
    """A run's driver on a simulated cluster, which a test advances.

    Attributes:
        clock: its clock.
        cluster: its cluster.
        run: its run.
        state: its current state.
        events: events that it has reported.
    """

    def __init__(
        self,
        run_dir: Path,
        *nodes: str,
        worlds: Sequence[int] = (2,),
        check_driver: CheckDriver = lambda: None,
    ) -> None:
        self.clock = Clock()
        self.cluster = SimulatedCluster(*nodes)
        self.events: list[Event] = []
        self.run = SupervisedRun(
            spec_of(run_dir, worlds), self.cluster, self.events.append, check_driver, self.clock
        )
        self.run.chance.seed(0)
        self.supervisor = Supervisor(self.run, self.cluster, self._sleep)
        self.state: State = Placing(self.run)

    def advance(self, seconds: float = 0.0) -> State:
        """Let time pass, then advance once."""
        self.clock.now += seconds
        self.state = self.supervisor.next(self.state)
        return self.state

    def reach(self, state: type[State]) -> None:
        """Advance until a state is reached."""
        for _ in range(10):
            if isinstance(self.state, state):
                return
            self.advance()
        raise AssertionError(f"{state.__name__} was not reached: {self.state}")

    def train(self, steps: int = 1) -> SimulatedAttempt:
        """Reach Running, and complete steps."""
        self.advance()
        self.cluster.attempt.trains.set()
        self.reach(Running)
        for _ in range(steps):
            self.cluster.attempt.take_step()
            self.advance()
        return self.cluster.attempt

    def messages(self, kind: str) -> list[str]:
        """Return the messages of events of a kind."""
        return [str(event.data["message"]) for event in self.events if event.kind == kind]

    def _sleep(self, seconds: float) -> None:
        self.clock.now += seconds
