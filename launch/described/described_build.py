"""Make a build for a GPU that this machine does not have, in a process in which it is described.

The parent (`build_in_child`) starts `python -m` of this module, which reads a request and writes
messages. Both are pickled, so that errors arrive as they were raised.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from trainload.autograd_trace.compiling.described_device import computing_nothing
from trainload.core.errors import CompileError, RequestError, TrainloadError
from trainload.core.processes import end_with_parent
from trainload.launching.described.described_gpu import environment_with
from trainload.launching.described.write_build import Stages, compiled_parts, write_parts
from trainload.launching.node.cache import default_cache_dir
from trainload.packaging.package import Package, open_package
from trainload.sharding.planner.device import DeviceProfile
from trainload.sharding.plans.plan import Plan

_STAGE, _ERROR = "stage", "error"


def build_in_child(
    package: Package,
    plan: Plan,
    path: Path,
    gpu: DeviceProfile,
    on_stage: Callable[[str, float], None],
    *,
    is_deterministic: bool,
) -> dict[str, float]:
    """Write a build for a described GPU. Its graphs are unverified.

    Args:
        package: the package.
        plan: a plan for GPUs.
        path: a folder that does not exist.
        gpu: the GPU; its profile has an architecture.
        on_stage: called with (part, seconds) when each part is done.
        is_deterministic: True if every call of the graphs must give the same bits.

    Returns:
        Part -> seconds.

    Raises:
        RequestError: the package's graphs call operators of other libraries, or this torch is not a
            build for CUDA.
        CompileError: the library that describes the GPU cannot be compiled, or the process has
            ended.
        TrainloadError: as `trainload.build`.
    """
    if package.namespaces:
        raise RequestError(
            "graphs that call operators of other libraries cannot be compiled for a described GPU",
            where="device",
            got=", ".join(sorted(package.namespaces)),
            hint="Build them on a machine with the GPU.",
        )
    stages = Stages(on_stage)
    command = [sys.executable, "-m", "trainload.launching.described.described_build"]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            env=environment_with(gpu, default_cache_dir()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        with process:
            assert process.stdin is not None and process.stdout is not None
            request = (
                str(package.path),
                plan.model_dump_json(),
                str(path.absolute()),
                is_deterministic,
            )
            process.stdin.write(pickle.dumps(request))
            process.stdin.close()
            _receive(process.stdout, stages)
        if process.returncode != 0:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise CompileError(
                "the process that compiles for a described GPU has ended",
                where=gpu.name,
                expected="status 0",
                got=f"status {process.returncode}: {lines[-1] if lines else 'no message'}",
            )
    return stages.seconds


def _receive(messages: BinaryIO | object, stages: Stages) -> None:
    """Handle the messages of the child until it closes its end."""
    while True:
        try:
            kind, *values = pickle.load(messages)  # type: ignore[arg-type]
        except EOFError:
            return
        if kind == _ERROR:
            raise values[0]
        stages(*values)


def _main() -> None:
    """Handle the request of the parent."""
    end_with_parent()
    path, plan, out, is_deterministic = pickle.load(sys.stdin.buffer)

    def tell(*message: object) -> None:
        sys.stdout.buffer.write(pickle.dumps(message))
        sys.stdout.buffer.flush()

    try:
        package, read = open_package(Path(path)), Plan.model_validate_json(plan)
        with computing_nothing():
            parts = compiled_parts(
                package,
                read,
                None,
                lambda *said: tell(_STAGE, *said),
                is_deterministic=is_deterministic,
            )
        write_parts(Path(out), package, read, parts, None, is_deterministic=is_deterministic)
    except TrainloadError as error:
        tell(_ERROR, error)


if __name__ == "__main__":
    _main()
