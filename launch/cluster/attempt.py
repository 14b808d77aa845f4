"""One attempt of a run: Ray Train starts the workers; its backend prepares each node, then forms
the process group.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.train.torch import TorchConfig, TorchTrainer

from trainload.core.credentials import no_secrets_raised
from trainload.core.errors import RunInterrupted, TrainloadError
from trainload.launching.cluster.mailbox import Mailbox, RayContact
from trainload.launching.cluster.nodes import NODE_LABEL, resource_of
from trainload.launching.cluster.output import forward_output
from trainload.launching.run.journal import POLL_SECONDS, tracebacks_to
from trainload.launching.run.run_spec import RunSpec

_ANSWER_SECONDS = 3.0
_END_SECONDS = 15.0
_GRACE_SECONDS = 3.0
"""Time that a worker delays an error that another worker's death may have caused, so that the death
is noticed first.
"""
_PLACE = "TRAINLOAD_PLACE"
RAY_FOLDER = "ray"
"""Subfolder of a run's folder in which Ray Train stores its files."""


@dataclass(frozen=True, slots=True)
class WorkerArgs:
    """Arguments of all workers of an attempt.

    Attributes:
        spec: the run.
        mailbox: actor handle of the mailbox.
        attempt: number of the attempt.
        seats: id of each rank's node.
    """

    spec: RunSpec
    mailbox: Any
    attempt: int
    seats: tuple[str, ...]

    def contact(self, rank: int, sender: str) -> RayContact:
        """Return a connection of this process to the driver."""
        return RayContact(self.mailbox, self.attempt, rank, sender, os.getpid(), self.seats[rank])

    def fail(self, error: TrainloadError) -> None:
        """Tell the driver why this worker fails, if it is reachable."""
        try:
            ray.get(self.mailbox.fail.remote(self.attempt, error), timeout=_ANSWER_SECONDS)
        except RayError:
            return  # the driver learns of it from Ray Train, as an error of Ray's


@dataclass
class Rendezvous(TorchConfig):
    """Ray Train's torch backend, with ranks assigned by seats, and with each node prepared first
    (data, compilation).
    """

    orders: WorkerArgs | None = field(default=None)

    @property
    def backend_cls(self) -> Any:
        return _PreparingBackend


_TorchBackend: Any = TorchConfig().backend_cls


class _PreparingBackend(_TorchBackend):  # type: ignore[misc]  # Ray ships no types
    """A backend that prepares each node through one of its workers, then forms the process
    group.
    """

    # A compiled graph names its GPU, so each worker must see its own GPU only.

    share_cuda_visible_devices = False

    def on_start(self, worker_group: Any, backend_config: Rendezvous) -> None:
        orders = backend_config.orders
        assert orders is not None
        indices_by_node: dict[str, list[int]] = defaultdict(list)
        for index, worker in enumerate(worker_group.get_workers()):
            indices_by_node[worker.metadata.node_id].append(index)
        indices = [indices_by_node[node].pop(0) for node in orders.seats]  # by rank
        members = {
            node: [rank for rank, seat in enumerate(orders.seats) if seat == node]
            for node in dict.fromkeys(orders.seats)
        }
        orders.mailbox.seat.remote(
            orders.attempt, tuple(indices.index(index) for index in range(len(indices)))
        )
        call = worker_group.execute_single_async
        pending = [
            call(index, _store_place, rank, len(members[orders.seats[rank]]))
            for rank, index in enumerate(indices)
        ]
        for number, ranks in enumerate(members.values()):
            pending.append(call(indices[ranks[0]], _prepare_node, orders, ranks, number > 0))
        try:
            ray.get(pending, timeout=orders.spec.start_timeout)
            if len(indices) > 1:
                url = ray.get(call(indices[0], _rendezvous_url), timeout=orders.spec.start_timeout)
                timeout = backend_config.timeout_s
                meet = [
                    call(
                        index,
                        _init_process_group,
                        backend_config.backend,
                        url,
                        rank,
                        len(indices),
                        timeout,
                    )
                    for rank, index in enumerate(indices)
                ]
                ray.get(meet, timeout=orders.spec.start_timeout)
        except RayError as error:
            died = _find_death(worker_group)
            # Ray Train forgets a group that dies while it starts, and its workers would hold their
            # CPUs forever.
            worker_group.abort()
            if died is not None:  # the cause of the other workers' errors
                raise died from error
            raise


def _find_death(worker_group: Any) -> RayActorError | None:
    """Return the error of a worker that died; None if all are alive."""
    answers = [
        worker_group.execute_single_async(index, os.getpid)
        for index in range(len(worker_group.get_workers()))
    ]
    answered, _ = ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_SECONDS)
    try:
        ray.get(answered)
    except RayActorError as error:
        return error
    return None


def _store_place(rank: int, local_world: int) -> None:
    """Store a worker's rank, and import the code that it will run while another worker prepares the
    node.
    """
    os.environ[_PLACE] = f"{rank}/{local_world}"
    # Also imports the worker. Slow, and Ray Train's controller does not need it.
    import trainload.launching.cluster.ahead  # noqa: F401


