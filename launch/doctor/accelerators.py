"""Checks of the GPUs of a machine: the build of torch, the driver, and triton."""

from __future__ import annotations

from pathlib import Path

from trainload.core.formatting import size
from trainload.launching.doctor.check_results import CheckResult
from trainload.launching.doctor.installed_software import TorchFacts

_DRIVER = Path("proc/driver/nvidia/version")


def device_files(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the device files of a machine's GPUs: of NVIDIA's driver, and of AMD's.

    Args:
        root: root of the file system.
    """
    nvidia = (path for path in root.glob("dev/nvidia*") if path.name[6:].isdigit())
    amd = [root / "dev/kfd"] if (root / "dev/kfd").exists() else []
    return tuple(sorted(f"/{path.relative_to(root)}" for path in (*nvidia, *amd)))


def examine_gpus(facts: TorchFacts | None, root: Path = Path("/")) -> CheckResult:
    """Check that torch can use the GPUs of the machine.

    Args:
        facts: answers of torch; None if it cannot be imported.
        root: root of the file system.
    """
    files = device_files(root)
    if facts is None or (not files and not facts.gpus):
        found = "no GPU" if facts is None else f"no GPU; torch is a {facts.build} build"
        return CheckResult("gpus", "not applicable", found)
    if facts.gpus:
        names = sorted({name for name, _ in facts.gpus})
        least = size(min(memory for _, memory in facts.gpus))
        return CheckResult(
            "gpus", "ok", f"{len(facts.gpus)} x {', '.join(names)}, {least}; {facts.build}"
        )
    devices = f"the machine has {', '.join(files)}"
    if facts.build == "CPU":
        return CheckResult(
            "gpus",
            "fails",
            f"{devices}, and torch is a CPU build",
            "a build of torch for these GPUs",
            "Install torch for CUDA or ROCm: see the selector of pytorch.org.",
        )
    return CheckResult(
        "gpus",
        "fails",
        f"{devices}, and torch ({facts.build}) can use none: {facts.error or 'no reason given'}",
        "a driver that supports this build of torch" + _driver(root),
        "Update the driver, or install torch for an earlier CUDA; in a container, request the GPU.",
    )


def _driver(root: Path) -> str:
    try:
        line = (root / _DRIVER).read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    return f"; found {line.removeprefix('NVRM version: ').strip()}"


def examine_triton(facts: TorchFacts | None) -> CheckResult:
    """Check that triton, which writes the kernels of GPUs, can be imported on a machine with GPUs.

    Args:
        facts: answers of torch; None if it cannot be imported.
    """
    if facts is None or not facts.gpus:
        return CheckResult("triton", "not applicable", "no GPU that torch can use")
    if facts.triton:
        return CheckResult("triton", "ok", facts.triton)
    return CheckResult(
        "triton",
        "fails",
        "it cannot be imported",
        "triton, which compiles the kernels of GPUs",
        "pip install triton, in the version that torch requires.",
    )
