"""Builds that one node of an attempt makes for all: the nodes agree through the mailbox who makes
which, and fetch it from the actor of a node that has it.

This module imports neither torch nor the compiler, since the actor of a node imports it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from trainload.core.logs import log_handled
from trainload.core.paths import empty_folder
from trainload.launching.cluster.mailbox import Mailbox

_log = logging.getLogger(__name__)

_ASK_SECONDS = 0.25
"""Interval at which a node asks whether another one has made a build."""


class SharedBuilds:
    """A node's part in the exchange of an attempt's builds.

    Args:
        mailbox: the actor.
        attempt: number of the attempt.
        node: id of this node.
    """

    def __init__(self, mailbox: ActorHandle[Mailbox], attempt: int, node: str) -> None:
        self._mailbox: Any = mailbox
        self._attempt, self._node = attempt, node
        self._folders: dict[str, Path] = {}
        self._over = threading.Event()

    def fetch(self, name: str, folder: Path) -> bool:
        """Fill a folder with a build from a node that has it, after waiting for the one that makes
        it.

        Args:
            name: name of the build in the nodes' caches.
            folder: an empty folder.

        Returns:
            False, with the folder empty, if this node is to make the build: it is the first that
            asks, the build cannot be fetched, or the attempt is over.
        """
        try:
            while not self._over.is_set():
                maker, holders = ray.get(
                    self._mailbox.claim_build.remote(self._attempt, name, self._node)
                )
                if holders:
                    write_files(folder, ray.get(holders[0].build_files.remote(name)))
                    return True
                if maker == self._node:
                    return False
                self._over.wait(_ASK_SECONDS)
        except (RayError, OSError) as error:
            message = f"the build {name} cannot be fetched from another node"
            log_handled(_log, message, error)
            empty_folder(folder)
        return False

    def give(self, name: str, folder: Path) -> None:
        """Let the other nodes fetch a build that this node has, from the actor in which this runs
        (`NodeActor.build_files`).
        """
        self._folders[name] = folder
        actor = ray.get_runtime_context().current_actor
        self._mailbox.add_build.remote(self._attempt, name, [actor])

    def files(self, name: str) -> dict[str, bytes]:
        """Return the files of a build that this node has given, as `read_files` does."""
        return read_files(self._folders[name])

    def end(self) -> None:
        """End all waiting."""
        self._over.set()


def read_files(folder: Path) -> dict[str, bytes]:
    """Return path -> bytes of the files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")  # those are being written
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files that `read_files` has read into a folder."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
