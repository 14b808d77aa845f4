"""Builds that one node of an attempt makes for all: the nodes agree through the mailbox who makes
which, and fetch it from the maker through Ray.

This module imports neither torch nor the compiler, since the actor of a node imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from trainload.launching.cluster.mailbox import Mailbox

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
        self._over = threading.Event()

    def fetch(self, name: str, folder: Path) -> bool:
        """Fill a folder with a build from the node that makes it, and wait until it has.

        Args:
            name: name of the build in the nodes' caches.
            folder: an empty folder.

        Returns:
            False if this node is to make the build, or the attempt is over.
        """
        while not self._over.is_set():
            try:
                maker, found = ray.get(
                    self._mailbox.claim_build.remote(self._attempt, name, self._node)
                )
                if found:
                    write_files(folder, ray.get(found[0]))
                    return True
                if maker == self._node:
                    return False
            except RayError:
                return False  # the maker or the mailbox is lost: the attempt is about to end
            self._over.wait(_ASK_SECONDS)
        return False

    def give(self, name: str, folder: Path) -> None:
        """Let the other nodes fetch a build that this node has."""
        self._mailbox.add_build.remote(self._attempt, name, [ray.put(read_files(folder))])

    def end(self) -> None:
        """End all waiting."""
        self._over.set()


def read_files(folder: Path) -> dict[str, bytes]:
    """Return path -> bytes of the files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files that `read_files` has read into a folder."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
