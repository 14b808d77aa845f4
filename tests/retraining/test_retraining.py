"""End-to-end retraining: real runs in this process, and a store in a folder."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.retraining.conftest import write_day
from tests.retraining.ticking import LINE, config_of, day, name, tick

import trainload
from trainload.core.errors import RequestError
from trainload.core.storage import lease
from trainload.core.storage.lease import LeaseLostError
from trainload.launching.run.journal import Event, read_events
from trainload.packaging.package import Package
from trainload.packaging.stores.push import push
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config
from trainload.retraining.ticks import tick_stages as stages
from trainload.retraining.ticks import training
from trainload.retraining.ticks.line_lease import Held, LineLeases
from trainload.retraining.ticks.lineage import read_line, rollback
from trainload.retraining.ticks.tick import Scheduler
from trainload.retraining.ticks.tick_records import Decided, Ended, Evaluated, Ticks, Trained
from trainload.retraining.ticks.tick_stages import Opening, Stages
from trainload.retraining.ticks.training import training_plan
from trainload.sharding.plans.plan import Plan


@pytest.fixture
def ticks(lived: Path) -> Ticks:
    return Ticks(Store(lived / "store"), LINE)


def test_ticks_end_as_their_data_is(ticks: Ticks) -> None:
    assert {tick: each.outcome for tick, each in ticks.of_all(Ended).items()} == {
        name(0): "promoted",
        name(1): "no data",
        name(2): "promoted",
    }


def test_the_challenger_starts_from_the_champion(ticks: Ticks) -> None:
    first, last = ticks.read_required(Evaluated, name(0)), ticks.read_required(Evaluated, name(2))
    assert first.challenger.loss is not None
    assert last.champion.loss is not None
    assert last.champion.loss < 0.8 * (first.champion.loss or 0.0)


def test_champion_and_challenger_are_evaluated_on_the_same_rows_as_by_themselves(
    lived: Path, ticks: Ticks
) -> None:
    evaluated, trained = (
        ticks.read_required(Evaluated, name(2)),
        ticks.read_required(Trained, name(2)),
    )
    (held,) = (lived / "runs" / LINE / name(2)).glob("data-*/held-out.arrow")
    for release, scores in ((2, evaluated.champion), (int(trained.release), evaluated.challenger)):
        package = trainload.open(f"{lived / 'store'}#{LINE}/{release}")
        plan = trainload.plan(package, trainload.Cluster(devices_per_node=1), "single")
        found = trainload.evaluate(package, plan, held, backend="local", compile=False)
        assert (found.loss, found.metrics, found.rows) == (scores.loss, scores.metrics, scores.rows)


def test_drift_is_told_against_the_champions_data(ticks: Ticks) -> None:
    assert ticks.read_required(Decided, name(0)).drift == {}
    decided = ticks.read_required(Decided, name(2))
    assert decided.drift["x"] > 0.2
    assert decided.warnings == (
        f"column x has drifted: {decided.drift['x']:.3g}, which reaches the warning level of 0.2",
    )


def test_only_weights_and_records_are_sent_again(lived: Path, ticks: Ticks) -> None:
    weights = sum(
        path.stat().st_size
        for path in (lived / "runs" / LINE / name(2) / "run-1.tl" / "weights").iterdir()
    )
    manifest = (lived / "runs" / LINE / name(2) / "run-1.tl" / "manifest.json").stat().st_size
    assert ticks.read_required(Trained, name(2)).sent_bytes <= weights + manifest


def test_a_finished_tick_is_the_same_when_it_is_run_again(small: Package, lived: Path) -> None:
    before = sorted(
        str(path)
        for path in (lived / "store").rglob("*")
        if "leases" not in str(path) and "heartbeats" not in str(path)
    )
    assert tick(config_of(lived, small), 2).outcome == "promoted"
    after = sorted(
        str(path)
        for path in (lived / "store").rglob("*")
        if "leases" not in str(path) and "heartbeats" not in str(path)
    )
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"frozen": ["0.*"]}, id="frozen"),
        pytest.param({"adapters.rank": 2, "adapters.layers": ["2.weight"]}, id="adapters"),
    ],
)
def test_settings_of_the_training_change_what_is_trained_and_sent(
    small: Package, folder: Path, settings: dict[str, Any]
) -> None:
    config = config_of(
        folder, small, train={"epochs": 2, "set": settings}, gate={"require": "eval.loss > 0"}
    )
    tick(config, 0)
    write_day(folder / "data" / "1.arrow", rows=60, seed=1)
    tick(config, 1)
    releases = [Store(folder / "store").release(LINE, number).files for number in (1, 2, 3)]
    weights = [
        {entry.sha256 for path, entry in files.items() if path.endswith(".safetensors")}
        for files in releases
    ]
    assert [len(each) for each in weights] == [1, 2, 2]
    assert len(weights[1] & weights[2]) == 1
    first, last = (trainload.open(f"{folder / 'store'}#{LINE}/{number}") for number in (1, 3))
    changed = {
        name
        for name in last.weights.names()
        if not first.weights.tensor(name).equal(last.weights.tensor(name))
    }
    assert changed == ({"2.weight", "2.bias"} if "frozen" in settings else {"2.weight"})


def test_a_run_of_a_tick_that_is_asked_to_stop_leaves_a_checkpoint(
    small: Package, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the owner checks for stop requests at every heartbeat
    monkeypatch.setattr(lease, "_BEATS", 1000)
    config = config_of(folder, small, train={"steps": 100_000}, lease={"seconds": "12s"})
    store = Store(folder / "store", create=True)

    def heard(event: Event) -> None:
        if event.kind == "step" and event.data["step"] == 20:
            LineLeases(store, LINE, "somebody").ask_to_stop("00000001")

    ended = Scheduler(config, Stages(Opening(), print, heard), print).tick(day(0))
    assert (ended.outcome, ended.reason) == ("replaced", "somebody asked it to stop")
    assert list((folder / "runs" / LINE / name(0) / "run-1" / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def from_the_first(small: Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line of two ticks that train from the line's first weights. No test changes it."""
    folder = tmp_path_factory.mktemp("first")
    config = config_of(
        folder, small, train={"steps": 2, "start": "first"}, gate={"require": "eval.loss < 99"}
    )
    for number in (0, 1):
        write_day(folder / "data" / f"{number}.arrow", rows=60, seed=number)
        tick(config, number)
    return folder


