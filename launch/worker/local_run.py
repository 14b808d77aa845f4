"""Runs without Ray: a single worker in this process, or a worker that torchrun started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trainload.core.errors import ClusterError
from trainload.core.processes import cancel_abort, in_main_thread, interrupt, is_nobodys
from trainload.core.redaction import redacted
from trainload.launching.node.process_groups import leave_groups
from trainload.launching.run.contact import FileContact, Request, clear_requests, withdraw
from trainload.launching.run.driver import CheckDriver
from trainload.launching.run.journal import append_log, stream_events, tracebacks_to
from trainload.launching.run.publication import Publication
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.run.run_state import Summary
from trainload.launching.worker.loop import Place, run_worker

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_one_worker(spec: RunSpec) -> None:
    """Raise ClusterError unless a plan is for one worker."""
    if spec.plan.world_size != 1:
        raise ClusterError(
            "the local backend supports only one worker",
            expected="1 worker",
            got=str(spec.plan.world_size),
            hint="Use --backend ray, or start the command with torchrun and --backend torchrun.",
        )


def run_in_process(spec: RunSpec, publication: Publication, check_driver: CheckDriver) -> None:
    """Train with one worker, in this process; run.json exists. Raises: what `run_worker` raises."""
    with _stop_on_interrupt(spec.folder):
        _run_rank(spec, Place(0, 1, 1), publication, check_driver)


def _run_rank(
    spec: RunSpec, place: Place, publication: Publication, check_driver: CheckDriver | None
) -> None:
    # the same on every rank: none continues before all have read it
    before = Summary.of(stream_events(spec.folder))
    spec = spec.model_copy(
        update={"had_checkpoint": spec.had_checkpoint or before.checkpoint is not None}
    )
    contact = FileContact(
        spec.folder,
        place.rank,
        before,
        check_driver,
        publication,
    )
    try:
        with tracebacks_to(lambda text: append_log(spec.folder, place.rank, redacted(text))):
            run_worker(spec, place, contact)
    except BaseException as error:
        contact.part(error)
        raise
    finally:
        contact.close()


def torchrun_place() -> Place:
    """Return the position of this process from torchrun's environment; raise ClusterError if
    torchrun did not start it.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [n for n in names if n not in os.environ]
    if missing:
        raise ClusterError(
            "this process was not started by torchrun",
            where="environment",
            expected=", ".join(names),
            got=f"no {', '.join(missing)}",
            hint=(
                "Start it with `torchrun --nproc-per-node N -m trainload launch ... --backend"
                " torchrun`."
            ),
        )
    return Place(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    )


def _hide_other_gpus() -> None:
    """Hide all GPUs but this local rank's, since a compiled graph names its GPU.

    Call it before CUDA is first used.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    local_rank = int(os.environ["LOCAL_RANK"])
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        visible.split(",")[local_rank] if visible else str(local_rank)
    )


def check_torchrun(spec: RunSpec) -> Place:
    """Return the position of this process under torchrun.

    Raises:
        ClusterError: torchrun did not start this process, or started another number of workers than
            the plan has.
    """
    place = torchrun_place()
    if place.world != spec.plan.world_size:
        raise ClusterError(
            "the number of workers that torchrun started differs from the plan's",
            expected=str(spec.plan.world_size),
            got=str(place.world),
        )
    return place


def run_under_torchrun(
    spec: RunSpec,
    place: Place,
    publication: Publication,
    check_driver: CheckDriver | None = None,
) -> None:
    """Train as one of torchrun's workers; run.json exists where rank 0 is, which alone has
    `check_driver`.
    """
    gpu = spec.plan.cluster.device == "cuda"
    if gpu:
        _hide_other_gpus()
    dist.init_process_group("nccl" if gpu else "gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        with _stop_on_interrupt(spec.folder, leading=place.rank == 0):
            _run_rank(spec, place, publication, check_driver)
    finally:
        leave_groups()


@contextmanager
def _stop_on_interrupt(run_dir: Path, *, leading: bool = True) -> Iterator[None]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP within the context into a request to stop after the
    step.

    The second signal ends the run immediately, and so does the first one if the request cannot be
    written to storage. Handlers that the caller has set stay, and outside the main thread nothing
    changes. If `leading`, this process clears the request.
    """

    def ask(number: int, frame: object) -> None:
        cancel_abort()
        for changed in before:
            signal.signal(changed, interrupt)
        try:
            (run_dir / Request.STOP.file).touch()
        except OSError:
            raise KeyboardInterrupt from None

    if leading:
        clear_requests(run_dir)  # left by an attempt that was killed before it could stop
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if in_main_thread() else {}
    before = {number: handler for number, handler in handlers.items() if is_nobodys(handler)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if leading:
            withdraw(run_dir)
