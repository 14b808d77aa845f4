"""The actor of a node: it starts the ranks of its node, forwards their messages, and reports their
ends.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from trainload.core.errors import TrainingError
from trainload.launching.cluster.relay import Relay
from trainload.launching.cluster.shared_builds import SharedBuilds
from trainload.launching.ranks.fork_server import Child, ServerOptions
from trainload.launching.ranks.rank_messages import (
    Abort,
    Failing,
    Finished,
    Has,
    Lacks,
    Prepare,
    Provided,
    Train,
)

GRACE_SECONDS = 3.0
"""Time to wait for further failures after the first one, which may be a consequence of theirs."""
_END_SECONDS = 5.0
"""Time to wait for the end of a process that was killed."""
_ABORT_SECONDS = 2.0
"""Time in which ranks must end their task after another rank has failed."""


@dataclass(frozen=True, slots=True)
class AttemptArgs:
    """Arguments of all nodes of an attempt.

    Attributes:
        spec: the run, as JSON.
        mailbox: actor handle of the mailbox.
        attempt: number of the attempt.
        seats: id of each rank's node.
    """

    spec: str
    mailbox: Any
    attempt: int
    seats: tuple[str, ...]

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """Return the ranks on a node, in order."""
        return tuple(rank for rank, seat in enumerate(self.seats) if seat == node)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of a rank.

    Attributes:
        died: True if its process has ended, False if it raised an exception.
        text: the signal or exit status, or the last line of the exception.
    """

    died: bool
    text: str


class NodeActor:
    """Owner of the ranks of one node.

    It is created once per node, and serves one attempt after another. Processes of ranks that were
    not at fault in a failure stay for the next attempt, with what they have opened and loaded.
    """

    def __init__(self, node: str, fork_server: ServerOptions) -> None:
        self._node = node
        self._devices = _gpus_of_this_actor()
        self._options = fork_server
        self._server = fork_server.connect()
        self._ranks: list[_Rank] = []
        self._preparer: _Rank | None = None
        self._idle: dict[int, _Rank] = {}
        self._relay: Relay | None = None
        self._prepared: tuple[str, tuple[int, ...]] | None = None
        self._shared: SharedBuilds | None = None
        self._lock = threading.Lock()

    def prepare(self, args: AttemptArgs, quiet: bool) -> dict[int, RankFailure]:
        """Start the ranks of an attempt, and prepare the node in a process of its own.

        That process ends with its task, since the compiler's memory would stay with a rank.

        Returns:
            Rank -> its failure. Failures of preparing are those of the node's first rank.
        """
        self.release(keep=True)
        relay = Relay(args.mailbox, args.attempt, self._node)
        numbers = args.ranks_on(self._node)
        with self._lock:
            self._relay = relay
            self._ranks = [
                self._process(index).serve(number, relay) for index, number in enumerate(numbers)
            ]
        work = (_comparable(args.spec), numbers)
        if self._prepared == work:
            return {}
        with self._lock:
            if self._relay is not relay:  # the attempt has been ended
                return {}
            preparer = self._preparer = self._fork(0, "prepare").serve(numbers[0], relay)
        shares = len(set(args.seats)) > 1
        preparer.shared = self._shared = SharedBuilds(args.mailbox, args.attempt, self._node)
        preparer.send(Prepare(args.spec, numbers, quiet, shares))
        failures = {
            number: replace(failure, text=f"preparing the node: {failure.text}")
            for number, failure in _wait_for([preparer]).items()
        }
        preparer.kill()
        with self._lock:
            if self._preparer is preparer:
                self._preparer, self._prepared = None, None if failures else work
        relay.flush()
        return failures

    def build_files(self, name: str) -> dict[str, bytes]:
        """Return path -> bytes of the files of a build that this node has."""
        assert self._shared is not None, "it has told others that it has the build"
        return self._shared.files(name)

    def rendezvous_url(self) -> str:
        """Return the rendezvous URL of a process group: this node's address with a free port."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no types here
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
            one.bind((address, 0))
            port = one.getsockname()[1]
        return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"

    def train(self, args: AttemptArgs, url: str | None) -> dict[int, RankFailure]:
        """Train with the ranks that `prepare` has started, until all have ended or one has failed.

        After a failure it waits for a moment for the failures of other ranks.

        Returns:
            Rank -> its failure.
        """
        with self._lock:
            ranks, relay = list(self._ranks), self._relay
        for rank in ranks:
            rank.send(Train(args.spec, rank.number, args.seats, url))
        failures = _wait_for(ranks)
        if relay is not None:
            relay.flush()
        return failures

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks, also those that are stopped."""
        with self._lock:
            at_work = [*self._ranks, self._preparer]
        for rank in at_work:
            if rank is not None and rank.number in ranks:
                rank.kill()

    def release(self, keep: bool) -> None:
        """End the attempt. Ranks that end in time, and did not fail, are kept for the next one.

        Args:
            keep: keep ranks that have raised an error as well.
        """
        self._end_preparer()
        with self._lock:
            ranks, self._ranks = self._ranks, []
            relay, self._relay = self._relay, None
        at_work = [rank for rank in ranks if not rank.finished.is_set()]
        for rank in at_work:
            rank.send(Abort())
        until = time.monotonic() + _ABORT_SECONDS
        doomed = []
        for index, rank in enumerate(ranks):
            is_done = rank.finished.wait(max(0.0, until - time.monotonic()))
            if is_done and not rank.has_ended and (keep or rank in at_work or not rank.failure):
                self._idle[index] = rank
            else:
                rank.child.kill()
                doomed.append(rank)
        for rank in doomed:
            rank.kill()
        if relay is not None:
            relay.close()

    def end(self) -> None:
        """Kill all ranks."""
        self._end_preparer()
        with self._lock:
            ranks, self._ranks = [*self._ranks, *self._idle.values()], []
            relay, self._relay = self._relay, None
            self._idle = {}
        for rank in ranks:
            rank.child.kill()
        for rank in ranks:
            rank.kill()
        if relay is not None:
            relay.close()

    def _end_preparer(self) -> None:
        """Kill the process that prepares the node, if there is one."""
        with self._lock:
            preparer, self._preparer = self._preparer, None
        if preparer is not None:
            preparer.kill()

    def _process(self, index: int) -> _Rank:
        """Return the process with a device of this node: the one that was kept, or a new one."""
        kept = self._idle.pop(index, None)
        return kept if kept is not None and not kept.has_ended else self._fork(index, "rank")

    def _fork(self, index: int, name: str) -> _Rank:
        """Return a new process of this name with a device of this node."""
        if not self._devices:
            device, environment = "CPU", {}
        else:
            device = f"GPU {self._devices[index]}"
            environment = {"CUDA_VISIBLE_DEVICES": self._devices[index]}
        try:
            return _Rank(self._server.fork(name, environment), device)
        except TrainingError:  # the server has been killed
            self._server.close()
            self._server = self._options.connect()
            return _Rank(self._server.fork(name, environment), device)