def _rendezvous_url() -> str:
    """Return the rendezvous URL of the process group: this node's address with a free port."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no types here
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
        one.bind((address, 0))
        port = one.getsockname()[1]
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _init_process_group(backend: str, url: str, rank: int, world: int, timeout: int) -> None:
    dist.init_process_group(
        backend, init_method=url, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


def _prepare_node(orders: WorkerArgs, ranks: Sequence[int], quiet: bool) -> None:
    from trainload.launching.worker.preparation import (
        # slow to import, and Ray Train's controller imports this module without needing it
        prepare_node,
    )

    contact = orders.contact(ranks[0], f"node of {ranks[0]}")
    try:
        with no_secrets_raised():
            prepare_node(orders.spec, ranks, contact, quiet=quiet)
    except TrainloadError as error:
        orders.fail(error)
        raise
    finally:
        contact.close()


def _train_worker(config: dict[str, Any]) -> None:
    """Train: the function that Ray Train runs on every worker."""
    from trainload.launching.cluster.ahead import compile_ahead
    from trainload.launching.worker.loop import Place, run_worker

    orders: WorkerArgs = config["orders"]
    rank, local_world = map(int, os.environ[_PLACE].split("/"))
    place = Place(rank, len(orders.seats), local_world, orders.seats[rank])
    contact = orders.contact(rank, f"rank {rank}")
    try:
        if orders.seats.index(place.node) == rank:
            compile_ahead(orders.spec, local_world, contact)
        # Ray's own report of an exception does not reach the rank's log.
        with forward_output(contact.printed), no_secrets_raised(), tracebacks_to(sys.stderr.write):
            run_worker(orders.spec, place, contact)
    except RunInterrupted:
        return  # the driver reports it; for Ray it is not a failure
    except TrainloadError as error:
        orders.fail(error)
        raise
    except Exception:
        time.sleep(_GRACE_SECONDS)
        raise
    finally:
        contact.close()


class Attempt:
    """A call of Ray Train's fit in another thread, so that the driver can monitor it and handle
    Ctrl-C itself.

    Attributes:
        seats: id of each rank's node.
        ended: set when the call is over.
        error: exception that it raised, if any.
    """

    def __init__(
        self, spec: RunSpec, mailbox: ActorHandle[Mailbox], number: int, seats: Sequence[str]
    ) -> None:
        self._trainer = _make_trainer(WorkerArgs(spec, mailbox, number, tuple(seats)))
        self._caller: int | None = None
        self.seats = tuple(seats)
        self.error: Exception | None = None
        self.ended = threading.Event()

    def fit(self) -> None:
        """Call fit, and store its exception in `error` instead of raising it."""
        self._caller = threading.get_ident()
        try:
            with warnings.catch_warnings():
                # Ray's own would fail the run of a caller who turns warnings into errors
                warnings.simplefilter("ignore")
                self._trainer.fit()
        except Exception as error:  # noqa: BLE001  # stored for the waiting thread
            self.error = error
        finally:
            self.ended.set()

    def end(self) -> None:
        """End the attempt if it is not over: kill the controller that the thread waits for, and
        wait for the thread.

        A thread that calls a cluster during its shutdown ends the whole process ("The core worker
        has already been shutdown") before the user is told how to continue. Ray Train has no public
        handle of its controller, so it is taken from the frames of the thread.
        """
        until = time.monotonic() + _END_SECONDS
        killed: set[ActorHandle[Any]] = set()
        while not self.ended.is_set() and time.monotonic() < until:
            frame = sys._current_frames().get(self._caller or 0)
            while frame is not None:
                actors = {
                    value
                    for value in list(frame.f_locals.values())
                    if isinstance(value, ActorHandle)
                }
                for actor in actors - killed:
                    ray.kill(actor)
                killed |= actors
                frame = frame.f_back
            self.ended.wait(POLL_SECONDS)


class Fits:
    """A thread that calls fits, one after another.

    A new thread for each fit would leak 1.7 MiB in Ray's library.
    """

    def __init__(self) -> None:
        self._attempts: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()
        self._last: Attempt | None = None

    def start(self, attempt: Attempt) -> None:
        """Start an attempt's fit.

        If the previous one could not be ended, it keeps its thread and a new one is created.
        """
        if self._last is None or not self._last.ended.is_set():
            self._attempts = queue.SimpleQueue()
            threading.Thread(
                target=_fit_all, args=(self._attempts,), name="fit", daemon=True
            ).start()
        self._last = attempt
        self._attempts.put(attempt)

    def close(self) -> None:
        """Make the thread end after its last fit."""
        self._attempts.put(None)


def _fit_all(attempts: queue.SimpleQueue[Attempt | None]) -> None:
    while (attempt := attempts.get()) is not None:
        attempt.fit()


def _make_trainer(orders: WorkerArgs) -> TorchTrainer:
    spec = orders.spec
    gpu = spec.plan.cluster.device == "cuda"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TorchTrainer(
            _train_worker,
            train_loop_config={"orders": orders},
            torch_config=Rendezvous(backend="nccl" if gpu else "gloo", orders=orders),
            scaling_config=ray.train.ScalingConfig(
                num_workers=spec.plan.world_size,
                use_gpu=gpu,
                resources_per_worker={resource_of(spec.plan.cluster.device): 1},
                label_selector=[{NODE_LABEL: seat} for seat in orders.seats],  # type: ignore[call-arg]  # the stubs know Train v1
            ),
            run_config=ray.train.RunConfig(
                name=f"{time.time_ns():x}",
                storage_path=str(Path(spec.run_dir) / RAY_FOLDER),
                failure_config=ray.train.FailureConfig(
                    max_failures=0,
                    controller_failure_limit=0,  # type: ignore[call-arg]  # the stubs name the class of Train v1
                ),
            ),
        )
