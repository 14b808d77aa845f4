"""Small tasks on particular nodes: probe a node, kill a worker that hangs, run trial steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from trainload.core.credentials import no_secrets_raised
from trainload.core.errors import ClusterError, TrainingError, TrainloadError
from trainload.launching.cluster.nodes import NODE_LABEL

if TYPE_CHECKING:
    from trainload.launching.run.run_spec import RunSpec
    from trainload.launching.worker.trial import Trial

_ANSWER_SECONDS = 5.0


def on_node(node: str) -> Any:
    """Return a decorator for tasks and actors that run on a node without using its devices."""
    return ray.remote(num_cpus=0, label_selector={NODE_LABEL: node})


def tried_out(spec: RunSpec, place: str, local_world: int) -> Trial:
    """Run trial steps of a run on a node, with one of its free devices (`trial.try_out`).

    Raises:
        ClusterError: there is no result in time.
        TrainingError: the task fails with an error of Ray's.
        TrainloadError: an error of `trial.try_out`.
    """
    options: dict[str, Any] = (
        {"num_gpus": 1} if spec.plan.cluster.device == "cuda" else {"num_cpus": 1}
    )
    task = ray.remote(max_calls=1, max_retries=0, label_selector={NODE_LABEL: place})(
        _try_out
    ).options(**options)
    reference = task.remote(spec, local_world)
    try:
        outcome: Trial | TrainloadError = ray.get(reference, timeout=spec.start_timeout)
    except GetTimeoutError as error:
        ray.cancel(reference, force=True)
        raise ClusterError(
            "the trial step did not finish in time",
            where=f"node {place}",
            expected=f"a result within {spec.start_timeout:g} s",
            got="none",
            hint="Check what else uses the node, or allow more time: --set start_timeout=SECONDS.",
        ) from error
    except RayError as error:
        raise TrainingError(
            "the trial step failed", where=f"node {place}", got=last_line(str(error))
        ) from error
    if isinstance(outcome, TrainloadError):
        raise outcome
    return outcome


def last_line(text: str) -> str:
    """Return the last line of a traceback, which has the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition(" Worker exit detail: ")[0][:400] if lines else "no reason given"


class NodeProbe:
    """Liveness probes of nodes, since Ray takes some time to report that a node has died.

    A busy node responds slowly, because a process must start there first. So each node has one
    pending probe, and its response counts whenever it arrives.
    """

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def unreachable(self, nodes: Collection[str]) -> set[str]:
        """Return those of these nodes that have not responded within a few seconds."""
        for node in set(nodes) - self._open.keys():
            self._open[node] = on_node(node)(_respond).options(max_retries=0).remote()
        probes = {self._open[node]: node for node in nodes}
        answered, _ = (
            ray.wait(list(probes), num_returns=len(probes), timeout=_ANSWER_SECONDS)
            if probes
            else ([], [])
        )
        reachable = set()
        for reference in answered:
            del self._open[probes[reference]]
            with suppress(RayError):  # the node died meanwhile
                ray.get(reference)
                reachable.add(probes[reference])
        return set(nodes) - reachable

    def forget(self, there: Collection[str]) -> None:
        """Cancel the probes of nodes that are not in `there`."""
        for node in self._open.keys() - set(there):
            ray.cancel(self._open.pop(node))


def end_workers(workers: Iterable[tuple[str, int]]) -> None:
    """Kill workers, given as (node, pid), from a task on their node, since stopped processes do not
    respond to Ray.
    """
    tasks = [on_node(node)(_kill).options(max_retries=0).remote(pid) for node, pid in workers]
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=_ANSWER_SECONDS)


def _try_out(spec: RunSpec, local_world: int) -> Trial | TrainloadError:
    # slow to import, and the other tasks of this module do not need it
    from trainload.launching.worker.trial import try_out

    try:
        with no_secrets_raised():
            return try_out(spec, local_world)
    except TrainloadError as error:  # returned, since Ray would wrap a raised error
        return error


def _respond() -> bool:
    return True


def _kill(pid: int) -> None:
    """Kill a Ray worker, but not another process that has reused its pid."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
