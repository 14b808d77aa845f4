"""The training systems that are compared.

Does not import torch, so that a worker can set its environment first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["ddp", "fsdp2", "trainload"]


@dataclass(frozen=True, slots=True)
class System:
    """One way to train.

    `strategy` is trainload's; `compiled` is True if the model is compiled, `flat` if each of its
    layers is compiled, rather than one of those that repeat.
    """

    name: str
    kind: Kind
    compiled: bool = True
    strategy: str = ""
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Rank, world size and files of one worker.

    `job`: file.py:name of the job; `package` and `plans`: the package that trainload trains, and
    the folder of plan files, STRATEGY.json; `cache`: this system's own cache.
    """

    rank: int
    world_size: int
    job: str
    package: Path
    plans: Path
    cache: Path
