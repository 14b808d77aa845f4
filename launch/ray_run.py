"""Runs on a Ray cluster: Ray Train starts, watches and restarts the workers; a backend prepares each node before they meet."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.train.torch import TorchConfig, TorchTrainer

from trainload.capture.errors import ClusterError, RunInterrupted, TrainingError, TrainloadError
from trainload.launch.failure import read_failure, write_failure
from trainload.launch.journal import POLL_SECONDS, Event, Follower
from trainload.launch.spec import RunSpec, resume_command
from trainload.launch.worker import STOP_FILE, Place, prepare_node, run_worker

_PREPARE_SECONDS = 3600.0
_STOP_SECONDS = 120.0
_ANSWER_SECONDS = 3.0
_LISTEN_SECONDS = 5.0
_END_SECONDS = 15.0
_LOCAL_WORLD = "TRAINLOAD_LOCAL_WORLD"


@dataclass
class NodePreparation(TorchConfig):
    """Ray Train's torch set-up, preceded by the compilation of the run's graphs on every node."""

    spec: str = ""

    @property
    def backend_cls(self) -> Any:
        return _PreparingBackend


_TorchBackend: Any = TorchConfig().backend_cls


class _PreparingBackend(_TorchBackend):  # type: ignore[misc]  # Ray ships no types
    """Prepares each node through one of its workers, then forms the process group; again after every restart."""

    share_cuda_visible_devices = False

    def on_start(self, worker_group: Any, backend_config: NodePreparation) -> None:
        nodes: dict[str, list[int]] = {}
        for index, worker in enumerate(worker_group.get_workers()):
            nodes.setdefault(worker.metadata.node_id, []).append(index)
        pending = []
        for number, members in enumerate(nodes.values()):
            for index in members:
                pending.append(worker_group.execute_single_async(index, _set_local_world, len(members)))
            pending.append(worker_group.execute_single_async(members[0], _prepare, backend_config.spec, members, number > 0))
        try:
            ray.get(pending, timeout=_PREPARE_SECONDS)
            super().on_start(worker_group, backend_config)
        except RayError as error:
            died = _death(worker_group)
            # Ray Train forgets a group that dies while it starts, and its workers would hold their CPUs for ever.
            worker_group.abort()
            if died is not None:  # what another worker failed of; for this reason Ray Train starts all of them again
                raise died from error
            raise


def _death(worker_group: Any) -> RayActorError | None:
    """How a worker died, None where all are alive."""
    answers = [worker_group.execute_single_async(index, os.getpid) for index in range(len(worker_group.get_workers()))]
    answered, _ = ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_SECONDS)
    try:
        ray.get(answered)
    except RayActorError as error:
        return error
    return None


def _set_local_world(local_world: int) -> None:
    os.environ[_LOCAL_WORLD] = str(local_world)


def _prepare(spec: str, ranks: list[int], quiet: bool) -> None:
    parsed = RunSpec.model_validate_json(spec)
    try:
        prepare_node(parsed, ranks, quiet=quiet)
    except TrainloadError as error:
        write_failure(Path(parsed.run_dir), error)
        raise


def _loop(config: dict[str, str]) -> None:
    """What Ray Train runs on every worker."""
    spec = RunSpec.model_validate_json(config["spec"])
    failure = read_failure(Path(spec.run_dir))
    if failure is not None:
        raise failure
    context = ray.train.get_context()
    try:
        run_worker(spec, Place(context.get_world_rank(), context.get_world_size(), int(os.environ[_LOCAL_WORLD])))
    except RunInterrupted:
        return  # the driver says so; for Ray it is no failure, and must not be restarted
    except TrainloadError as error:
        write_failure(Path(spec.run_dir), error)
        raise


def connect(address: str | None) -> bool:
    """Connects to a cluster, or starts a local one. Returns: whether this process started it.

    Raises: ClusterError if the address does not answer.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Workers keep the working directory of the driver, so that an import or a path means the same there.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    try:
        if address is not None:
            _demand_listener(address)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address=address or "local", include_dashboard=None if address else False, log_to_driver=False, logging_level=logging.ERROR
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            "no Ray cluster answers",
            where=f"address {address or 'local'}",
            got=str(error).splitlines()[0],
            cure="Start one with `ray start --head`, or leave out --address for a local one.",
        ) from error
    return True


