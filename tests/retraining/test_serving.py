"""Actions after a tick: handover of the current release, and notifications."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.retraining.conftest import write_day
from tests.retraining.ticking import LINE, config_of, tick

from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.retraining.ticks.lineage import rollback
from trainload.retraining.ticks.tick_stages import Stages


@pytest.fixture(scope="module")
def undone(small: Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a tick was interrupted after its promotion, before the actions that follow.

    No test changes it.
    """
    folder = tmp_path_factory.mktemp("undone")
    write_day(folder / "data" / "0.arrow", rows=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stages, "after", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tick(config_of(folder, small), 0)
    return folder


@pytest.fixture
def promoted(undone: Path, tmp_path: Path) -> Path:
    """A copy of that folder. The tick continues with the actions of the caller's configuration."""
    return shutil.copytree(undone, tmp_path / "promoted")


def serving(folder: Path, **more: Any) -> dict[str, Any]:
    return {"form": "huggingface", "place": str(folder / "serving"), **more}


def test_a_release_is_handed_over_when_it_is_promoted(small: Package, promoted: Path) -> None:
    told = promoted / "told.json"
    script = (
        f"import sys, pathlib; pathlib.Path({str(told)!r}).write_text(sys.stdin.read() +"
        " sys.argv[1])"
    )
    place = {
        "form": "huggingface",
        "place": str(promoted / "serving"),
        "command": [sys.executable, "-c", script],
    }
    assert tick(config_of(promoted, small, handover=place), 0).warnings == ()
    assert (promoted / "serving" / "current").resolve() == promoted / "serving" / "small-2"
    assert (promoted / "serving" / "current" / "model.safetensors").is_file()
    record, _, path = told.read_text().rpartition("}")
    assert (json.loads(record + "}")["outcome"], path) == (
        "promoted",
        str(promoted / "serving" / "small-2"),
    )


def test_a_command_that_fails_is_a_warning(small: Package, promoted: Path) -> None:
    hook = {"command": [sys.executable, "-c", "import sys; sys.exit('no line to the office')"]}
    ended = tick(config_of(promoted, small, notify=hook), 0)
    assert ended.outcome == "promoted"
    assert ["no line to the office" in text for text in ended.warnings] == [True]


def test_a_command_hears_only_of_what_it_asked_for(small: Package, promoted: Path) -> None:
    hook = {"command": [sys.executable, "-c", "import sys; sys.exit(1)"], "outcomes": ["failed"]}
    assert tick(config_of(promoted, small, notify=hook), 0).warnings == ()


def test_what_was_rolled_back_before_it_was_handed_over_is_not_handed_over(
    small: Package, promoted: Path
) -> None:
    rollback(Store(promoted / "store"), LINE)
    assert tick(config_of(promoted, small, handover=serving(promoted)), 0).outcome == "promoted"
    assert (promoted / "serving" / "current").resolve().name == "small-1"


def test_a_tick_after_a_rollback_hands_over_what_is_current(small: Package, folder: Path) -> None:
    config = config_of(folder, small, handover=serving(folder))
    tick(config, 0)
    rollback(Store(folder / "store"), LINE)
    assert tick(config, 1).outcome == "no data"
    assert (folder / "serving" / "current").resolve().name == "small-1"


def test_a_rollback_is_handed_over_at_once_by_a_command(
    small: Package, promoted: Path, commands: Any
) -> None:
    config = config_of(promoted, small, handover=serving(promoted))
    (promoted / "retrain.yaml").write_text(yaml.safe_dump(config.to_json()))
    tick(config, 0)
    rollback(Store(promoted / "store"), LINE)
    status, out, said = commands("retrain", "handover", str(promoted / "retrain.yaml"), "--json")
    assert (
        status,
        json.loads(out)["release"],
        (promoted / "serving" / "current").resolve().name,
    ) == (0, "1", "small-1"), said


def test_nothing_is_handed_over_that_nobody_promoted(small: Package, folder: Path) -> None:
    config = config_of(folder, small, handover=serving(folder), gate={"require": "eval.loss < 0"})
    assert tick(config, 0).outcome == "rejected"
    assert not (folder / "serving").exists()


def test_who_is_told_of_a_tick_hears_of_a_handover_that_failed(
    small: Package, promoted: Path
) -> None:
    (promoted / "serving").write_text("in the way")
    told = promoted / "told.json"
    hook = {
        "command": [
            sys.executable,
            "-c",
            f"import sys, pathlib; pathlib.Path({str(told)!r}).write_text(sys.stdin.read())",
        ]
    }
    tick(config_of(promoted, small, handover=serving(promoted), notify=hook), 0)
    assert [
        "cannot be handed over" in text for text in json.loads(told.read_text())["warnings"]
    ] == [True]


def test_a_command_may_print_anything(small: Package, promoted: Path) -> None:
    hook = {
        "command": [
            sys.executable,
            "-c",
            "import sys; sys.stdout.buffer.write(bytes([0xe9, 0xff]))",
        ]
    }
    assert tick(config_of(promoted, small, notify=hook), 0).warnings == ()