@pytest.mark.slow
def test_or_from_the_weights_that_the_line_began_with(from_the_first: Path) -> None:
    store = Store(from_the_first / "store")
    assert [state.release.parent for state in store.releases(LINE)] == [
        None,
        "00000001",
        "00000001",
    ]


@pytest.mark.slow
def test_a_champion_is_scored_in_the_precision_of_the_challenger(
    small: Package, folder: Path
) -> None:
    config = config_of(
        folder,
        small,
        train={"steps": 2, "start": "first", "set": {"precision": "bf16"}},
        gate={"require": "eval.loss < 99"},
    )
    tick(config, 0)
    run = folder / "runs" / LINE / name(0) / "run-1"
    of_the_run = {
        event.data["step"]: event.data["loss"] for event in read_events(run) if event.kind == "eval"
    }
    scored = Ticks(Store(folder / "store"), LINE).read_required(Evaluated, name(0))
    assert (scored.champion.loss, scored.challenger.loss) == (of_the_run[0], of_the_run[2])


@dataclass(frozen=True)
class Retained:
    """A line of four ticks with little retention; the first and the last were promoted.

    Attributes:
        folder: the line's folder. No test changes it.
        runs: names of the runs that were kept after the third tick.
        began: checkpoints with the optimizer state that the first two ticks started from.
    """

    folder: Path
    runs: list[str]
    began: list[str | None]


def retained_line(small: Package, folder: Path, start: str) -> Retained:
    push(small.path, folder / "store", line="other")
    push(small.path, folder / "store", line="other", message="again", facts={"note": "two"})
    always, never = {"require": "eval.loss < 99"}, {"require": "eval.loss < 0"}
    train: dict[str, Any] = {"steps": 2, "start": start}
    if start == "current":
        train["optimizer"] = "kept"
    runs, kept, began = folder / "runs" / LINE, [], []
    for number, gate in enumerate((always, never, never, always)):
        write_day(folder / "data" / f"{number}.arrow", rows=60, seed=number)
        config = config_of(
            folder, small, train=train, gate=gate, retention={"releases": 2, "runs": 1}
        )
        assert tick(config, number).warnings == ()
        kept.append(sorted(path.name for path in runs.iterdir()))
        began.append(
            json.loads((runs / name(number) / "run-1" / "run.json").read_text())["optimizer_from"]
        )
    return Retained(folder, kept[2], began[:2])


@pytest.fixture(scope="module")
def retained(small: Package, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Retained]:
    """A function that returns the line with a value of `train.start`, created once."""
    return cache(lambda start: retained_line(small, tmp_path_factory.mktemp("retained"), start))


@pytest.mark.slow
def test_old_runs_are_removed_but_for_the_champions(retained: Callable[[str], Retained]) -> None:
    assert retained("current").runs == [name(0), name(2)]


