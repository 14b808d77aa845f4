"""The complete workflow: corpus, freeze, plan, launch on a local Ray cluster, trained package.

`make demo` runs it. All steps after the freeze run in processes that cannot import this example:
the package is all they need. Everything is written to demo/, which is replaced if it exists.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corpus
from model import Config
from rich.console import Console
from rich.table import Table

EXAMPLE = Path(__file__).resolve().parent
ROOT = EXAMPLE.parents[1]
WORKERS = 2
STRATEGY = "zero3"
EVAL_BATCHES = 40
TARGET = 2.2
"""Upper limit of the trained model's loss on held-out text, in nats per byte.

An untrained model has 5.5.
"""
SOURCE_MODULES = ("model", "job", "examples.gpt.model")


class DemoError(Exception):
    """A stage failed; its output contains the reason."""


@dataclass(slots=True)
class Stages:
    """The stages so far, and the duration of each in seconds."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        self.console.rule(name, align="left")
        began = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - began, 1)


def trainload(*arguments: str | Path, cwd: Path) -> dict[str, Any]:
    """Run a `trainload` command in `cwd` and return its --json output. Progress goes to this
    terminal.


    Raises:
        DemoError: it failed.
    """
    command = [str(Path(sys.executable).with_name("trainload")), *map(str, arguments), "--json"]
    shown = " ".join(
        os.path.relpath(part, ROOT) if isinstance(part, Path) else part for part in arguments
    )
    print(f"$ trainload {shown}", file=sys.stderr, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise DemoError(
            f"trainload {arguments[0]} ended with status {done.returncode}: {done.stdout.strip()}"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def demand_no_source(cwd: Path) -> None:
    """Check that a process started in `cwd` cannot import the example.

    Raises:
        DemoError: it can.
    """
    code = (
        "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(n.split('.')[0]) for n"
        " in sys.argv[1:]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if (
        subprocess.run(
            [sys.executable, "-c", code, *SOURCE_MODULES], cwd=cwd, env=environment, check=False
        ).returncode
        != 0
    ):
        raise DemoError(
            f"the example's source can be imported from {cwd}: the demo would prove nothing"
        )


def run(folder: Path, steps: int | None) -> dict[str, Any]:
    """Run all stages. Returns the content of result.json."""
    stages = Stages(Console(stderr=True))
    package, trained, plan = folder / "gpt.tl", folder / "gpt-trained.tl", folder / "plan.json"
    with stages.stage("corpus"):
        made = corpus.build(folder / "corpus", Config().context)
        print(
            f"{made.files} files: {made.train_windows} windows to train on, {made.held_out_windows}"
            " held out",
            file=sys.stderr,
        )
    with stages.stage("freeze"):
        frozen = trainload("freeze", f"{EXAMPLE / 'job.py'}:job", "-o", package, cwd=ROOT)
    with tempfile.TemporaryDirectory(prefix="trainload-demo-") as name:
        elsewhere = Path(name)
        demand_no_source(elsewhere)
        with stages.stage("plan"):
            cluster = ("--devices-per-node", str(WORKERS), "--strategy", STRATEGY)
            trainload("plan", package, *cluster, "-o", plan, cwd=elsewhere)
        with stages.stage("launch"):
            data: list[str | Path] = [
                "--data",
                made.train,
                "--eval-data",
                made.held_out,
                "--set",
                f"eval_batches={EVAL_BATCHES}",
            ]
            length = ["--steps", str(steps)] if steps is not None else []
            paths: list[str | Path] = ["--run-dir", folder / "run", "--output", trained]
            result = trainload(
                "launch", package, "--plan", plan, *data, *length, *paths, cwd=elsewhere
            )
        with stages.stage("verify"):
            trainload("verify", trained, cwd=elsewhere)
    evaluations = result["evaluations"]
    return {
        "seconds": {**stages.seconds, "total": round(sum(stages.seconds.values()), 1)},
        "held_out_loss": {"before": evaluations[0]["loss"], "after": evaluations[-1]["loss"]},
        "package": {"path": str(package), "digest": frozen["digest"]},
        "paths": {"plan": str(plan), "run": str(folder / "run"), "trained": str(trained)},
        "launch": result,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the final table."""
    table = Table(title="trainload demo", title_justify="left", header_style="bold")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    for stage, seconds in result["seconds"].items():
        table.add_row(stage, f"{seconds:.1f}", style="bold" if stage == "total" else None)
    console.print(table)
    loss = result["held_out_loss"]
    console.print(
        f"held-out loss: {loss['before']:.3f} before, {loss['after']:.3f} after (nats per byte)",
        highlight=False,
    )
    for name, path in {"package": result["package"]["path"], **result["paths"]}.items():
        console.print(f"{name}: {path}", highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demo. Returns the exit status: 1 if a stage failed, or the loss is too high."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "demo", help="output folder; replaced if it exists"
    )
    parser.add_argument("--steps", type=int, help="a shorter run, which is not held to the target")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        result = run(folder, arguments.steps)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result, Console())
    if arguments.steps is None and result["held_out_loss"]["after"] >= TARGET:
        print(f"demo: the held-out loss is not under {TARGET} nats per byte", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
