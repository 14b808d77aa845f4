"""Run the coverage suite and write its table.

Use `make coverage-suite`, or `python -m tests.coverage.suite --help`. Each case has its own process
with a time limit, so that a case that crashes or hangs is a row of the table. Stages without the
case's source run in an environment with only the wheel and its dependencies, for several cases in
sequence. One chunk of cases runs on each core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.coverage.case import Case
from tests.coverage.cases import CASES, case_named
from tests.coverage.stages import (
    ELSEWHERE,
    FAILED,
    Outcome,
    after_elsewhere,
    before_elsewhere,
    lacks_a_stage,
    outcome,
    with_every_stage,
)
from tests.coverage.table import TABLE, bad, versions, write_table
from tests.house.commits import head_commit
from tests.house.source import ROOT
from tests.laws.isolated import Environment, build_wheel, make_environment

RESULTS = ROOT / "benchmarks" / "results" / "coverage.json"
LIMIT = 1200
"""Time limit in seconds for a case with its source, and for each case elsewhere.

Compiling a transformers model takes minutes.
"""
CHUNK = 8
PRELOADED = ["trainload.freezing.freeze", "tests.coverage.stages"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite. Return the exit status: 0 if every case has the expected result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="run the cases whose family or name matches"
    )
    parser.add_argument(
        "--missing", action="store_true", help="run only cases with stages that have no result"
    )
    parser.add_argument(
        "--bad", action="store_true", help="run only cases without the expected result"
    )
    parser.add_argument(
        "--table", action="store_true", help="run nothing; write the table from the results"
    )
    options = parser.parse_args(arguments)
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    results: dict[str, Outcome] = known.get("cases", {})
    results = {
        case.name: with_every_stage(results[case.name]) for case in CASES if case.name in results
    }
    chosen = [case for case in CASES if re.search(options.only, f"{case.family}: {case.name}")]
    if options.missing:
        chosen = [
            case for case in chosen if case.name not in results or lacks_a_stage(results[case.name])
        ]
    if options.bad:
        chosen = [
            case for case in chosen if case.name not in results or bad(case, results[case.name])
        ]
    if not options.table and chosen:
        with tempfile.TemporaryDirectory() as name:
            run(
                chosen,
                results,
                Path(name),
                keep=bool(options.only or options.missing or options.bad),
            )
    write_table(results, json.loads(RESULTS.read_text())["versions"])
    wrong = [
        case.name for case in CASES if case.name not in results or bad(case, results[case.name])
    ]
    print(
        f"{TABLE.relative_to(ROOT)}: {len(results)} of {len(CASES)} cases, {len(wrong)} with an"
        " unexpected result",
        file=sys.stderr,
    )
    return 1 if wrong else 0


def run(cases: Sequence[Case], results: dict[str, Outcome], folder: Path, *, keep: bool) -> None:
    """Run cases, add the results to `results`, and write them after every chunk."""
    if not keep:
        results.clear()
    environment = make_environment(folder / "venv", build_wheel(folder / "wheel"))
    environment = dataclasses.replace(environment, prefix=())  # gloo needs a network interface
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [*PRELOADED, "transformers.modeling_utils"]
        if any(c.family == "transformers" for c in cases)
        else PRELOADED
    )
    chunks = [cases[start : start + CHUNK] for start in range(0, len(cases), CHUNK)]
    commit = head_commit()
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        runs = [
            pool.submit(run_chunk, chunk, folder / str(number), environment, context)
            for number, chunk in enumerate(chunks)
        ]
        for finished in as_completed(runs):
            results |= {
                name: {**found, "commit": commit} for name, found in finished.result().items()
            }
            ordered = {case.name: results[case.name] for case in CASES if case.name in results}
            RESULTS.write_text(
                json.dumps({"versions": versions(), "cases": ordered}, indent=1) + "\n"
            )
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, no other chunk is started


def run_chunk(
    cases: Sequence[Case], folder: Path, environment: Environment, context: ForkServerContext
) -> dict[str, Outcome]:
    """Run some cases in a new folder, and return their results by name.

    Each case is run with its source, then all of them elsewhere; finally results are compared.
    """
    folder.mkdir()
    results: dict[str, Outcome] = {}
    reached: list[tuple[Case, Path, dict[str, Any]]] = []
    for number, case in enumerate(cases):
        place = folder / str(number)
        start = time.perf_counter()
        process = context.Process(target=_beside, args=(case.name, str(place)))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
        told = folder / f"{number}.json"
        if not told.is_file():
            error = (
                f"the process ended with {process.exitcode} after"
                f" {time.perf_counter() - start:.0f} s"
            )
            stages: dict[str, Outcome] = {
                "captured": {
                    "state": FAILED,
                    "seconds": time.perf_counter() - start,
                    "error": error,
                }
            }
            extra: dict[str, Any] = {}
        else:
            stages, extra = json.loads(told.read_text())
        results[case.name] = outcome(stages, extra)
        if "two_rows" in extra:
            reached.append((case, place, {"stages": stages, "extra": extra}))
    visit(environment, [place for _, place, _ in reached], folder)
    for case, place, record in reached:
        after_elsewhere(case, place, record["stages"], record["extra"])
        results[case.name] = outcome(record["stages"], record["extra"])
    for case in cases:
        states = {name: entry["state"] for name, entry in results[case.name]["stages"].items()}
        first = next(
            (
                f"{s} at {n}: {results[case.name]['stages'][n]['error'][:150]}"
                for n, s in states.items()
                if s in ("failed", "refused")
            ),
            "",
        )
        print(f"{case.family}: {case.name}: {first or 'passed'}", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return results


def visit(environment: Environment, folders: Sequence[Path], cwd: Path) -> None:
    """Run the stages that are elsewhere.

    If the process dies, the folders without a result are processed one by one.
    """
    left = list(folders)
    if left:
        _elsewhere(environment, left, cwd)
    for folder in [f for f in left if not (f / "answer.json").is_file()]:
        error = _elsewhere(environment, [folder], cwd)
        if error:
            (folder / "answer.json").write_text(
                json.dumps({"loaded": {"error": error, "seconds": 0.0}})
            )


def _elsewhere(environment: Environment, folders: Sequence[Path], cwd: Path) -> str:
    try:
        environment.run(ELSEWHERE.read_text(), cwd, *folders, timeout=LIMIT * len(folders))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return f"the process died: {str(error)[-300:]}"
    return ""


def _beside(name: str, folder: str) -> None:
    """Run the first stages in the case's own process."""
    import torch

    torch.set_num_threads(1)
    place = Path(folder)
    stages, extra = before_elsewhere(case_named(name), place)
    place.with_suffix(".json").write_text(json.dumps([stages, extra]))


if __name__ == "__main__":
    sys.exit(main())
