"""Create the golden artifacts of the current version.

    python -m tests.golden.make_artifacts NUMBER

Run it before one of their formats changes. An existing number is never created again by a later
version: it is what its version wrote.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tests.golden.artifacts import HERE, LINE, PLANS, QUERIES, STEPS, STOPPED, store
from tests.golden.goldens import HERE as GOLDENS
from tests.golden.goldens import Golden

import trainload
from trainload.cli import main as cli
from trainload.launching.run.journal import losses, read_events
from trainload.retraining.ticks.tick_stages import Stages

CONFIG = f"""\
store: store
line: {LINE}
package: ../package.tl
runs: runs
data:
  files: data/*.arrow
evaluation:
  hold_out: 0.25
train:
  epochs: 1
cluster:
  backend: local
  compile: false
gate:
  require: eval.loss <= champion.eval.loss * 1.05
  drift:
    bar: 5.0
schedule:
  every: 24h
"""
LOCAL = ["--backend", "local", "--no-compile", "--data", "data.npz", "--checkpoint-every", "2"]


class Killed(BaseException):
    """The process ends here, as if by SIGKILL."""


def make(folder: Path) -> None:
    """Create everything in `folder`, which is the working directory."""
    golden = Golden(GOLDENS / "v2" / "trained")
    shutil.copytree(golden.package, folder / "package.tl")
    shutil.copy(golden.data, folder / "data.npz")
    (folder / "plans").mkdir()
    for name, options in PLANS.items():
        run("plan", "package.tl", *options, "-o", f"plans/{name}.json")
    ended = [
        "--run-dir",
        "runs/ended",
        "--steps",
        f"{STEPS}",
        "--eval-data",
        "data.npz",
        "--output",
        "trained.tl",
    ]
    run("launch", "package.tl", *LOCAL, *ended, "--plan", "plans/single.json")
    stop_a_run(folder / "runs" / "stopped")
    retrain(folder / "retraining")
    expected = {
        "losses": losses(read_events(folder / "runs" / "ended")),
        "digest": trainload.open(folder / "trained.tl").digest,
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    outputs = {name: output(*arguments) for name, arguments in QUERIES.items()}
    (folder / "outputs.json").write_text(json.dumps(outputs, indent=1) + "\n")
    for left in (*folder.rglob("*.lock"), *folder.rglob("*.used"), *folder.rglob("report.html")):
        left.unlink()
    shutil.rmtree(folder / "cache" / "peaks")  # specific to this machine


def stop_a_run(run_dir: Path) -> None:
    """Start a run, and stop it in the middle."""

    def stop(event: trainload.Event) -> None:
        if event.kind == "step" and event.data["step"] == STOPPED - 1:
            (run_dir / "stop").touch()

    package = trainload.open("package.tl")
    plan = trainload.plan(package, trainload.Cluster(), "single")
    with contextlib.suppress(trainload.RunInterrupted):
        trainload.launch(
            package,
            plan,
            "data.npz",
            run_dir=run_dir,
            steps=STEPS,
            checkpoint_every=1,
            backend="local",
            compile=False,
            on_event=stop,
        )


def retrain(folder: Path) -> None:
    """Run ticks: one promoted, one without data, one rejected, one killed after its training."""
    folder.mkdir()
    (folder / "retrain.yaml").write_text(CONFIG)
    for day, shift in ((1, 0.0), (2, None), (3, 8.0), (4, 0.0)):
        if shift is not None:
            write_day(folder / "data" / f"{day}.arrow", day, shift)
        with (
            killed_before_evaluation() if day == 4 else contextlib.nullcontext(),
            contextlib.suppress(Killed),
        ):
            run("retrain", "tick", "retraining/retrain.yaml", "--at", f"2026-01-0{day}T00:00:00Z")
    for derived in folder.rglob("derived"):
        shutil.rmtree(derived)


def write_day(path: Path, seed: int, shift: float) -> None:
    """Write 48 rows of x (5) and y (3), a function of x plus noise."""
    draw = np.random.default_rng(seed)
    mixing = np.random.default_rng(0).normal(size=(5, 3))
    x = draw.normal(shift, 1, (48, 5)).astype(np.float32)
    path.parent.mkdir(exist_ok=True)
    trainload.write_rows(
        [{"x": x, "y": (np.tanh(x) @ mixing + draw.normal(0, 0.1, (48, 3))).astype(np.float32)}],
        path,
    )


@contextlib.contextmanager
def killed_before_evaluation() -> Iterator[None]:
    """Kill a tick in this context when it begins its evaluation."""
    evaluate = Stages.evaluate

    def die(*_: object) -> None:
        raise Killed

    Stages.evaluate = die  # type: ignore[assignment,method-assign]  # a process that ends returns nothing
    try:
        yield
    finally:
        Stages.evaluate = evaluate  # type: ignore[method-assign]


def run(*arguments: str) -> None:
    """Run a command, and check that it succeeds."""
    status = cli.run(list(arguments))
    assert status == 0, (arguments, status)


def output(*arguments: str) -> str:
    """Run a command with --json, and return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.run([*arguments, "--json"])
    return printed.getvalue()


def main(arguments: Sequence[str]) -> None:
    """Create the artifacts of this number."""
    (number,) = arguments
    assert not (HERE / number).exists(), f"{HERE / number} exists, and is never made again"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.environ["TRAINLOAD_CACHE_DIR"] = str(folder / "cache")
        os.chdir(folder)
        make(folder)
        store(folder, HERE / number)
    size = sum(path.stat().st_size for path in (HERE / number).rglob("*") if path.is_file())
    print(f"{HERE / number}: {size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
