"""Process of a rank: executes tasks that its node's actor sends through a pipe."""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainload.autograd_trace.derivation.named_groups import unbind_groups
from trainload.core.credentials import no_secrets_raised
from trainload.core.errors import RunInterrupted, TrainloadError
from trainload.core.processes import name_process
from trainload.launching.node.process_groups import abort_groups, leave_groups
from trainload.launching.ranks.ahead import compile_ahead
from trainload.launching.ranks.output import forward_output
from trainload.launching.ranks.rank_messages import (
    Abort,
    Failing,
    Finished,
    Flush,
    Flushed,
    Has,
    Lacks,
    Met,
    Prepare,
    Printed,
    Provided,
    Train,
)
from trainload.launching.run.activity import Activity
from trainload.launching.run.contact import Request, Wanted
from trainload.launching.run.journal import Event, tracebacks_to
from trainload.launching.run.profile_request import ProfileRequest
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.worker.local_run import COLLECTIVE_TIMEOUT
from trainload.launching.worker.loop import Place, run_worker
from trainload.launching.worker.preparation import Keeper, prepare_node

BEAT_SECONDS = 1.0
"""Interval of the heartbeats of a rank."""
_FLUSH_SECONDS = 30.0


def main(connection: Connection) -> int:
    """Execute tasks until the connection is closed. Returns the exit status."""
    contact = PipeContact(connection)
    keeper = Keeper()
    tasks: queue.SimpleQueue[Prepare | Train] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, contact, tasks), daemon=True).start()
    while True:
        failure = _execute(tasks.get(), contact, keeper)
        # first of all, since what follows may fail as well, and then the process ends
        if failure is not None:
            contact.send(failure)
        _release()
        contact.send(Finished())
        if contact.lingers:
            return 0


def _receive(
    connection: Connection, contact: PipeContact, tasks: queue.SimpleQueue[Prepare | Train]
) -> None:
    status = 1
    try:
        while True:
            message = connection.recv()
            if isinstance(message, Request | ProfileRequest):
                contact.request(message)
            elif isinstance(message, Flushed):
                contact.hear_flushed(message.number)
            elif isinstance(message, Provided):
                contact.provided.put(message.found)
            elif isinstance(message, Abort):
                contact.aborted.set()
                abort_groups(contact.groups)
            else:
                contact.aborted.clear()
                tasks.put(message)
    except (EOFError, OSError):
        status = 0  # the node's actor is gone, or does not need this rank any more
    finally:
        os._exit(status)  # without this thread the rank would hear nothing


def _execute(task: Prepare | Train, contact: PipeContact, keeper: Keeper) -> Failing | None:
    """Execute a task; return how it has failed."""
    try:
        with (
            forward_output(contact.printed),
            no_secrets_raised(),
            tracebacks_to(sys.stderr.write),
        ):
            if isinstance(task, Prepare):
                _prepare(task, contact)
            else:
                _train(task, contact, keeper)
    except RunInterrupted:
        return None  # the driver reports it
    except TrainloadError as error:
        # its traceback would keep the tensors and groups of the task
        return Failing(error.with_traceback(None), str(error))
    except Exception as error:  # noqa: BLE001  # reported to the driver; its traceback is in the log
        return Failing(None, traceback.format_exception_only(error)[-1].strip())
    finally:
        contact.close()
    return None


def _prepare(task: Prepare, contact: PipeContact) -> None:
    spec = RunSpec.model_validate_json(task.spec)
    shared = contact if task.shares else None
    prepare_node(spec, task.ranks, contact, quiet=task.quiet, shared=shared)


def _train(task: Train, contact: PipeContact, keeper: Keeper) -> None:
    spec, world = RunSpec.model_validate_json(task.spec), len(task.seats)
    node = task.seats[task.rank]
    place = Place(task.rank, world, task.seats.count(node), node)
    name_process(f"rank {task.rank}")
    if task.url is not None:
        contact.groups = tuple(spec.plan.groups())
        try:
            dist.init_process_group(
                "nccl" if spec.plan.cluster.device == "cuda" else "gloo",
                init_method=task.url,
                rank=task.rank,
                world_size=world,
                timeout=COLLECTIVE_TIMEOUT,
            )
        except BaseException:
            # torch has counted a group that it does not have: this process would not find the
            # others the next time (torch 2.13)
            contact.lingers = True
            raise
    if task.seats.index(node) == task.rank:
        compile_ahead(spec, place.local_world, contact)
    try:
        run_worker(spec, place, contact, keeper)
    finally:
        unbind_groups(contact.groups)


def _release() -> None:
    """Leave the process groups, whose peers are thereby released, and free the run's tensors."""
    if dist.is_initialized():
        leave_groups()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing in a process that has not used CUDA


class PipeContact:
    """A rank's connection to the driver, through the pipe to its node's actor.

    Attributes:
        groups: names of the process groups of the current task.
        provided: answers to requests for builds: True if another node has provided one.
        aborted, lingers: as in `Contact`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.groups: tuple[str, ...] = ()
        self.provided: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.aborted, self.lingers = threading.Event(), False
        self._sending = threading.Lock()
        self._request: Wanted = Request.NONE
        self._flushes = self._answered = 0
        self._answered_changes = threading.Condition()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, message: Any) -> None:
        """Send a message to the node's actor."""
        with self._sending:
            self._connection.send(message)

    def request(self, request: Wanted) -> None:
        """Receive the pending request of the run."""
        self._request = request

    def write(self, kind: str, **data: Any) -> None:
        self.send(Event(kind, data, time.time()))

    def flush(self) -> None:
        with self._answered_changes:
            self._flushes += 1
            number = self._flushes
        self.send(Flush(number))
        with self._answered_changes:
            self._answered_changes.wait_for(lambda: self._answered >= number, _FLUSH_SECONDS)

    def hear_flushed(self, number: int) -> None:
        """Receive the answer to the flush of this number; it does not count for a later one."""
        with self._answered_changes:
            self._answered = max(self._answered, number)
            self._answered_changes.notify_all()

    def asked(self) -> Wanted:
        return self._request

    def met(self, request: Wanted) -> None:
        if self._request == request:
            self._request = Request.NONE
            self.send(Met(request))

    def fetch_build(self, name: str, folder: Path) -> bool:
        """Fill a folder with a build of another node; return False if this node is to make it."""
        self.send(Lacks(name, str(folder)))
        return self.provided.get()

    def give_build(self, name: str, folder: Path) -> None:
        """Let other nodes fetch a build that this node has."""
        self.send(Has(name, str(folder)))

    def printed(self, text: str) -> None:
        """Send output of this process."""
        self.send(Printed(text))

    def report(self, activity: Activity) -> None:
        self._closed.clear()
        self._thread = threading.Thread(
            target=self._beat, args=(activity,), name="contact", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _beat(self, activity: Activity) -> None:
        self.send(activity.now())
        while not self._closed.wait(BEAT_SECONDS):
            self.send(activity.now())
