"""Runs in W&B, read back from what the library writes in its offline mode."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.sinks.test_sinks import STEPS, trained
from tests.ports import free_port
from tests.waiting import wait_until

import trainload
from trainload.launching.run.journal import Event
from trainload.launching.sinks.sink import open_sinks
from trainload.packaging.package import Package

BLOCK, FIRST = 2**15, 7
"""Length of a block of a W&B file, and that of the header of the first one."""


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a W&B file: parts with a checksum, a length and a type, of which none
    crosses the end of a block.
    """
    data, position, record = path.read_bytes(), FIRST, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if position > len(data):  # it is being written
            return
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


class Offline:
    """An offline run: its description, its history by step, its summary and its exit code; -1 while
    W&B's own process, which ends later than the run, still writes it.
    """

    def __init__(self, folder: Path) -> None:
        from wandb.proto import wandb_internal_pb2

        self.history: list[dict[str, float]] = []
        self.summary: dict[str, object] = {}
        self.config: dict[str, object] = {}
        self.exit_code = -1
        (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        for data in records(path):
            record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]  # chosen by the version of protobuf
            match record.WhichOneof("record_type"):
                case "run":
                    self.run = record.run
                    self.config |= {
                        item.key: json.loads(item.value_json) for item in record.run.config.update
                    }
                case "history":
                    self.history.append(
                        {
                            item.key or ".".join(item.nested_key): json.loads(item.value_json)
                            for item in record.history.item
                        }
                    )
                case "summary":
                    self.summary |= {
                        item.key or ".".join(item.nested_key): json.loads(item.value_json)
                        for item in record.summary.update
                    }
                case "exit":
                    self.exit_code = record.exit.exit_code

    def of(self, name: str) -> dict[float, float]:
        """Return step -> value of a metric."""
        return {row["step"]: row[name] for row in self.history if name in row}


def finished(folder: Path) -> Offline:
    """Return the offline run in a folder, once it is complete."""
    wait_until(lambda: Offline(folder).exit_code >= 0)
    return Offline(folder)


@pytest.fixture(autouse=True)
def offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def test_wandb_has_the_losses_of_the_journal_and_what_was_run(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    expected = trained(tiny, tiny_data, tiny_data, tmp_path / "run", "wandb")
    offline = finished(tmp_path / "run")
    assert offline.of("loss") == dict(enumerate(expected, 1))
    assert sorted(offline.of("evaluation/loss")) == [0, STEPS]
    assert (offline.run.project, offline.run.display_name) == ("trainload", "run")
    assert offline.config["package"] == tiny.digest
    assert (offline.summary["outcome"], offline.exit_code) == ("ended", 0)


def test_a_failed_run_is_a_failed_one_in_wandb(tmp_path: Path) -> None:
    from tests.report.made import made_run

    run_dir = made_run(tmp_path / "run", [], digest="a" * 64)
    with open_sinks(["wandb"], run_dir, lambda event: None) as tell:
        tell(Event("failure", {"message": "rank 1 died"}, 1.0))
        tell(Event("failed", {"message": "it failed 3 times"}, 2.0))
    offline = finished(run_dir)
    assert offline.summary["last failure"] == "rank 1 died"
    assert (offline.summary["outcome"], offline.exit_code) == ("failed", 1)


def test_a_resumed_run_continues_its_run_in_wandb(tmp_path: Path) -> None:
    from tests.report.made import made_run

    run_dir = made_run(tmp_path / "run", [], digest="a" * 64)
    for _ in range(2):
        with open_sinks(["wandb"], run_dir, lambda event: None):
            pass
    names = {path.name for path in run_dir.glob("wandb/offline-run-*/run-*.wandb")}
    assert names == {f"run-{(run_dir / 'sink-wandb').read_text().strip()}.wandb"}


@pytest.mark.slow
def test_a_server_that_is_away_neither_holds_a_run_nor_its_process(tmp_path: Path) -> None:
    from tests.report.made import made_run

    run_dir = made_run(tmp_path / "run", [], digest="a" * 64)
    code = f"""
from pathlib import Path
from trainload.launching.run.journal import Event
from trainload.launching.sinks.sink import open_sinks
with open_sinks(["wandb"], Path({str(run_dir)!r}), lambda e: print(e.kind), new=False) as tell:
    tell(Event("end", {{"step": 1, "steps": 1}}, 1.0))
"""
    away = {"WANDB_MODE": "online", "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}"}
    away |= {"WANDB_API_KEY": "a" * 40, "WANDB_INIT_TIMEOUT": "2"}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **away},
        timeout=100,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.split() == ["warning", "end"]


def test_a_launch_with_a_wrong_setting_of_wandb_is_rejected(tmp_path: Path) -> None:
    from tests.report.made import made_run

    run_dir = made_run(tmp_path / "run", [], digest="a" * 64)
    code = f"""
from pathlib import Path
from trainload.launching.sinks.sink import open_sinks
with open_sinks(["wandb"], Path({str(run_dir)!r}), lambda event: None):
    pass
"""
    process = subprocess.run(  # the library reads its variables once in a process
        [sys.executable, "-c", code],
        env={**os.environ, "WANDB_MODE": "sometimes"},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = [line for line in process.stderr.splitlines() if "StorageError: " in line]
    assert "W&B does not accept its settings" in line
    assert "mode Input should be" in line


def test_a_launch_without_an_api_key_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.report.made import made_run

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    run_dir = made_run(tmp_path / "run", [], digest="a" * 64)
    with (
        pytest.raises(trainload.StorageError, match="WANDB_API_KEY"),
        open_sinks(["wandb"], run_dir, lambda event: None),
    ):
        pass
