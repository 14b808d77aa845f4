"""A run on one rank that is profiled while it runs: its trace, its tables, and what does not
change.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.launch.commands import refused
from tests.launch.profiling.profiled import (
    NARROW,
    WIDE,
    ranges_of,
    uneven_package,
    uneven_rows,
    while_it_runs,
)
from tests.waiting import wait_until

import trainload
from trainload.cli import main as cli
from trainload.core.errors import RequestError, StorageError, TrainingError
from trainload.launching.api.profile_run import Profile, RequestedProfile, request_profile
from trainload.launching.profiling.profile_result import InterpretedProfile, Kind
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.run.profile_request import PROFILE_FILE
from trainload.launching.run.working_copy import RunFiles, request
from trainload.launching.worker import divergence
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

STEPS = 3
ELEMENTS = (NARROW + 1) * WIDE + (WIDE + 1) * WIDE + WIDE + 1
"""Elements of all parameters."""
PADDED = -(-ELEMENTS // 16) * 16
"""Length of their bucket."""
COUNTER = 4
"""Bytes of AdamW's count of steps, which plans do not estimate."""
EVERY = 5
"""Steps between checkpoints."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return uneven_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def plan(package: Package) -> Plan:
    return trainload.plan(package, trainload.Cluster(), "single")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uneven_rows(tmp_path_factory.mktemp("rows") / "rows.npz")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture(scope="module")
def profile(package: Package, plan: Plan, rows: Path, run_dir: Path) -> Profile:
    """Profile of a run that went on until a later checkpoint, and was stopped."""

    def ask() -> Profile:
        return trainload.profile(run_dir, steps=STEPS)

    return while_it_runs(
        ask, package, plan, rows, run_dir, backend="local", checkpoint_every=EVERY, keep=1000
    )


@pytest.fixture(scope="module")
def interpreted(profile: Profile) -> InterpretedProfile:
    (rank,) = profile.ranks
    assert rank.interpreted is not None
    return rank.interpreted


def test_the_trace_has_the_steps_with_their_graphs(profile: Profile) -> None:
    ranges = ranges_of(Path(profile.folder) / "rank-0.trace.json.gz")
    steps = [name for name in ranges if name.startswith("step ")]
    assert steps == [f"step {profile.step + number}" for number in range(STEPS)]
    for name in ("data", "graph train.only", "update train.update"):
        assert ranges.count(name) == STEPS


def test_a_checkpoint_between_the_steps_is_a_range(
    package: Package, plan: Plan, rows: Path, tmp_path: Path
) -> None:
    def ask() -> Profile:
        return trainload.profile(tmp_path / "run", steps=2, trace_only=True)

    found = while_it_runs(
        ask, package, plan, rows, tmp_path / "run", backend="local", checkpoint_every=1
    )
    assert "checkpoint" in ranges_of(Path(found.folder) / "rank-0.trace.json.gz")


def test_operators_are_counted_per_step(profile: Profile) -> None:
    calls = {each.name: each.calls for each in profile.ranks[0].operators}
    assert calls["graph train.only"] == 1
    assert calls["aten::addmm"] == 10


def test_the_slow_line_is_the_first(interpreted: InterpretedProfile) -> None:
    slowest = interpreted.lines[0]
    assert slowest.module == "large"
    assert slowest.line.endswith("x = self.large(x)  # the slow line")
    assert slowest.forward > 0
    assert slowest.backward > 0


def test_memory_of_known_sizes_is_exact(interpreted: InterpretedProfile) -> None:
    most = {each.kind: each.most for each in interpreted.memory}
    assert most[Kind.PARAMETERS] == 4 * PADDED
    assert most[Kind.GRADIENTS] == 4 * PADDED
    assert most[Kind.STATE] == 2 * 4 * PADDED + COUNTER
    assert most[Kind.GATHERED] == 0


def test_the_plan_estimates_these_sizes(interpreted: InterpretedProfile, plan: Plan) -> None:
    estimates = {each.kind: each.estimate for each in interpreted.memory}
    assert estimates[Kind.PARAMETERS] == plan.estimate.parameter_bytes == 4 * PADDED
    assert estimates[Kind.GRADIENTS] == plan.estimate.gradient_bytes == 4 * PADDED
    assert estimates[Kind.STATE] == plan.estimate.optimizer_bytes == 2 * 4 * PADDED
    assert estimates[Kind.ACTIVATIONS] is None


def test_modules_have_all_of_the_peak(interpreted: InterpretedProfile) -> None:
    peak = sum(each.peak for each in interpreted.memory)
    assert sum(each.bytes for each in interpreted.modules) == peak
    large = next(each for each in interpreted.modules if each.module == "large")
    assert large.kinds[Kind.PARAMETERS] == 4 * (WIDE + 1) * WIDE
    assert large.kinds[Kind.STATE] == 2 * 4 * (WIDE + 1) * WIDE


def test_the_journal_says_what_was_profiled(
    profile: Profile, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (event,) = [event for event in read_events(run_dir) if event.kind == "profile"]
    assert (event.data["step"] + 1, event.data["steps"]) == (profile.step, STEPS)
    assert (event.data["ranks"], event.data["error"]) == ([0], "")
    assert cli.run(["logs", str(run_dir)]) == 0
    last = profile.step + STEPS - 1
    line = f"profile of steps {profile.step} to {last}, ranks 0: profiles/{profile.step}"
    assert line in capsys.readouterr().out


def test_losses_and_parameters_are_those_without_a_profile(
    profile: Profile, package: Package, plan: Plan, rows: Path, run_dir: Path, tmp_path: Path
) -> None:
    stopped_at = max(e.data["step"] for e in read_events(run_dir) if e.kind == "checkpoint")
    assert stopped_at >= profile.step + STEPS - 1
    trainload.launch(
        package,
        plan,
        rows,
        run_dir=tmp_path / "run",
        steps=stopped_at,
        compile=False,
        backend="local",
    )
    assert losses(read_events(tmp_path / "run")) == losses(read_events(run_dir))[:stopped_at]
    assert weights_at(tmp_path / "run", stopped_at) == weights_at(run_dir, stopped_at)


def weights_at(run_dir: Path, step: int) -> list[bytes]:
    folder = run_dir / "checkpoints" / f"step-{step:08}"
    found = [path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))]
    assert found
    return found


def test_a_run_that_has_ended_is_not_profiled(profile: Profile, run_dir: Path) -> None:
    with pytest.raises(StorageError, match=r"not running.*phase stopped.*debug --statistics"):
        trainload.profile(run_dir)
    assert not (run_dir / PROFILE_FILE).exists()


def test_the_command_refuses_it_too(
    profile: Profile, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["profile", run_dir], run_dir, capsys)
    assert "the run is not running" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing argument 'RUN_DIR'"),
        (["--rank", "1", "-o", "machine.json"], "No such option '-o'"),
        (["run", "--workers", "3"], "No such option '--workers'"),
    ],
)
def test_options_that_measure_the_machine_are_refused_with_the_command_that_has_them(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["profile", *words]) == 2
    line = capsys.readouterr().err
    assert message in line
    assert "trainload measure -o FILE" in line


def test_a_folder_without_a_run_is_not_profiled(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no such run"):
        trainload.profile(tmp_path)


def test_the_command_prints_the_tables(
    package: Package, plan: Plan, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask() -> int:
        return cli.run(["profile", str(tmp_path / "run"), "--steps", "1"])

    assert while_it_runs(ask, package, plan, rows, tmp_path / "run", backend="local") == 0
    shown = capsys.readouterr().out
    assert "self.large(x)" in shown
    assert "rank-0.trace.json.gz" in shown
    for kind in Kind:
        assert kind in shown


def test_the_command_prints_json(
    package: Package, plan: Plan, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask() -> int:
        words = ["profile", str(tmp_path / "run"), "--steps", "1", "--trace-only", "--json"]
        return cli.run(words)

    assert while_it_runs(ask, package, plan, rows, tmp_path / "run", backend="local") == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["ranks"]
    assert (found["steps"], rank["rank"], rank["interpreted"]) == (1, 0, None)
    assert Path(rank["trace"]).is_file()


def refused_while_it_runs(
    package: Package, plan: Plan, rows: Path, run_dir: Path, **options: Any
) -> None:
    """Request a profile of a running job, which is expected to raise."""

    def ask() -> None:
        trainload.profile(run_dir, **options)

    while_it_runs(ask, package, plan, rows, run_dir, backend="local")


def test_a_rank_that_the_run_does_not_have_is_refused(
    package: Package, plan: Plan, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=r"does not have this rank.*0 to 0.*got 7"):
        refused_while_it_runs(package, plan, rows, tmp_path / "run", rank=7)


def test_no_steps_are_refused(package: Package, plan: Plan, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nothing to profile"):
        refused_while_it_runs(package, plan, rows, tmp_path / "run", steps=0)


def test_a_profile_that_the_run_does_not_complete_is_an_error(
    package: Package, plan: Plan, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"

    def ask() -> int:
        stopping = threading.Thread(target=stop_when_it_is_asked)
        stopping.start()
        status = cli.run(["profile", str(run_dir), "--steps", str(10**6)])
        stopping.join()
        return status

    def stop_when_it_is_asked() -> None:
        wait_until((run_dir / PROFILE_FILE).exists)
        request(run_dir, Request.STOP)

    assert while_it_runs(ask, package, plan, rows, run_dir, backend="local") == 1
    assert "the run has ended before the profile was complete" in capsys.readouterr().err
    assert not (run_dir / PROFILE_FILE).exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    package: Package, plan: Plan, rows: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    def ask() -> int:
        (run_dir / "profiles").write_bytes(b"")
        with pytest.raises(TrainingError, match="rank 0 cannot write its profile"):
            trainload.profile(run_dir, trace_only=True)
        return len(read_events(run_dir))

    written = while_it_runs(ask, package, plan, rows, run_dir, backend="local")
    assert any(event.kind == "step" for event in read_events(run_dir)[written:])


def test_a_pass_that_fails_does_not_end_the_run(
    package: Package, plan: Plan, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory")

    def ask() -> int:
        with pytest.raises(TrainingError, match="cannot be computed: not enough memory"):
            trainload.profile(tmp_path / "run", steps=1)
        return trainload.profile(tmp_path / "run", steps=1, trace_only=True).steps

    monkeypatch.setattr(divergence, "uncompiled_build", no_memory)
    assert while_it_runs(ask, package, plan, rows, tmp_path / "run", backend="local") == 1


def test_one_profile_follows_another(
    package: Package, plan: Plan, rows: Path, tmp_path: Path
) -> None:
    def ask() -> list[int]:
        found = [trainload.profile(tmp_path / "run", steps=1, trace_only=True) for _ in range(3)]
        return [each.step for each in found]

    steps = while_it_runs(ask, package, plan, rows, tmp_path / "run", backend="local")
    assert steps == sorted(set(steps))


def test_a_second_request_waits_for_the_first(
    package: Package, plan: Plan, rows: Path, tmp_path: Path
) -> None:
    def ask() -> None:
        files = RunFiles(tmp_path / "run")
        request_profile(files, 10**6, [0])
        request_profile(files, 1, [0])

    with pytest.raises(StorageError, match="another profile of the run is not complete"):
        while_it_runs(ask, package, plan, rows, tmp_path / "run", backend="local")


def test_a_profile_ends_with_the_run(
    package: Package, plan: Plan, rows: Path, tmp_path: Path
) -> None:
    asked: list[RequestedProfile] = []

    def ask(event: Event) -> None:
        if event.kind == "start":
            asked.append(request_profile(RunFiles(tmp_path / "run"), 10**6, [0]))

    trainload.launch(
        package,
        plan,
        rows,
        run_dir=tmp_path / "run",
        steps=20,
        compile=False,
        backend="local",
        on_event=ask,
    )
    events = [event for event in read_events(tmp_path / "run") if event.kind == "profile"]
    assert [event.data["id"] for event in events] == [each.request.id for each in asked]
    assert [event.data["step"] + event.data["steps"] for event in events] == [20]


@pytest.mark.slow
def test_compiled_graphs_are_profiled(
    package: Package, plan: Plan, rows: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    def ask() -> Profile:
        return trainload.profile(run_dir, steps=2)

    found = while_it_runs(ask, package, plan, rows, run_dir, backend="local", compile=True)
    (rank,) = found.ranks
    assert rank.interpreted is not None
    assert rank.interpreted.lines[0].module == "large"
    assert "graph train.only" in ranges_of(Path(found.folder) / "rank-0.trace.json.gz")
