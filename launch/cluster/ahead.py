"""Compiles, beside a run that is going on, what it would need on other numbers of nodes; so nobody waits for a compiler when they change.

    python -m trainload.launching.cluster.ahead < request.json

A process of its own, with the lowest priority, that ends with the worker that began it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

from trainload.launching.node.build import can_compile, compile_build, device_of
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.run.contact import Contact
from trainload.launching.run.opening import trained_package
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.worker.loop import set_threads

_DIE_WITH_PARENT = 1
_LEAST_PRIORITY = 19


def compile_ahead(spec: RunSpec, local_world: int, contact: Contact) -> None:
    """Begins to compile on this node for the run's other plans, if there are any; says when it is done.

    Args:
        spec: the run, under the plan that it goes on with.
        local_world: workers of this node, which share its cores: compiled kernels are made for a number of threads.
        contact: of this worker.
    """
    if not (spec.plans and spec.compile and can_compile()):
        return
    request = json.dumps({"spec": spec.model_dump(mode="json"), "local_world": local_world})

    def work() -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "trainload.launching.cluster.ahead"]
        done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            contact.write("stage", name="compile ahead", seconds=time.perf_counter() - began)
        else:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            contact.write("warning", message=f"other numbers of nodes could not be compiled for ahead: {said[-1]}")

    threading.Thread(target=work, name="ahead", daemon=True).start()


def main() -> None:
    """Compiles what the request on stdin names."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.nice(_LEAST_PRIORITY)
    request = json.load(sys.stdin)
    spec = RunSpec.model_validate(request["spec"])
    set_threads(request["local_world"])
    package = trained_package(spec)
    for plan in spec.plans:
        for index in range(plan.pipeline_ranks):
            compile_build(package, plan, device_of(plan), default_cache_dir(), lambda *_: None, index, evaluates=spec.evaluates)


if __name__ == "__main__":
    main()
