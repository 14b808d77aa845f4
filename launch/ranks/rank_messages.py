"""Messages between a rank's process and the actor of its node.

The actor imports this module, so it imports neither torch nor the run's description, which is
passed on as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainload.core.errors import TrainloadError
from trainload.launching.run.contact import Wanted


@dataclass(frozen=True, slots=True)
class Prepare:
    """Task: prepare the node.

    Attributes:
        spec: the run, as JSON.
        ranks: ranks on the node.
        quiet: report no durations.
        shares: True if other nodes of the run may make a build that this one needs.
    """

    spec: str
    ranks: tuple[int, ...]
    quiet: bool
    shares: bool


@dataclass(frozen=True, slots=True)
class Train:
    """Task: train as one rank.

    Attributes:
        spec: the run, as JSON.
        rank: rank of this process.
        seats: id of each rank's node.
        url: rendezvous URL of the process group; None for a single rank.
    """

    spec: str
    rank: int
    seats: tuple[str, ...]
    url: str | None


@dataclass(frozen=True, slots=True)
class Abort:
    """Message to the rank: another rank has failed, so this task is to end."""


@dataclass(frozen=True, slots=True)
class Failing:
    """Message: an exception ends the task.

    Attributes:
        error: the exception, if it is one of trainload.
        text: its last line.
    """

    error: TrainloadError | None
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Message: a task has ended, and nothing of it is left but what is kept on purpose."""


@dataclass(frozen=True, slots=True)
class Lacks:
    """Message: this node does not have a build that it needs.

    Attributes:
        name: name of the build in the nodes' caches.
        folder: an empty folder for it.
    """

    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class Provided:
    """Message to the process that prepares a node, in answer to `Lacks`.

    Attributes:
        found: True if the folder was filled with the build of another node; False if this node is
            to make it.
    """

    found: bool


@dataclass(frozen=True, slots=True)
class Has:
    """Message: this node has a build that others may fetch.

    Attributes:
        name: name of the build.
        folder: its folder in the node's cache.
    """

    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class Met:
    """Message: a request was fulfilled."""

    request: Wanted


@dataclass(frozen=True, slots=True)
class Printed:
    """Message: output of the rank."""

    text: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Message: report when the driver's journal has all events so far.

    Attributes:
        number: number of the request, which is in its answer.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """Message to the rank: the journal has all events before `Flush` of this number, or timed
    out.
    """

    number: int
