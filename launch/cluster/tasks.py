"""Small tasks on nodes that are named: whether a node answers, and the end of a worker that does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from trainload.launch.cluster.nodes import NODE_LABEL

_ANSWER_SECONDS = 3.0


def on_node(node: str) -> Any:
    """Makes tasks and actors that run on a node, and need none of its devices."""
    return ray.remote(num_cpus=0, label_selector={NODE_LABEL: node})


def unreachable(nodes: Collection[str]) -> set[str]:
    """Which of these nodes do not answer. Ray takes some time to say so of a node that has died."""
    asked = {on_node(node)(_present).options(max_retries=0).remote(): node for node in set(nodes)}
    answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_SECONDS) if asked else ([], [])
    here = set()
    for reference in answered:
        with suppress(RayError):  # it died meanwhile
            ray.get(reference)
            here.add(asked[reference])
    for reference in late:
        ray.cancel(reference, force=True)
    return set(nodes) - here


def end_workers(workers: Iterable[tuple[str, int]]) -> None:
    """Ends workers, (node, pid) each, from beside them: they may be stopped, and do not hear Ray."""
    tasks = [on_node(node)(_kill).options(max_retries=0).remote(pid) for node, pid in workers]
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=_ANSWER_SECONDS)


def _present() -> bool:
    return True


def _kill(pid: int) -> None:
    """Ends a worker of Ray's; a process that took its number since is left alone."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