class _Rank:
    """A rank's process, with a thread that receives its messages.

    Attributes:
        number: its rank in the current attempt.
        child: the process.
        device: its device, for people: "CPU", or "GPU" and what Ray has given to it.
        finished: set while it has no task, or has ended.
        failure: failure of its last task.
        has_ended: True if the process has ended.
        shared: exchange of builds with other nodes, for the process that prepares a node.
    """

    def __init__(self, child: Child, device: str) -> None:
        self.number = -1
        self.child = child
        self.device = device
        self.finished = threading.Event()
        self.finished.set()
        self.failure: RankFailure | None = None
        self.has_ended = False
        self.shared: SharedBuilds | None = None
        self._relay: Relay | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._receive, name="rank", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self.child.pid

    def serve(self, number: int, relay: Relay) -> _Rank:
        """Become a rank of an attempt."""
        self.number, self._relay, self.failure = number, relay, None
        relay.add(self)
        return self

    def send(self, message: object) -> None:
        """Send a message to the process; if it has ended, its end is reported."""
        with self._lock:
            if self.has_ended:
                return
            if isinstance(message, Prepare | Train):
                self.failure = None
                self.finished.clear()
            with contextlib.suppress(OSError):  # its end is about to be reported
                self.child.connection.send(message)

    def kill(self) -> None:
        """Kill the process, and wait for a limited time until its end is known."""
        self.child.kill()
        self._thread.join(_END_SECONDS)

    def _receive(self) -> None:
        while True:
            try:
                message = self.child.connection.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                self.child.kill()
                break
            relay = self._relay
            assert relay is not None, "it has no task before it serves an attempt"
            if isinstance(message, Failing):
                if message.error is not None:
                    relay.fail(message.error)
                self.failure = RankFailure(died=False, text=message.text)
            elif isinstance(message, Finished):
                self.finished.set()
            elif isinstance(message, Lacks | Has):
                assert self.shared is not None, "only a process that prepares a node sends these"
                threading.Thread(
                    target=self._share, args=(self.shared, message), daemon=True
                ).start()
            else:
                relay.receive(self, message)
        if self.shared is not None:
            self.shared.end()
        status = self.child.exit_status() or 0
        with self._lock:
            self.has_ended = True
            if self.failure is None:
                text = (
                    f"killed by signal {-status} ({signal.Signals(-status).name})"
                    if status < 0
                    else f"its process ended with status {status}"
                )
                self.failure = RankFailure(died=True, text=text)
            self.finished.set()

    def _share(self, shared: SharedBuilds, message: Lacks | Has) -> None:
        if isinstance(message, Has):
            shared.give(message.name, Path(message.folder))
        else:
            self.send(Provided(shared.fetch(message.name, Path(message.folder))))


def _gpus_of_this_actor() -> list[str]:
    """Return the GPUs that Ray has given to this actor, as CUDA_VISIBLE_DEVICES names them."""
    if not ray.is_initialized():
        return []
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


def _wait_for(ranks: Sequence[_Rank]) -> dict[int, RankFailure]:
    """Wait until all ranks have finished their task, or one has failed; return the failures."""
    until = float("inf")
    while True:
        pending = [rank for rank in ranks if not rank.finished.is_set()]
        failures = {rank.number: rank.failure for rank in ranks if rank.failure is not None}
        if not pending or any(each.died for each in failures.values()):
            return failures
        if failures and until == float("inf"):
            until = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > until:
            return failures
        pending[0].finished.wait(0.05)


def _comparable(spec: str) -> str:
    """Return a run as JSON without what changes from one attempt to the next."""
    return json.dumps({**json.loads(spec), "had_checkpoint": False}, sort_keys=True)
