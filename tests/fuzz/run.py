"""`make fuzz`: run Hypothesis and Atheris on packages in parallel, then Atheris on each parser.

    python -m tests.fuzz.run [--mutants N] [--runs N] [--seed N] [--keep]

A process that is ended by a signal, a timeout or the memory limit, and any wrong result, are
reported with the mutant; the exit status is then 1. A wrong mutant is written to
tests/fuzz/corpus/mutants/, and the test suite tries it from then on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.fuzz.judge import judge
from tests.fuzz.mutants import files_of, mutant, restore
from tests.hostile.prepared import make_base

from trainload.core.canonical_json import sha256_bytes

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
PARSERS = ("canonical", "expression", "guard", "header", "graph", "manifest")
SILENT = 120
"""Seconds without output after which a process is considered hung."""


def by_hypothesis(count: int, number: int, report: Path) -> None:
    """Judge `count` mutants.

    The file `report` always has the results so far; the one with the suffix .mutant, the current
    mutant.
    """
    folder = make_base(Path(tempfile.mkdtemp()))
    files = files_of(folder)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(choice=st.integers(0, 2**64 - 1))
    def judged(choice: int) -> None:
        changed = mutant(files, random.Random(choice))
        report.with_suffix(".mutant").write_text(changed.to_json(), encoding="utf-8")
        changed.apply(folder)
        try:
            outcome, why = judge(folder, files, changed)
        finally:
            restore(folder, files, changed)
        outcomes[outcome] += 1
        if outcome == "wrong":
            wrong.append(f"{changed.how}: {why}")
            (
                CORPUS / "mutants" / f"{sha256_bytes(changed.to_json().encode())[:16]}.json"
            ).write_text(changed.to_json(), encoding="utf-8")
        report.write_text(json.dumps({"outcomes": outcomes, "wrong": wrong}), encoding="utf-8")

    judged()


def started(folder: Path, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    log = (folder / f"{name}.log").open("wb")
    state = {
        "TRAINLOAD_STATE_DIR": str(folder / f"{name}.state"),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=log, stderr=log, env={**os.environ, **state}
        )


def ended(process: subprocess.Popen[bytes], folder: Path, name: str) -> str:
    """Wait for a process. Return a description of its failure, "" if there was none."""
    while process.poll() is None:
        time.sleep(1)
        newest = max(
            (path.stat().st_mtime for path in folder.glob(f"{name}.*") if path.is_file()),
            default=time.time(),
        )
        if time.time() - newest > SILENT:
            process.kill()
            process.wait()
            return f"{name}: no word for {SILENT} s"
    return "" if process.returncode == 0 else f"{name}: ended with {process.returncode}"


def atheris_arguments(target: str, folder: Path, runs: int, number: int) -> list[str]:
    found = folder / f"{target}-corpus"
    found.mkdir(exist_ok=True)
    for entry, data in enumerate(seeds(target, folder / "base", random.Random(number))):
        (found / f"seed-{entry}").write_bytes(data)
    kept = CORPUS / target
    limits = [
        f"-runs={runs}",
        f"-seed={number}",
        "-timeout=60",
        "-rss_limit_mb=6144",
        "-print_final_stats=1",
        "-max_len=65536",
        "-len_control=0",
    ]
    return [
        "tests.fuzz.targets",
        target,
        str(found),
        *([str(kept)] if kept.is_dir() else []),
        f"-artifact_prefix={folder}/",
        *limits,
    ]


def seeds(target: str, base: Path, rng: random.Random) -> list[bytes]:
    """Return the first inputs of a target, in addition to its stored corpus.

    They are parts of valid packages; for `package`, random bytes from which mutants are made.
    """
    if target == "package":
        return [rng.randbytes(256) for _ in range(64)]
    files = files_of(base)
    if target in ("canonical", "manifest"):
        return [
            files["manifest.json"],
            *(
                [
                    data
                    for file, data in files.items()
                    if file.endswith(".json") and len(data) < 2000
                ]
            ),
        ]
    if target == "graph":
        return [data for file, data in files.items() if file.startswith("graphs/")]
    if target == "header":
        return [data for file, data in files.items() if file.endswith(".safetensors")]
    return []


def executed(log: Path) -> int:
    found = re.search(rb"stat::number_of_executed_units: (\d+)", log.read_bytes())
    return int(found[1]) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--mutants",
        type=int,
        default=20_000,
        help="number of mutants of a package, half of them for each fuzzer",
    )
    parser.add_argument("--runs", type=int, default=100_000, help="number of runs of each parser")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="add parser inputs that increase coverage to tests/fuzz/corpus",
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--hypothesis", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hypothesis is not None:
        by_hypothesis(arguments.mutants, arguments.seed, arguments.hypothesis)
        return
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.environ["TRAINLOAD_STATE_DIR"] = str(folder / "state")
    print(f"seed {arguments.seed}; logs in {folder}", flush=True)
    began, half = time.monotonic(), arguments.mutants // 2
    report = folder / "hypothesis.json"
    own = [
        "tests.fuzz.run",
        "--hypothesis",
        str(report),
        "--mutants",
        str(half),
        "--seed",
        str(arguments.seed),
    ]
    make_base(folder).rename(folder / "base")
    processes = {
        "hypothesis": started(folder, "hypothesis", own),
        "package": started(
            folder, "package", atheris_arguments("package", folder, half, arguments.seed)
        ),
    }
    problems = [
        problem for name, process in processes.items() if (problem := ended(process, folder, name))
    ]
    told: dict[str, Any] = (
        json.loads(report.read_bytes())
        if report.exists()
        else {"outcomes": {}, "wrong": ["hypothesis did not begin"]}
    )
    problems += told["wrong"]
    guided = executed(folder / "package.log")
    total = sum(told["outcomes"].values()) + guided
    spoken = (
        f"{sum(told['outcomes'].values())} by Hypothesis {told['outcomes']}, {guided} by Atheris"
    )
    print(f"{total} mutants: {spoken}; {time.monotonic() - began:.0f} s", flush=True)
    problems += (
        [f"{total} mutants instead of {arguments.mutants}"] if total < arguments.mutants else []
    )
    for name in PARSERS:
        problem = ended(
            started(folder, name, atheris_arguments(name, folder, arguments.runs, arguments.seed)),
            folder,
            name,
        )
        print(f"{name}: {executed(folder / f'{name}.log')} runs", flush=True)
        problems += [problem] if problem else []
        if arguments.keep and not problem:
            (CORPUS / name).mkdir(exist_ok=True)
            merge = [
                "tests.fuzz.targets",
                name,
                str(CORPUS / name),
                str(folder / f"{name}-corpus"),
                "-merge=1",
                "-max_len=256",
            ]
            problem = ended(started(folder, f"{name}-merge", merge), folder, f"{name}-merge")
            problems += [problem] if problem else []
    for path in [*folder.glob("mutant-*.json"), *(folder.glob("*.mutant") if problems else [])]:
        shutil.copy(path, CORPUS / "mutants" / f"{path.stem}.json")
    for problem in problems:
        print(f"wrong: {problem}", flush=True)
    print(f"{len(problems)} problems; {time.monotonic() - began:.0f} s in all", flush=True)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
