"""Shared helpers of the benchmarks: process memory, machine facts, and output of results."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "gpt"
RESULTS = Path(__file__).resolve().parent / "results"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Measured:
    """A command's result, its seconds, its CPU seconds and its peak resident memory in bytes."""

    result: Any
    seconds: float
    cpu: float
    peak: int


def see_example() -> None:
    """Put the example's folder and the project's source on `sys.path`.

    The systems that trainload is compared with train from the example's source.
    """
    for folder in (EXAMPLE, ROOT / "src"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


class PeakMemory:
    """Resident memory of this process, from Linux's /proc/self/status.

    `reset` clears the kernel's peak, so that `read` returns the peak since then.
    """

    def reset(self) -> None:
        """Reset the peak.

        Needs write access to /proc/self/clear_refs, which a process has for its own.
        """
        Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> dict[str, int]:
        """Return sizes in bytes.

        peak: peak resident set since `reset`. private: the same minus the current file-backed and
        shared pages (libraries). since_start: peak resident set since the start of the process,
        including compilation.
        """
        fields = self._fields()
        files = fields["RssFile"] + fields["RssShmem"]
        since_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "peak": fields["VmHWM"],
            "private": fields["VmHWM"] - files,
            "since_start": since_start,
        }

    def now(self) -> int:
        """Return the current resident set in bytes."""
        return self._fields()["VmRSS"]

    @staticmethod
    def _fields() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        pairs = (line.split(":", 1) for line in lines if line.startswith(("Vm", "Rss")))
        return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> float | None:
    """Return half the interquartile range over the median, or None for fewer than four values."""
    if len(values) < 4:
        return None
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def alone(work: Callable[..., None], *arguments: Any) -> None:
    """Call a module-level function in a new process, to measure its peak memory separately.

    Raise AssertionError if the process fails.
    """
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()
    assert not process.exitcode, "the process failed"


def command(*arguments: object, limit: int | None = None, core: int | None = None) -> Measured:
    """Run one command of trainload in a process of its own.

    limit: bytes of private memory that it may have. core: the only core it may use.
    """

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if core is not None:
            os.sched_setaffinity(0, {core})

    words = [sys.executable, "-m", "trainload", *map(str, arguments), "--json"]
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, preexec_fn=restrict, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, (words, output)
    return Measured(
        result=json.loads(output),
        seconds=time.perf_counter() - began,
        cpu=usage.ru_utime + usage.ru_stime,
        peak=usage.ru_maxrss * 1024,
    )


def machine() -> dict[str, Any]:
    """Return the facts about the machine that measurements depend on."""
    models = [
        line.split(":", 1)[1].strip()
        for line in _lines(Path("/proc/cpuinfo"))
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "ray")},
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


def screen() -> Console:
    """Return the console for tables: stdout, 120 columns wide if it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def note(text: str) -> None:
    """Print a progress message to stderr."""
    print(text, file=sys.stderr, flush=True)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, marked: Iterable[str] = ()
) -> Table:
    """Return a table whose first column is text and whose other columns are numbers.

    Rows whose first cell is in `marked` are bold.
    """
    made = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right")
    names = set(marked)
    for row in rows:
        made.add_row(*row, style="bold" if row[0] in names else None)
    return made
