"""Compile the graphs of a running run for other numbers of nodes, so that it need not wait for the
compiler on a resize.

    python -m trainload.launching.ranks.ahead < request.json

It is a separate process with the lowest priority, which ends with the worker that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

from trainload.core.processes import end_with_parent
from trainload.launching.node.build import can_compile, compile_build
from trainload.launching.node.build_key import device_of
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.fetched_builds import FetchedBuilds
from trainload.launching.run.contact import Contact
from trainload.launching.run.opening import trained_package
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.worker.preparation import set_threads

_LEAST_PRIORITY = 19


def compile_ahead(spec: RunSpec, local_world: int, contact: Contact) -> None:
    """Start compiling for the run's other plans on this node, if there are any, and report when it
    is done.

    Args:
        spec: the run, with its current plan.
        local_world: number of workers on this node, which share its cores. CPU kernels are compiled
            for a fixed number of threads.
        contact: connection to the driver.
    """
    if not (spec.plans and spec.compile and can_compile()):
        return
    request = json.dumps({"spec": spec.model_dump(mode="json"), "local_world": local_world})

    def work() -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "trainload.launching.ranks.ahead"]
        process = subprocess.run(
            command, input=request, capture_output=True, text=True, check=False
        )
        if process.returncode == 0:
            contact.write("stage", name="compile ahead", seconds=time.perf_counter() - began)
        else:
            lines = process.stderr.strip().splitlines() or [f"status {process.returncode}"]
            contact.write(
                "warning", message=f"compiling ahead for other numbers of nodes failed: {lines[-1]}"
            )

    threading.Thread(target=work, name="ahead", daemon=True).start()


def main() -> None:
    """Compile the graphs for all plans of the request on stdin."""
    end_with_parent()
    os.nice(_LEAST_PRIORITY)
    request = json.load(sys.stdin)
    spec = RunSpec.model_validate(request["spec"])
    set_threads(request["local_world"])
    package = trained_package(spec)
    for plan in spec.plans:
        for index in range(plan.pipeline_ranks):
            compile_build(
                package,
                plan,
                device_of(plan),
                default_cache_dir(),
                lambda *_: None,
                index,
                evaluates=spec.evaluates,
                is_deterministic=spec.deterministic,
                others=FetchedBuilds(spec.package, spec.policies, lambda _: None),
            )


if __name__ == "__main__":
    main()
