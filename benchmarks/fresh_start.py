"""Measure the time to the first step on a machine with empty caches, with and without a build.

    python benchmarks/fresh_start.py

The demo's GPT is a release in a store, two workers train it on a Ray cluster that the command
starts. "no build": the machine compiles. "build": the store has a signed build. "warm": the caches
of the run before. Rounds alternate between them. Making the build is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import RESULTS, machine, median, note, save, screen, table
from startup import STRATEGIES, Inputs, cache_variables, prepare_inputs, run

KINDS = ("no build", "build", "warm")


def trainload(cache: Path, *arguments: object, folder: Path | None = None) -> None:
    """Run one command with a cache, in a folder."""
    command = [sys.executable, "-m", "trainload", *map(str, arguments)]
    environment = {**os.environ, **cache_variables(cache)}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def make_policy(folder: Path) -> tuple[Path, Path]:
    """Make a key, and a policy that trusts the builds that it signs. Returns their paths."""
    key, public, policy = (folder / name for name in ("key.pem", "public.pem", "policy.toml"))
    curve = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    subprocess.run(curve, check=True, capture_output=True)
    extract = ["openssl", "pkey", "-in", str(key), "-pubout", "-out", str(public)]
    subprocess.run(extract, check=True, capture_output=True)
    policy.write_text(f'build_makers = ["{public}"]\n')
    return key, policy


def publish(inputs: Inputs) -> tuple[str, dict[str, float], Path]:
    """Publish the package and a build for each strategy.

    Returns:
        The package's name in the store, strategy -> seconds that its build took, and a policy that
        trusts its maker.
    """
    scratch = inputs.scratch
    key, policy = make_policy(scratch)
    store, cache = scratch / "store", scratch / "cache-of-the-maker"
    trainload(cache, "push", inputs.package, store)
    seconds = {}
    for strategy in STRATEGIES:
        plan = scratch / f"{strategy}.json"
        options = ["--devices-per-node", 2, "--strategy", strategy, "-o", plan]
        trainload(cache, "plan", inputs.package, *options)
        began = time.perf_counter()
        options = ["--plan", plan, "--push", store, "--key", key]
        trainload(cache, "build", f"{store}#main", *options)
        seconds[strategy] = time.perf_counter() - began
        note(f"{strategy}: the build took {seconds[strategy]:.1f} s")
    return f"{store}#main", seconds, policy


def build_sources(inputs: Inputs) -> list[str]:
    """Return where the newest run's node got its build, and how long it took; [] if its cache had
    it.
    """
    newest = max(inputs.scratch.glob("*/run/events.jsonl"), key=lambda path: path.stat().st_mtime)
    events = [json.loads(line) for line in newest.read_text().splitlines()]
    found = [event["data"] for event in events if event["kind"] == "build"]
    return [f"{data['source']}, {data['seconds']:.1f} s" for data in found]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile-rounds", type=int, default=1, help="rounds without a build")
    parser.add_argument("--out", type=Path, default=RESULTS / "fresh_start.json")
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {s: {k: [] for k in KINDS} for s in STRATEGIES}
    sources: dict[str, dict[str, list[str]]] = {s: {} for s in STRATEGIES}
    with tempfile.TemporaryDirectory(prefix="trainload-fresh-") as name:
        local = prepare_inputs(Path(name))
        reference, seconds, policy = publish(local)
        inputs = replace(local, package=reference)
        for number in range(arguments.rounds):
            for strategy in STRATEGIES:
                for kind in KINDS:
                    if kind == "no build" and number >= arguments.compile_rounds:
                        continue
                    os.environ["TRAINLOAD_POLICY"] = str(policy)
                    if kind == "no build":
                        del os.environ["TRAINLOAD_POLICY"]
                    cache = "build" if kind == "warm" else kind.replace(" ", "-")
                    folder = inputs.scratch / f"cache-{strategy}-{number}-{cache}"
                    measured = run(f"trainload {strategy}", inputs, folder, None).first_step
                    found[strategy][kind].append(measured)
                    sources[strategy][kind] = origin = build_sources(inputs)
                    note(f"{strategy}, {kind}: first step after {measured:.1f} s; {origin}")
    medians = {s: {k: median(v) for k, v in of.items() if v} for s, of in found.items()}
    rows = [
        (
            strategy,
            f"{seconds[strategy]:.1f}",
            *(f"{of[kind]:.1f}" if kind in of else "-" for kind in KINDS),
            f"{of['build'] - of['warm']:.1f}",
            ", ".join(sources[strategy]["build"]),
        )
        for strategy, of in medians.items()
    ]
    columns = ("strategy", "making the build", *KINDS, "build - warm", "the build is from")
    screen().print(table("seconds to the first step, 2 workers", columns, rows, marked=()))
    result: dict[str, Any] = {
        "machine": machine(),
        "seconds": found,
        "medians": medians,
        "making": seconds,
        "sources": sources,
    }
    save(result, arguments.out)
    note(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
