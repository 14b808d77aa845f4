"""Run by tests as one rank of a gloo group: trains the runs that a JSON file lists, one after the other.

Each entry: {"run_dir", "port"} and either what `trainload.launch` takes, or {"resume": what `trainload.resume` takes}. The rank's place
is in the environment, as torchrun would leave it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import trainload
from trainload.sharding.plan import Plan


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
    trainload.launch(package, plan, entry["data"], run_dir=entry["run_dir"], backend=backend, **entry["options"])


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})  # one thread for each rank, whatever the machine
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        train(entry)


main()
