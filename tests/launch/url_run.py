"""Train with two workers on a Ray cluster and checkpoints in S3, and kill one of the workers.

A test runs this, as

    url_run.py FOLDER PACKAGE DATA URL STEPS

It prints JSON: the number of restarts, the steps at which workers started, the losses, and the path
of the last checkpoint; then the same for a run on one worker that resumes from there.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

import ray

import trainload
from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.run.result import RunResult
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_spec import read_spec, write_spec


def told(result: RunResult) -> None:
    events = read_events(Path(result.run_dir))
    starts = [event.data["step"] for event in events if event.kind == "start"]
    print(
        json.dumps(
            {
                "restarts": result.restarts,
                "starts": starts,
                "losses": losses(events),
                "checkpoint": str(result.checkpoint),
            }
        )
    )


def main(folder: Path, package: str, data: str, url: str, steps: int) -> None:
    killed: list[int] = []

    def kill(event: Event) -> None:
        if event.kind == "checkpoint" and event.data["step"] >= 4 and not killed:
            start = next(each for each in read_events(folder) if each.kind == "start")
            killed.append(int(start.data["workers"][1].partition(":")[2]))
            os.kill(killed[0], signal.SIGKILL)

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    opened = trainload.open(package)
    plan = trainload.plan(opened, trainload.Cluster(devices_per_node=2), "zero3")
    told(
        trainload.launch(
            opened,
            plan,
            data,
            run_dir=folder,
            steps=steps,
            checkpoint_every=2,
            checkpoints=url,
            compile=False,
            on_event=kill,
        )
    )
    spec = read_spec(folder)
    (folder / RUN_FILE).unlink()
    write_spec(spec.model_copy(update={"steps": steps + 2}))
    told(trainload.resume(folder, workers=1, backend="local"))
    ray.shutdown()


main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
