"""Small tasks on nodes that are named: whether a node answers, and the end of a worker that does not."""

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
    """Makes tasks and actors that run on a node, and need none of its devices."""
    return ray.remote(num_cpus=0, label_selector={NODE_LABEL: node})


def tried_out(spec: RunSpec, place: str, local_world: int) -> Trial:
    """Tries a run's step out on a node, with one of its devices, of which one is free (`trial.try_out`).

    Raises: what that raises; ClusterError where there is no answer in time; TrainingError where the task fails in Ray's words.
    """
    options: dict[str, Any] = {"num_gpus": 1} if spec.plan.cluster.device == "cuda" else {"num_cpus": 1}
    task = ray.remote(max_calls=1, max_retries=0, label_selector={NODE_LABEL: place})(_try_out).options(**options)
    asked = task.remote(spec, local_world)
    try:
        found: Trial | TrainloadError = ray.get(asked, timeout=spec.start_timeout)
    except GetTimeoutError as error:
        ray.cancel(asked, force=True)
        raise ClusterError(
            "the step that was tried out gave no answer in time",
            where=f"node {place}",
            expected=f"one within {spec.start_timeout:g} s",
            got="none",
            hint="See who uses the node, or allow more: --set start_timeout=SECONDS.",
        ) from error
    except RayError as error:
        raise TrainingError("the step that was tried out failed", where=f"node {place}", got=last_line(str(error))) from error
    if isinstance(found, TrainloadError):
        raise found
    return found


def last_line(text: str) -> str:
    """The line of a traceback that says what it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition(" Worker exit detail: ")[0][:400] if lines else "no reason given"


class Questions:
    """Asks nodes whether they are there: Ray takes some time to say so of one that has died.

    A node that is busy is slow to answer, since a process must begin there first. So it is asked once, and its answer counts whenever it
    comes.
    """

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def unreachable(self, nodes: Collection[str]) -> set[str]:
        """Which of these nodes have not answered, after a while."""
        for node in set(nodes) - self._open.keys():
            self._open[node] = on_node(node)(_present).options(max_retries=0).remote()
        asked = {self._open[node]: node for node in nodes}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_SECONDS) if asked else ([], [])
        here = set()
        for reference in answered:
            del self._open[asked[reference]]
            with suppress(RayError):  # it died meanwhile
                ray.get(reference)
                here.add(asked[reference])
        return set(nodes) - here

    def forget(self, there: Collection[str]) -> None:
        """Waits no more for nodes that are known not to be there."""
        for node in self._open.keys() - set(there):
            ray.cancel(self._open.pop(node))


def end_workers(workers: Iterable[tuple[str, int]]) -> None:
    """Ends workers, (node, pid) each, from beside them: they may be stopped, and do not hear Ray."""
    tasks = [on_node(node)(_kill).options(max_retries=0).remote(pid) for node, pid in workers]
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=_ANSWER_SECONDS)


def _try_out(spec: RunSpec, local_world: int) -> Trial | TrainloadError:
    from trainload.launching.worker.trial import try_out  # slow to import, and the other tasks of this module do not need it

    try:
        with no_secrets_raised():
            return try_out(spec, local_world)
    except TrainloadError as error:  # as it is, and not in Ray's words
        return error


def _present() -> bool:
    return True


def _kill(pid: int) -> None:
    """Ends a worker of Ray's; a process that took its number since is left alone."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
