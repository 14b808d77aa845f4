"""Check of the C++ compiler: it compiles a small library of the kind that Inductor writes, which is
then loaded.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from trainload.core.writable_folder import existing_folder
from trainload.launching.doctor.check_results import CheckResult
from trainload.launching.node.cache import default_cache_dir

_ANSWER = 42
_SOURCE = f"""
#include <Python.h>
#include <cmath>
#include <omp.h>
extern "C" int answer() {{
    int sum = 0;
    #pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < {_ANSWER}; i++) sum += static_cast<int>(std::sqrt(1.0));
    return sum;
}}
"""
_OPTIONS = ("-shared", "-fPIC", "-fopenmp", "-std=c++17", "-O1", "-march=native")
_LOAD = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).answer())"
_SECONDS = 120.0
_HINTS = {
    "Python.h": "Install Python's headers (Debian: python3-dev).",
    "omp.h": "Install the compiler's OpenMP library (Debian: libgomp1, libomp-dev for clang).",
}


def examine_compiler() -> CheckResult:
    """Compile and load a library with the compiler of $CXX, or g++, next to the node's cache."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    place = shutil.which(command[0])
    if place is None:
        return CheckResult(
            "compiler",
            "warning",
            f"no {command[0]} in PATH",
            "a C++ compiler; without one, graphs run interpreted, which is slower",
            "Install g++ (Debian: g++), or set CXX.",
        )
    parent = existing_folder(default_cache_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".trainload-doctor-", dir=parent) as folder:
            problem = _compile_and_load(command, Path(folder))
    except subprocess.TimeoutExpired:
        problem = f"no result within {_SECONDS:g} s"
    except OSError as error:
        problem = f"{parent}: {error.strerror}"
    if problem is None:
        return CheckResult("compiler", "ok", _first_line([*command, "--version"]))
    hint = next((hint for part, hint in _HINTS.items() if part in problem), "")
    return CheckResult(
        "compiler",
        "fails",
        problem,
        f"that {place} compiles a library, which can be loaded from {parent}",
        hint or "Repair the compiler's installation, or set CXX to another one.",
    )


def _compile_and_load(command: list[str], folder: Path) -> str | None:
    """Return a description of the problem; None if there is none."""
    source, library = folder / "answer.cpp", folder / "answer.so"
    source.write_text(_SOURCE)
    include = f"-I{sysconfig.get_path('include')}"
    done = subprocess.run(
        [*command, *_OPTIONS, include, str(source), "-o", str(library)],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        return _main_line(done.stderr) or f"exit status {done.returncode}"
    # in a process of its own: a library for another processor ends the process that loads it
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", _LOAD, str(library)],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if loaded.returncode:
        return _main_line(loaded.stderr) or f"the library ends with {loaded.returncode}"
    return None if loaded.stdout.strip() == str(_ANSWER) else f"a wrong result: {loaded.stdout!r}"


def _main_line(text: str) -> str:
    """Return the first line with an error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines[-1:] or [""])[0][-300:]


def _first_line(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, check=False
    ).stdout
    return next(iter(done.splitlines()), command[0])
