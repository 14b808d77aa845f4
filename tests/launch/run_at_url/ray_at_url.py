"""Train with two workers on a Ray cluster of one's own, with all records at a URL; kill a worker.

A test runs this, as

    ray_at_url.py URL PACKAGE DATA STEPS

It prints JSON: the number of restarts, and the steps at which the workers started.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

import ray

import trainload
from trainload.launching.run.journal import Event


def main(url: str, package: str, data: str, steps: int) -> None:
    workers: list[int] = []
    starts: list[int] = []

    def kill(event: Event) -> None:
        if event.kind == "start":
            starts.append(event.data["step"])
            workers[:] = [int(each.partition(":")[2]) for each in event.data["workers"]]
        if event.kind == "checkpoint" and event.data["step"] >= 4 and len(starts) == 1:
            os.kill(workers[1], signal.SIGKILL)

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    opened = trainload.open(package)
    plan = trainload.plan(opened, trainload.Cluster(devices_per_node=2), "zero3")
    result = trainload.launch(
        opened,
        plan,
        data,
        run_dir=url,
        steps=steps,
        checkpoint_every=2,
        compile=False,
        on_event=kill,
    )
    print(json.dumps({"restarts": result.restarts, "starts": starts}))
    ray.shutdown()


main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
