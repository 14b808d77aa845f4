"""One attempt of a run: its ranks on all nodes, from their preparation until they have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from trainload.core.errors import first_line
from trainload.launching.cluster.crew import Crew
from trainload.launching.cluster.mailbox import Mailbox
from trainload.launching.cluster.node_actor import GRACE_SECONDS, AttemptArgs, RankFailure
from trainload.launching.cluster.reachability import Address, Reached, raylets_of, reach
from trainload.launching.run.run_spec import RunSpec

_END_SECONDS = 15.0
_LOOK_SECONDS = 1.0
"""Interval at which the raylets of the nodes are contacted."""
_NEXT_SECONDS = 0.5
"""Time to wait for deaths of further nodes after a death, since they may have one cause."""


class AttemptError(Exception):
    """Ranks of an attempt have failed.

    Attributes:
        failures: rank -> its failure.
        nodes: ids of nodes whose actor has died, with all of its ranks.
    """

    def __init__(self, failures: dict[int, RankFailure], nodes: tuple[str, ...]) -> None:
        super().__init__(failures, nodes)
        self.failures = failures
        self.nodes = nodes


class Attempt:
    """An attempt, which a thread carries out while the driver monitors it.

    Args:
        spec: the run.
        crew: the run's node actors.
        mailbox: actor handle of the mailbox.
        number: number of the attempt.
        seats: id of each rank's node.

    Attributes:
        seats: id of each rank's node.
        trains: set when all nodes are prepared, and the ranks train.
        ended: set when the attempt is over.
        error: exception that ended it, if any.
    """

    def __init__(
        self,
        spec: RunSpec,
        crew: Crew,
        mailbox: ActorHandle[Mailbox],
        number: int,
        seats: Sequence[str],
    ) -> None:
        self._spec = spec
        self._crew = crew
        self._args = AttemptArgs(spec.model_dump_json(), mailbox, number, tuple(seats))
        self._actors: dict[str, Any] = {}
        self._raylets: dict[str, Address] = {}
        self.seats = tuple(seats)
        self.error: Exception | None = None
        self._is_over = False
        self.trains = threading.Event()
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="attempt", daemon=True).start()

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks that hang."""
        for actor in self._actors.values():
            actor.kill.remote(ranks)

    def end(self) -> None:
        """End the attempt if it is not over, and wait for its end."""
        if self.ended.is_set():
            return
        self._is_over = True
        ends = [actor.end.remote() for actor in self._actors.values()]
        ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)
        if not self.ended.wait(_END_SECONDS):
            self._crew.close()

    def _run(self) -> None:
        try:
            self._execute()
        except Exception as error:  # noqa: BLE001  # stored for the waiting thread
            self.error = error
        finally:
            self.ended.set()

    def _execute(self) -> None:
        self._raylets = raylets_of(set(self.seats))
        self._actors = self._crew.seat(self.seats)
        self._check_not_over()
        self._call(
            {
                node: actor.prepare.remote(self._args, number > 0)
                for number, (node, actor) in enumerate(self._actors.items())
            },
            self._spec.start_timeout,
        )
        url = None
        if len(self.seats) > 1:
            url = ray.get(self._actors[self.seats[0]].rendezvous_url.remote())
        self._check_not_over()
        self.trains.set()
        self._call(
            {node: actor.train.remote(self._args, url) for node, actor in self._actors.items()},
            None,
        )

    def _call(self, calls: dict[str, Any], timeout: float | None) -> None:
        """Wait for a call of every node actor.

        Raises:
            AttemptError: ranks have failed; the attempt has ended on all nodes.
        """
        failures: dict[int, RankFailure] = {}
        dead: list[str] = []
        nodes = {reference: node for node, reference in calls.items()}
        pending = list(nodes)
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while pending and (left := until - time.monotonic()) > 0:
            done, pending = ray.wait(pending, timeout=min(left, _LOOK_SECONDS))
            for reference in done:
                try:
                    failures |= ray.get(reference)
                except RayActorError as error:
                    dead.append(nodes[reference])
                    failures |= self._died_with(nodes[reference], first_line(error))
            if not done:
                waited_for = {nodes[reference] for reference in pending}
                for node in waited_for & self._without_raylet():
                    dead.append(node)
                    failures |= self._died_with(node, "its node has ended")
                pending = [reference for reference in pending if nodes[reference] not in dead]
            if failures:
                died = any(failure.died for failure in failures.values())
                until = min(until, time.monotonic() + (_NEXT_SECONDS if died else GRACE_SECONDS))
        if failures or pending:
            # ranks that raised an error are the victims of those that died, if any did
            keep = any(failure.died for failure in failures.values())
            ends = {
                actor.release.remote(keep): node
                for node, actor in self._actors.items()
                if node not in dead
            }
            _, stuck = ray.wait(list(ends), num_returns=len(ends), timeout=_END_SECONDS)
            if not self._is_over:  # else they may serve the next attempt already
                self._crew.release([*dead, *(ends[reference] for reference in stuck)])
            raise AttemptError(failures, tuple(dead))

    def _check_not_over(self) -> None:
        """Check that the attempt was not ended meanwhile, in which case nobody watches it.

        Raises:
            AttemptError: it was.
        """
        if self._is_over:
            self._crew.release(list(self._actors))
            raise AttemptError({}, ())

    def _died_with(self, node: str, why: str) -> dict[int, RankFailure]:
        return {rank: RankFailure(died=True, text=why) for rank in self._args.ranks_on(node)}

    def _without_raylet(self) -> set[str]:
        """Return the nodes of the attempt that have ended."""
        return {
            node for node, reached in reach(self._raylets).items() if reached is Reached.REFUSES
        }
