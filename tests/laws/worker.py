"""Rank of a gloo group, in a process of its own, which trains the given runs one after the other.

Each entry is {"run_dir", "port"} with either the arguments of `trainload.launch`, or {"resume":
arguments of `trainload.resume`}. The rank is in the environment, in torchrun's variables.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

import trainload
from trainload.sharding.plans.plan import Plan


def train(entry: dict[str, Any]) -> None:
    backend: Any = "local" if os.environ["WORLD_SIZE"] == "1" else "torchrun"
    os.environ["MASTER_PORT"] = str(entry["port"])
    if "resume" in entry:
        given = dict(entry["resume"])
        if "plan" in given:
            given["plan"] = Plan.model_validate(given["plan"])
        trainload.resume(entry["run_dir"], backend=backend, **given)
        return
    package = trainload.open(entry["package"])
    plan = Plan.model_validate_json(entry["plan"])
    trainload.launch(
        package, plan, entry["data"], run_dir=entry["run_dir"], backend=backend, **entry["options"]
    )


def train_as_rank(entries: Sequence[dict[str, Any]]) -> None:
    """Train the run of each entry as the rank that the environment names, on one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)  # regardless of the machine
    for entry in entries:
        train(entry)
