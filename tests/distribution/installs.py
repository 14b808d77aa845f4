"""`make installs`: the wheel, installed from the registry with each Python and each torch.

    python -m tests.distribution.installs [--torch 2.13] [--interpreted] python3.11 python3.12 ...

Each environment is made by uv, with the extra `ray` alone, and runs the first job (first_job.py),
in one process and on a Ray cluster. It is removed before the next one is made, since each takes
some 6 GB. Results are added to benchmarks/results/installs.json, in place of those of the same
releases, and to the table of docs/reference/support.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.compat.matrix import VERSIONS
from tests.house.source import ROOT
from tests.laws.isolated import build_wheel

JOB = Path(__file__).with_name("first_job.py")
PAGE = ROOT / "docs" / "reference" / "support.md"
RESULTS = ROOT / "benchmarks" / "results" / "installs.json"
BEGIN, END = "<!-- installs: begin -->", "<!-- installs: end -->"


def uv(*arguments: str | Path) -> str:
    """Run uv, which downloads no interpreters. Return its error, "" if there was none."""
    done = subprocess.run(
        ["uv", *map(str, arguments)],
        env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.strip()


def run_first_job(python: Path, *words: str) -> str:
    """Run the first job in a new folder. Return the end of its error, "" if there was none."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "PATH": f"{python.parent}{os.pathsep}{os.defpath}",
            "HOME": folder,
            "TRAINLOAD_CACHE_DIR": f"{folder}/cache",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [str(python), str(JOB), *words],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:] or "no output"


def release_of(interpreter: str) -> str:
    """Return the release of an interpreter, such as "3.12.1".

    Raises:
        argparse.ArgumentTypeError: it does not run.
    """
    code = "import platform; print(platform.python_version())"
    try:
        return subprocess.check_output([interpreter, "-c", code], text=True).strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise argparse.ArgumentTypeError(f"{interpreter} does not run: {error}") from error


def version_of(python: Path, name: str) -> str:
    """Return the version of a distribution in an environment."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.check_output([str(python), "-c", code], text=True).strip()


def try_install(
    wheel: Path, interpreter: str, release: str, torch: str, *, compiled: bool = True
) -> dict[str, Any]:
    """Install the wheel with one Python and one torch, and run the first job."""
    environment = Path(tempfile.mkdtemp(prefix="install-"))
    python = environment / "bin" / "python"
    result: dict[str, Any] = {"python": release, "torch": torch, "compiled": compiled}
    try:
        named = f"trainload[ray] @ {wheel.as_uri()}"
        error = uv("venv", "--clear", "--python", interpreter, environment) or uv(
            "pip", "install", "--python", python, named, f"torch=={torch}.*"
        )
        if error:
            return result | {"error": error}
        execution = "compiled" if compiled else "interpreted"
        return result | {
            "torch": version_of(python, "torch"),
            "ray": version_of(python, "ray"),
            "error": run_first_job(python, execution, "ray"),
        }
    finally:
        shutil.rmtree(environment)


def minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, version.split(".")[:2]))


def pair(result: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the releases of Python and torch of a result."""
    return minor(result["python"]), minor(result["torch"])


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/reference/support.md."""
    by_pair = {pair(each): each for each in results}

    def cell(python: tuple[int, ...], torch: tuple[int, ...]) -> str:
        result = by_pair.get((python, torch))
        if result is None:
            return "not run"
        versions = f"{result['python']}, {result['torch']}"
        return (
            versions + ("" if result["compiled"] else " *") + (" fails" if result["error"] else "")
        )

    torches = [minor(version) for version in VERSIONS]
    lines = [f"| Python | {' | '.join(f'torch {version}' for version in VERSIONS)} |"]
    lines.append("|---" * (len(torches) + 1) + "|")
    lines += [
        f"| {'.'.join(map(str, python))} | "
        + " | ".join(cell(python, torch) for torch in torches)
        + " |"
        for python in sorted({python for python, _ in by_pair})
    ]
    return "\n".join(lines)


def add(result: dict[str, Any]) -> None:
    """Add a result to the file of results, and write the table of docs/reference/support.md."""
    known = json.loads(RESULTS.read_text())["installs"] if RESULTS.exists() else []
    results = sorted([*(e for e in known if pair(e) != pair(result)), result], key=pair)
    told = {"system": f"{platform.system()} {platform.machine()}", "installs": results}
    RESULTS.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    tail = rest.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(results)}\n\n{END}{tail}", encoding="utf-8")


def main() -> None:
    """Try every combination. Torch by torch: its files are downloaded once."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "interpreters", nargs="+", metavar="PYTHON", type=lambda name: (name, release_of(name))
    )
    parser.add_argument("--torch", action="append", choices=VERSIONS)
    parser.add_argument("--interpreted", action="store_true", help="compile no graphs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder) / "wheel")
        for torch in options.torch or VERSIONS:
            for interpreter, release in options.interpreters:
                compiled = not options.interpreted
                result = try_install(wheel, interpreter, release, torch, compiled=compiled)
                print(json.dumps(result), flush=True)
                add(result)


if __name__ == "__main__":
    main()