@pytest.mark.slow
def test_the_optimizers_state_is_kept_where_that_is_asked_for(
    retained: Callable[[str], Retained],
) -> None:
    line = retained("current")
    assert line.began == [
        None,
        str(line.folder / "runs" / LINE / name(0) / "run-1" / "checkpoints" / "step-00000002"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("start", "removed"), [("current", ["1"]), ("first", [])])
def test_releases_that_were_current_keep_their_files(
    retained: Callable[[str], Retained], tmp_path: Path, start: str, removed: list[str]
) -> None:
    """Only the last two do; rejected challengers do not count, and other lines are not touched."""
    store = Store(shutil.copytree(retained(start).folder / "store", tmp_path / "store"))
    states = store.releases(LINE)
    assert [state.release.name for state in states if state.status == "removed"] == [
        *removed,
        "3",
        "4",
    ]
    assert rollback(store, LINE).release == "00000002"
    assert "removed" not in {state.status for state in store.releases("other")}


@pytest.fixture(scope="module")
def sliced(small: Package, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """A line's store, and the results of its two ticks on the same data.

    The first was rejected because of a slice, the second promoted.
    """
    folder = tmp_path_factory.mktemp("sliced")
    write_day(folder / "data" / "0.arrow", rows=60)
    held = write_day(folder / "held.arrow", rows=60, seed=9, land=np.arange(60) % 2)
    data = {
        "files": str(folder / "data" / "*.arrow"),
        "window": {"kind": "new", "since": "promoted"},
    }
    ended = []
    bars: tuple[dict[str, Any], ...] = (
        {"require": "eval.loss < 0"},
        {"require": "eval.loss < 99", "values": [0, 7]},
    )
    for number, bar in enumerate(bars):
        evaluation = {"files": str(held), "slices": {"column": "land", **bar}}
        ended.append(tick(config_of(folder, small, data=data, evaluation=evaluation), number))
    return folder / "store", ended


def test_slices_have_bars_of_their_own(sliced: tuple[Path, list[Ended]]) -> None:
    ended = sliced[1][0]
    assert ended.outcome == "rejected"
    assert ended.reason.startswith("land=0: eval.loss < 0: ")


def test_a_slice_that_was_asked_for_and_has_no_rows_is_said(
    sliced: tuple[Path, list[Ended]],
) -> None:
    checks = Ticks(Store(sliced[0]), LINE).read_required(Decided, name(1)).checks
    assert [(each.slice, each.judged, each.text) for each in checks if each.slice] == [
        ("land=0", True, checks[-2].text),
        ("land=7", False, "not judged: 0 rows, fewer than 1"),
    ]


def test_a_challenger_that_was_rejected_before_can_be_promoted_by_another_gate(
    sliced: tuple[Path, list[Ended]],
) -> None:
    """The same data and champion result in the same bytes."""
    ended = sliced[1][1]
    states = Store(sliced[0]).releases(LINE)
    assert (ended.outcome, ended.release, [state.status for state in states]) == (
        "promoted",
        "00000003",
        ["promoted", "rejected", "current"],
    )
    assert states[1].release.package == states[2].release.package


@pytest.mark.slow
def test_files_of_a_rejected_tick_come_again_where_only_promoted_ones_count(
    small: Package, folder: Path
) -> None:
    data = {
        "files": str(folder / "data" / "*.arrow"),
        "window": {"kind": "new", "since": "promoted"},
    }
    tick(config_of(folder, small, data=data, gate={"require": "eval.loss < 0"}), 0)
    write_day(folder / "data" / "1.arrow", rows=60, seed=1)
    tick(config_of(folder, small, data=data), 1)
    assert tick(config_of(folder, small, data=data), 2).outcome == "no data"
    stories = read_line(Store(folder / "store"), LINE).ticks
    assert [len(each.taken.snapshot.files) for each in stories if each.taken is not None] == [
        1,
        2,
        0,
    ]


def test_data_that_changed_while_a_tick_was_broken_off_is_noticed(
    small: Package, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = write_day(folder / "held.arrow", rows=20, seed=9)
    config = config_of(folder, small, evaluation={"files": str(held)})
    with monkeypatch.context() as patch:
        patch.setattr(Stages, "train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tick(config, 0)
    write_day(folder / "data" / "0.arrow", rows=60, seed=8)
    with pytest.raises(RequestError, match="has changed since it was inspected"):
        tick(config, 0)


def test_a_line_without_a_package_is_refused(small: Package, folder: Path) -> None:
    config = config_of(folder, small).model_copy(update={"package": None})
    with pytest.raises(RequestError, match="the line has no current release"):
        tick(config, 0)


def test_a_plan_and_a_setting_that_it_says_are_not_both_taken(small: Package, folder: Path) -> None:
    plan = trainload.plan(small, trainload.Cluster(), "single")
    (folder / "plan.json").write_text(plan.model_dump_json())
    cluster = {"backend": "local", "compile": False, "plan": str(folder / "plan.json")}
    with pytest.raises(
        RequestError, match=r"train\.set: the plan already sets this \(got global_batch\)"
    ):
        tick(
            config_of(
                folder, small, cluster=cluster, train={"steps": 2, "set": {"global_batch": 8}}
            ),
            0,
        )
    assert (
        tick(config_of(folder, small, cluster=cluster, train={"steps": 2}), 0).outcome == "promoted"
    )


@dataclass(frozen=True)
class Once:
    """A tick's result, the packages planned for it, and the folder of a half-removed run."""

    ended: Ended
    planned: list[str]
    left: Path


@pytest.fixture(scope="module")
def once(small: Package, tmp_path_factory: pytest.TempPathFactory) -> Once:
    """A line's first tick, whose gate refers to drift, in a folder with a half-removed run."""
    folder = tmp_path_factory.mktemp("once")
    write_day(folder / "data" / "0.arrow", rows=60)
    left = folder / "runs" / LINE / f".{name(0)}.4711"
    left.mkdir(parents=True)
    (left / "events.jsonl").write_text("")
    planned: list[str] = []

    def counted(config: Config, package: Package) -> Plan:
        planned.append(package.digest)
        return training_plan(config, package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "training_plan", counted)
        ended = tick(
            config_of(folder, small, gate={"require": "drift.x < 0.5 and drift.cls < 0.5"}), 1
        )
    return Once(ended, planned, left)


def test_a_tick_is_planned_once(small: Package, once: Once) -> None:
    assert once.ended.outcome == "promoted"
    assert once.planned == [small.digest]


def test_a_tick_that_cannot_be_right_is_not_begun(small: Package, folder: Path) -> None:
    config = config_of(folder, small, gate={"require": "eval.acuracy > 0.5"})
    with pytest.raises(RequestError, match=r"Did you mean eval\.accuracy"):
        tick(config, 0)
    assert Ticks(Store(folder / "store"), LINE).names() == []
    assert tick(config_of(folder, small), 0).outcome == "promoted"


def test_drift_may_be_named_before_there_is_anything_that_it_could_be_told_against(
    once: Once,
) -> None:
    assert (once.ended.outcome, once.ended.reason) == (
        "promoted",
        "drift.x < 0.5: 0 < 0.5 is true; drift.cls < 0.5: 0 < 0.5 is true",
    )


def test_held_out_rows_that_change_between_two_evaluations_are_noticed(
    small: Package, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = write_day(folder / "held.arrow", rows=60, seed=9)
    config = config_of(
        folder, small, evaluation={"files": str(held)}, train={"steps": 2, "start": "first"}
    )
    real = Stages.evaluate

    def late(stages: Stages, *arguments: Any) -> Any:
        write_day(held, rows=60, seed=10)
        return real(stages, *arguments)

    monkeypatch.setattr(Stages, "evaluate", late)
    with pytest.raises(RequestError, match="has changed since it was inspected"):
        tick(config, 0)


@pytest.mark.slow
def test_a_champion_is_evaluated_in_a_folder_that_all_nodes_share(from_the_first: Path) -> None:
    assert (from_the_first / "runs" / LINE / name(0) / "evaluation-1-1" / "run.json").is_file()


def test_folders_of_runs_that_were_being_removed_go_too(once: Once) -> None:
    assert not once.left.exists()


def test_a_process_that_lost_its_lease_asks_no_run_to_stop(
    small: Package, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current holder of the lease continues it."""
    asked = folder / "runs" / LINE / name(0) / "run-1" / "stop"
    refused = threading.Semaphore(0)
    seen: list[bool] = []

    def heard(event: Event) -> None:
        if event.kind == "step" and event.data["step"] == 3:
            monkeypatch.setattr(Held, "check", lost)
            monkeypatch.setattr(Held, "asked_to_stop", "somebody")
            # at the second refusal, everything that follows the first one is done
            for _ in range(2):
                assert refused.acquire(timeout=60)
            seen.append(asked.exists())

    def lost(_held: Held) -> None:
        refused.release()
        raise LeaseLostError("the lease is lost")

    monkeypatch.setattr(training, "_WATCH_SECONDS", 0.01)
    with pytest.raises(LeaseLostError):
        Scheduler(
            config_of(folder, small, train={"steps": 4}), Stages(Opening(), print, heard), print
        ).tick(day(0))
    assert seen == [False]
