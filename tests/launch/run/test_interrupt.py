"""Ctrl-C in a terminal, which sends SIGINT to the command and all processes that it started.

Also SIGTERM, and a terminal that is closed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.commands import TORCHRUN, Interrupted, close_terminal, interrupt, json_of
from tests.launch.forked import interrupted, terminal_closed
from tests.launch.undisturbed import STEPS

from trainload.launching.checkpoints.index import published
from trainload.launching.run.journal import losses, read_events
from trainload.launching.run.result import RunResult
from trainload.launching.run.run_state import read_state
from trainload.packaging.package import Package


def stepped(run_dir: Path, steps: int) -> Callable[[], bool]:
    """Return a function that returns whether a run has done `steps` steps."""
    return lambda: sum(event.kind == "step" for event in read_events(run_dir)) >= steps


def compiling(cache: Path) -> Callable[[], bool]:
    """Return a function that returns whether a C++ compiler has started to write kernels."""
    return lambda: any((cache / "compiled").glob(".*.part/kernels/*/*"))


def checkpoint_bytes(run_dir: Path) -> list[bytes]:
    """Return the bytes of the last checkpoint's shards."""
    last = list(published(run_dir).values())[-1]
    return [path.read_bytes() for path in sorted(last.rglob("*.safetensors"))]


def how_to_go_on(ended: Interrupted) -> str:
    """Return the command that the output suggests to continue the run.

    Processes that end later (Ray's, Python's resource tracker) may write to stderr after it.
    """
    commands = [
        line.partition("Continue with: ")[2]
        for line in ended.err.splitlines()
        if "Continue with: " in line
    ]
    assert len(commands) == 1, ended.err
    return commands[0]


@pytest.fixture
def options(gpt: Package, gpt_data: Path) -> list[str | Path]:
    return [
        "launch",
        gpt.path,
        "--data",
        gpt_data,
        "--steps",
        str(STEPS),
        "--workers",
        "2",
        "--strategy",
        "zero3",
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_is_interrupted_is_continued_as_if_it_had_not_been(
    options: list[str | Path], undisturbed: RunResult, tmp_path: Path
) -> None:
    ended = interrupt(
        [*options, "--run-dir", "a run", "--no-compile"],
        tmp_path,
        stepped(tmp_path / "a run", 5),
        {},
    )
    assert ended.status == 1, ended.err
    assert how_to_go_on(ended) == f"trainload resume '{tmp_path / 'a run'}'"
    assert ended.left == []
    (at,) = published(tmp_path / "a run")
    assert 5 <= at < STEPS
    resumed = json_of("resume", "a run", cwd=tmp_path)
    assert (resumed["steps"], resumed["restarts"]) == (STEPS, 1)
    assert losses(read_events(tmp_path / "a run")) == losses(read_events(Path(undisturbed.run_dir)))
    assert checkpoint_bytes(tmp_path / "a run") == checkpoint_bytes(Path(undisturbed.run_dir))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "backend", [pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow]), "local"]
)
def test_a_driver_that_gets_sigterm_leaves_a_checkpoint(
    backend: str, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options: list[str | Path] = [
        "--steps",
        "100000",
        "--run-dir",
        run_dir,
        "--no-compile",
        "--backend",
        backend,
    ]
    words: list[str | Path] = ["launch", tiny.path, "--data", tiny_data, *options]
    if backend == "local":
        ended = interrupted(words, tmp_path, stepped(run_dir, 5), signal.SIGTERM)
    else:
        ended = interrupt(words, tmp_path, stepped(run_dir, 5), {}, terminate=True)
    assert ended.status == 1, ended.err
    assert how_to_go_on(ended) == f"trainload resume {run_dir}"
    assert ended.left == []
    (at,) = published(run_dir)
    assert at >= 5
    assert not (run_dir / "stop").exists()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "backend", [pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow]), "local"]
)
def test_a_driver_whose_terminal_is_closed_leaves_a_checkpoint(
    backend: str, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options: list[str | Path] = [
        "--steps",
        "100000",
        "--run-dir",
        run_dir,
        "--no-compile",
        "--backend",
        backend,
    ]
    closed = terminal_closed if backend == "local" else close_terminal
    ended = closed(
        ["launch", tiny.path, "--data", tiny_data, *options], tmp_path, stepped(run_dir, 5)
    )
    assert ended.left == []
    (at,) = published(run_dir)
    assert at >= 5
    state = read_state(run_dir)
    assert state is not None
    assert (state.over, state.summary.error) == (True, "RunInterrupted")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_run_that_is_interrupted_while_it_compiles_leaves_nothing_running(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    options: list[str | Path] = [
        "launch",
        tiny.path,
        "--data",
        tiny_data,
        "--workers",
        "2",
        "--strategy",
        "zero3",
    ]
    ended = interrupt(
        [*options, "--run-dir", "run"],
        tmp_path,
        compiling(cache),
        {"TRAINLOAD_CACHE_DIR": str(cache)},
    )
    assert ended.status == 1, ended.err
    assert how_to_go_on(ended) == "trainload resume run"
    assert ended.left == []
    assert "Traceback" not in ended.err


@pytest.mark.timeout(400)
def test_a_run_under_torchrun_can_be_interrupted_and_continued_on_ray(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options: list[str | Path] = [
        "--steps",
        "100000",
        "--run-dir",
        run_dir,
        "--no-compile",
        "--backend",
        "torchrun",
    ]
    arguments = ["launch", tiny.path, "--data", tiny_data, "--strategy", "zero3", *options]
    demand_continued(
        interrupted(arguments, tmp_path, stepped(run_dir, 5), signal.SIGINT, torchrun=True), run_dir
    )


@pytest.mark.slow  # the same test with three interpreters
@pytest.mark.timeout(400)
def test_a_run_that_torchrun_s_interpreters_do_can_be_interrupted(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options: list[str | Path] = [
        "--steps",
        "100000",
        "--run-dir",
        run_dir,
        "--no-compile",
        "--backend",
        "torchrun",
    ]
    arguments = ["launch", tiny.path, "--data", tiny_data, "--strategy", "zero3", *options]
    demand_continued(
        interrupt(arguments, tmp_path, stepped(run_dir, 5), {}, program=TORCHRUN), run_dir
    )


def demand_continued(ended: Interrupted, run_dir: Path) -> None:
    """Check that an interrupted run saved a checkpoint, and printed how to continue."""
    assert ended.status != 0
    assert f"Continue with: trainload resume {run_dir}" in ended.err
    assert ended.left == []
    (at,) = published(run_dir)
    assert at >= 5
    assert not (run_dir / "stop").exists()