def _demand_listener(address: str) -> None:
    """Demands that somebody listens at host:port, since Ray would try for minutes. Raises: OSError, ValueError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), _LISTEN_SECONDS).close()


def check_resources(spec: RunSpec) -> None:
    """Demands that the cluster could ever hold the plan.

    Raises: ClusterError naming what there is and what is asked for.
    """
    kind = "GPU" if spec.plan.cluster.device == "cuda" else "CPU"
    wanted = spec.plan.world_size
    there = ray.cluster_resources().get(kind, 0.0)  # type: ignore[no-untyped-call]  # Ray has no types here
    if there < wanted:
        raise ClusterError(
            "the cluster is too small for the plan",
            where=f"{len([n for n in ray.nodes() if n['Alive']])} nodes",  # type: ignore[no-untyped-call]  # as above
            expected=f"{wanted} {kind}s for {wanted} workers",
            got=f"{there:g} {kind}s",
            cure=f"Plan for at most {int(there)} workers, or join more nodes.",
        )


def run_on_ray(spec: RunSpec, on_event: Callable[[Event], None]) -> None:
    """Trains on the cluster that this process is connected to, which must be able to hold the plan (`check_resources`); returns when the
    run has ended.

    Ctrl-C asks the workers to stop after their step and to write a checkpoint.

    Raises:
        RunInterrupted: the run was asked to stop.
        TrainingError: workers failed more often than the spec allows.
        TrainloadError: what a worker raised.
    """
    run_dir = Path(spec.run_dir)
    follower = Follower(run_dir, from_end=True)
    fit = _Fit(_trainer(spec))
    fit.start()
    stop_asked = False
    stepping = False
    try:
        while not fit.ended.is_set():
            try:
                for event in follower.new():
                    stepping = stepping or event.kind == "step"
                    on_event(event)
                fit.ended.wait(POLL_SECONDS)
                if read_failure(run_dir) is not None:
                    fit.ended.wait(_STOP_SECONDS)
                    break
            except KeyboardInterrupt:
                if stop_asked or not stepping:
                    raise
                stop_asked = True
                (run_dir / STOP_FILE).touch()
                on_event(Event("stage", {"name": "stopping after this step, with a checkpoint; Ctrl-C again ends it at once"}))
        for event in follower.new():
            on_event(event)
    finally:
        fit.end()
        (run_dir / STOP_FILE).unlink(missing_ok=True)
    _raise_what_went_wrong(spec, fit, stop_asked)


def _raise_what_went_wrong(spec: RunSpec, fit: _Fit, stop_asked: bool) -> None:
    failure = read_failure(Path(spec.run_dir))
    if failure is not None:
        raise failure
    if fit.error is not None:
        causes = getattr(fit.error, "worker_failures", None) or {}
        first = next(iter(causes.values()), fit.error)
        raise TrainingError(
            f"the workers failed: {_last_line(str(first))}",
            where=spec.run_dir,
            expected=f"at most {spec.max_failures} failures",
            got="one more",
            cure=f"Continue from the last checkpoint with: {resume_command(spec.run_dir)}",
        ) from fit.error
    if stop_asked:
        raise RunInterrupted("the run was interrupted", where=spec.run_dir, cure=f"Continue with: {resume_command(spec.run_dir)}")


def _last_line(text: str) -> str:
    """The line of a traceback that says what it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition(" Worker exit detail: ")[0][:400] if lines else "no reason given"


def _trainer(spec: RunSpec) -> TorchTrainer:
    text = spec.model_dump_json()
    gpu = spec.plan.cluster.device == "cuda"
    storage = Path(spec.run_dir) / "ray"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TorchTrainer(
            _loop,
            train_loop_config={"spec": text},
            torch_config=NodePreparation(backend="nccl" if gpu else "gloo", spec=text),
            scaling_config=ray.train.ScalingConfig(
                num_workers=spec.plan.world_size, use_gpu=gpu, resources_per_worker=None if gpu else {"CPU": 1}
            ),
            run_config=ray.train.RunConfig(
                name=f"{time.time_ns():x}",
                storage_path=str(storage),
                failure_config=ray.train.FailureConfig(
                    max_failures=spec.max_failures,
                    controller_failure_limit=spec.max_failures,  # type: ignore[call-arg]  # the stubs name the class of Train v1
                ),
            ),
        )


class _Fit(threading.Thread):
    """Ray Train's fit, in a thread, so that this process can follow the journal and keep Ctrl-C for itself.

    `ended` says whether it is over. `is_alive` does not: where Ctrl-C interrupts a `join`, Python 3.11 takes the thread for ended.
    """

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="fit", daemon=True)
        self._trainer = trainer
        self.error: Exception | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's own, which fail the run where the caller has made warnings errors
                self._trainer.fit()
        except Exception as error:  # noqa: BLE001  # kept for the thread that waits, which raises it as a TrainingError
            self.error = error
        finally:
            self.ended.set()

    def end(self) -> None:
        """Ends the run if it is not over: kills the controller that the thread waits for, and waits until the thread has heard of it.

        A thread that asks a cluster which is being left takes the process with it ("The core worker has already been shutdown"), before
        anybody has said how to go on. Ray Train hands out no controller; it is what the thread's frames hold.
        """
        until = time.monotonic() + _END_SECONDS
        killed: set[ActorHandle[Any]] = set()
        while not self.ended.is_set() and time.monotonic() < until:
            frame = sys._current_frames().get(self.ident or 0)
            while frame is not None:
                held = {value for value in list(frame.f_locals.values()) if isinstance(value, ActorHandle)}
                for actor in held - killed:
                    ray.kill(actor)
                killed |= held
                frame = frame.f_back
            self.ended.wait(POLL_SECONDS)
