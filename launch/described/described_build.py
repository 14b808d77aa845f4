"""Make a build for a GPU that this machine does not have, in a process in which it is described.

The parent (`build_in_child`) starts `python -m` of this module, which reads a request and writes
messages. Both are pickled, so that errors arrive as they were raised.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

from trainload.autograd_trace.compiling.described_device import computing_nothing
from trainload.core.errors import CompileError, RequestError, TrainloadError
from trainload.core.processes import end_with_parent
from trainload.launching.described.described_gpu import environment_with
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.write_build import Stages, compiled_parts, write_parts
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.package import Package, open_package
from trainload.sharding.planner.check_plan import check_plan
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
    request = (
        str(package.path),
        package.manifest.to_bytes(),
        plan.model_dump_json(),
        str(path.absolute()),
        is_deterministic,
    )
    command = [sys.executable, "-m", "trainload.launching.described.described_build"]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(pickle.dumps(request))
        given.seek(0)
        process = subprocess.Popen(
            command,
            env=environment_with(gpu, default_cache_dir()),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        assert process.stdout is not None
        try:
            receive(process.stdout, stages)
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
            process.stdout.close()
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


def receive(messages: IO[bytes], on_stage: Callable[[str, float], None]) -> None:
    """Handle the messages of the child until it closes its end.

    Args:
        messages: the child's end.
        on_stage: called with (part, seconds) of each part.

    Raises:
        TrainloadError: the child's error.
    """
    while True:
        try:
            kind, *values = pickle.load(messages)
        except EOFError:
            return
        if kind == _ERROR:
            raise values[0]
        on_stage(*values)


def _main() -> None:
    """Handle the request of the parent."""
    end_with_parent()
    path, manifest, plan, out, is_deterministic = pickle.load(sys.stdin.buffer)
    # only messages go to the parent; what compilers and libraries print goes to stderr
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as messages:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def tell(*message: object) -> None:
            messages.write(pickle.dumps(message))

        try:
            # changes of what is trained are in the manifest alone
            package = replace(
                open_package(Path(path)), manifest=Manifest.from_bytes(manifest, MANIFEST)
            )
            read = Plan.model_validate_json(plan)
            check_plan(read, package)
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
