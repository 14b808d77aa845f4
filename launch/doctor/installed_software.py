"""Checks of Python, the required packages, torch, Ray, and the extras."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trainload.core.errors import VersionError
from trainload.core.versions import VERSION, check_supported_torch
from trainload.launching.doctor.check_results import CheckResult

COMPARED = ("torch", "ray")
"""Distributions whose versions must be the same on all nodes, besides Python and trainload."""
_NOT_FOR_RUNS = ("coverage", "dev", "fuzz")
"""Extras for the development of trainload."""
_IMPORT_SECONDS = 120.0
_TORCH_PROGRAM = """
import json, torch
cuda = torch.cuda.is_available()
error = ""
if not cuda and (torch.version.cuda or torch.version.hip):
    try:
        torch.cuda.init()
    except Exception as failure:
        error = str(failure).partition("\\n")[0]
try:
    import triton
    triton_version = triton.__version__
except ImportError:
    triton_version = ""
numbers = range(torch.cuda.device_count() if cuda else 0)
gpus = [torch.cuda.get_device_properties(n) for n in numbers]
print(json.dumps({
    "version": torch.__version__,
    "build": "CUDA " + torch.version.cuda if torch.version.cuda
        else "ROCm " + torch.version.hip if torch.version.hip else "CPU",
    "gpus": [[each.name, each.total_memory] for each in gpus],
    "error": error,
    "triton": triton_version,
}))
"""
"""Program that imports torch in a process of its own, which a broken driver may end or block."""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Answers of torch.

    Attributes:
        version: its version.
        build: "CPU", "CUDA 13.0" or "ROCm 7.1".
        gpus: name and bytes of each GPU that it can use.
        error: its error if its build is for GPUs and it can use none.
        triton: version of triton; "" if it cannot be imported.
    """

    version: str
    build: str
    gpus: tuple[tuple[str, int], ...]
    error: str
    triton: str


def own_versions() -> dict[str, str]:
    """Return name -> version of what must be the same on all nodes; "none" if not installed."""
    found = {"python": platform.python_version(), "trainload": VERSION}
    return found | {name: installed(name) or "none" for name in COMPARED}


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def examine_python() -> CheckResult:
    """Compare Python's version with the supported ones."""
    expected = metadata("trainload")["Requires-Python"]
    found = platform.python_version()
    if SpecifierSet(expected).contains(found, prereleases=True):
        return CheckResult("python", "ok", f"{found}, {sys.executable}")
    hint = "Create the environment with a supported Python."
    return CheckResult("python", "fails", found, expected, hint)


def examine_torch() -> tuple[CheckResult, TorchFacts | None]:
    """Import torch in a process of its own. Returns the check, and its facts if it can be imported.

    A node whose torch is not supported is not asked further.
    """
    try:
        check_supported_torch()
    except VersionError as error:
        return CheckResult("torch", "fails", error.got, error.expected, error.hint), None
    expected = "a torch that can be imported"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROGRAM],
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        found = f"no answer within {_IMPORT_SECONDS:g} s"
        hint = "Check the driver of the GPUs (nvidia-smi) and the disk of the environment."
        return CheckResult("torch", "fails", found, expected, hint), None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        found = lines[-1][:300] if lines else f"exit status {done.returncode}"
        return CheckResult("torch", "fails", found, expected, "Install torch again."), None
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    gpus = tuple((name, size) for name, size in answer.pop("gpus"))
    facts = TorchFacts(**answer, gpus=gpus)
    return CheckResult("torch", "ok", f"{facts.version}, {facts.build} build"), facts


def examine_packages() -> CheckResult:
    """Compare the installed packages with the versions that trainload requires."""
    problems = [
        problem
        for requirement in _requirements("")
        if requirement.name != "torch" and (problem := _problem(requirement))
    ]
    if not problems:
        return CheckResult("packages", "ok", f"trainload {VERSION} and what it requires")
    hint = "pip install --upgrade trainload, in this environment."
    return CheckResult(
        "packages", "fails", ", ".join(problems), "the versions that trainload requires", hint
    )


def examine_ray(*, needed: bool) -> CheckResult:
    """Compare Ray's version with the supported ones.

    Args:
        needed: True on a node of a cluster. Without Ray, runs are possible with --backend local
            and torchrun.
    """
    requirement = next(each for each in _requirements("ray") if each.name == "ray")
    expected, hint = f"ray {requirement.specifier}", 'pip install "trainload[ray]"'
    if installed("ray") is None:
        status: Any = "fails" if needed else "warning"
        return CheckResult("ray", status, "not installed", expected, hint)
    problem = _problem(requirement)
    if problem is not None:
        return CheckResult("ray", "fails", problem, expected, hint)
    return CheckResult("ray", "ok", version("ray"))


def examine_extras() -> CheckResult:
    """List the installed extras, and compare their packages with the versions that they require.

    An extra that is not installed is no problem.
    """
    names = sorted(metadata("trainload").get_all("Provides-Extra") or ())
    extras = {name: _requirements(name) for name in names if name not in _NOT_FOR_RUNS}
    present = [
        name for name, needs in extras.items() if all(installed(each.name) for each in needs)
    ]
    problems = [problem for name in present for each in extras[name] if (problem := _problem(each))]
    absent = [name for name in extras if name not in present]
    found = ", ".join(present) or "none"
    found += f"; not installed: {', '.join(absent)}" if absent else ""
    if problems:
        return CheckResult(
            "extras",
            "warning",
            ", ".join(problems),
            "the versions that the extras require",
            f"pip install --upgrade 'trainload[{','.join(present)}]'",
        )
    return CheckResult("extras", "ok", found)


def _requirements(extra: str) -> list[Requirement]:
    """Return the requirements of an extra alone; "" for those without an extra."""
    parsed = [Requirement(text) for text in requires("trainload") or ()]
    if not extra:
        return [each for each in parsed if each.marker is None or each.marker.evaluate()]
    return [
        each
        for each in parsed
        if each.marker is not None
        and each.marker.evaluate({"extra": extra})
        and not each.marker.evaluate({"extra": ""})
    ]


def _problem(requirement: Requirement) -> str | None:
    """Describe how an installed package does not satisfy a requirement; None if it does."""
    found = installed(requirement.name)
    if found is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(found, prereleases=True):
        return f"{requirement.name} {found}, not {requirement.specifier}"
    return None
