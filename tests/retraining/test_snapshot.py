"""Data of a tick: new files, windows by path or column, held-out rows, bad and changed files."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.retraining.conftest import write_day

from trainload.core.errors import DataError, RequestError
from trainload.launching.data.data_files import LocalFile
from trainload.launching.data.run_data import open_run_data
from trainload.packaging.package import Package
from trainload.retraining.config.config import Config, checked
from trainload.retraining.data.snapshot import (
    check_unchanged,
    evaluation_source,
    newest,
    take,
    train_source,
)
from trainload.retraining.data.snapshot_records import Snapshot

WHEN = datetime(2026, 3, 10, tzinfo=UTC)


def config_of(tmp_path: Path, **changes: Any) -> Config:
    least = {
        "store": "s",
        "line": "l",
        "data": {"files": str(tmp_path / "data" / "*.arrow")},
        "evaluation": {"hold_out": 0.25},
    }
    return checked({**least, **changes}, "the test")


def data(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"files": str(tmp_path / "data" / "*.arrow"), **more}


def taken(
    config: Config, package: Package, tmp_path: Path, had: Any = (), when: datetime = WHEN
) -> Snapshot:
    return take(config, when, package, set(had), tmp_path / "tick")


def rows_of(source: str, package: Package, tmp_path: Path) -> dict[str, Any]:
    """Return the rows of a source as a run reads them."""
    (tmp_path / "cache").mkdir(exist_ok=True)
    opened = open_run_data(source, package, 8, tmp_path / "cache")
    parts = [part.dataset.batch(np.arange(part.dataset.size)) for part in opened.parts]
    return {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]}


def test_files_that_no_tick_had_are_new(small: Package, tmp_path: Path) -> None:
    one = write_day(tmp_path / "data" / "1.arrow")
    config = config_of(tmp_path)
    first = taken(config, small, tmp_path)
    write_day(tmp_path / "data" / "2.arrow", seed=2)
    second = taken(
        config, small, tmp_path, had=[(file.name, file.identity) for file in first.files]
    )
    assert [file.name for file in first.files] == [str(one)]
    assert [Path(file.name).name for file in second.files] == ["2.arrow"]


def test_a_file_that_was_written_anew_is_new(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    config = config_of(tmp_path)
    first = taken(config, small, tmp_path)
    write_day(tmp_path / "data" / "1.arrow", seed=5)
    again = taken(config, small, tmp_path, had=[(file.name, file.identity) for file in first.files])
    assert len(again.files) == 1


def test_without_new_files_it_says_so(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    config = config_of(tmp_path)
    first = taken(config, small, tmp_path)
    again = taken(config, small, tmp_path, had=[(file.name, file.identity) for file in first.files])
    assert again.empty.startswith("no new data: all files in")


def test_where_there_are_no_files_at_all_it_says_so(small: Package, tmp_path: Path) -> None:
    assert "no data was found" in taken(config_of(tmp_path), small, tmp_path).empty


def test_too_few_rows_are_no_new_data(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow", rows=40)
    snapshot = taken(config_of(tmp_path, data=data(tmp_path, least_rows=41)), small, tmp_path)
    assert "a tick needs 41" in snapshot.empty


def test_a_path_with_the_time_chooses_files(small: Package, tmp_path: Path) -> None:
    for day in range(1, 12):
        write_day(tmp_path / "data" / f"2026-03-{day:02}" / "a.arrow", seed=day)
    files = str(tmp_path / "data" / "{time:%Y-%m-%d}" / "*.arrow")
    config = config_of(tmp_path, data={"files": files, "window": {"kind": "path", "span": "3d"}})
    snapshot = taken(config, small, tmp_path, when=WHEN)
    assert [Path(file.name).parent.name for file in snapshot.files] == [
        "2026-03-07",
        "2026-03-08",
        "2026-03-09",
    ]


def test_a_window_by_hours_of_which_some_have_no_files(small: Package, tmp_path: Path) -> None:
    for hour in (1, 4):
        write_day(tmp_path / "data" / f"10T{hour:02}.arrow", seed=hour)
    config = config_of(
        tmp_path,
        data={
            "files": str(tmp_path / "data" / "{time:%dT%H}.arrow"),
            "window": {"kind": "path", "span": "5h"},
        },
    )
    snapshot = taken(config, small, tmp_path, when=WHEN + timedelta(hours=5))
    assert [Path(file.name).name for file in snapshot.files] == ["10T01.arrow", "10T04.arrow"]


@pytest.mark.parametrize("kind", ["seconds", "timestamps", "zoned", "nanoseconds", "milliseconds"])
def test_a_column_with_the_time_chooses_rows(small: Package, tmp_path: Path, kind: str) -> None:
    seconds = WHEN.timestamp() + np.arange(-100, 20) * 3600.0
    path = write_day(tmp_path / "data" / "1.arrow", rows=120)
    table = pa.ipc.open_file(str(path)).read_all()
    times: Any = pa.array(seconds)
    if kind == "nanoseconds":
        times = pa.array(seconds.astype(np.int64) * 10**9 + 1).cast(pa.timestamp("ns"))
    elif kind == "milliseconds":
        times = pa.array(seconds.astype(np.int64) * 10**3).cast(pa.timestamp("ms"))
    elif kind != "seconds":
        times = pa.array((seconds * 1e6).astype(np.int64)).cast(
            pa.timestamp("us", tz=None if kind == "timestamps" else "Asia/Tokyo")
        )
    pq.write_table(table.append_column("time", times), tmp_path / "data" / "1.parquet")
    window = {"kind": "column", "column": "time", "span": "2d"}
    config = config_of(
        tmp_path, data={"files": str(tmp_path / "data" / "*.parquet"), "window": window}
    )
    snapshot = taken(config, small, tmp_path)
    assert snapshot.rows + snapshot.held_out_rows == 48
    rows = rows_of(train_source(config, snapshot, tmp_path / "tick"), small, tmp_path)
    held = rows_of(evaluation_source(config, snapshot, tmp_path / "tick"), small, tmp_path)
    wanted = table.column("cls").to_numpy()[52:100]
    assert sorted([*rows["cls"], *held["cls"]]) == sorted(wanted)


def test_what_is_held_out_is_not_trained_on_and_nothing_is_lost(
    small: Package, tmp_path: Path
) -> None:
    marks = np.zeros((200, 4), dtype=np.float32)
    marks[:, 0] = np.arange(200)
    write_day(tmp_path / "data" / "1.arrow", rows=200, x=marks)
    config = config_of(tmp_path)
    snapshot = taken(config, small, tmp_path)
    trained = rows_of(train_source(config, snapshot, tmp_path / "tick"), small, tmp_path)["x"][:, 0]
    held = rows_of(evaluation_source(config, snapshot, tmp_path / "tick"), small, tmp_path)["x"][
        :, 0
    ]
    assert sorted([*trained, *held]) == list(range(200))
    assert 25 < len(held) < 80
    assert (len(trained), len(held)) == (snapshot.rows, snapshot.held_out_rows)


def test_the_same_rows_are_held_out_whenever_a_file_comes(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "2.arrow", seed=2)
    config = config_of(tmp_path)
    alone = taken(config, small, tmp_path)
    held = rows_of(evaluation_source(config, alone, tmp_path / "tick"), small, tmp_path)["x"]
    write_day(tmp_path / "data" / "1.arrow", seed=1)
    both = take(config, WHEN, small, set(), tmp_path / "other")
    more = rows_of(evaluation_source(config, both, tmp_path / "other"), small, tmp_path)["x"]
    assert np.array_equal(more[-len(held) :], held)


def test_rows_that_were_lost_are_made_again_to_the_byte(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    config = config_of(tmp_path)
    snapshot = taken(config, small, tmp_path)
    first = Path(train_source(config, snapshot, tmp_path / "tick")).read_bytes()
    again = Path(train_source(config, snapshot, tmp_path / "elsewhere"))
    assert again.read_bytes() == first


def test_a_snapshot_is_the_same_whoever_takes_it(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    config = config_of(tmp_path)
    assert taken(config, small, tmp_path) == take(config, WHEN, small, set(), tmp_path / "other")


def test_held_out_files_are_used_as_they_are(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    held = write_day(tmp_path / "held" / "h.arrow", rows=12, seed=9)
    config = config_of(tmp_path, evaluation={"files": str(held)})
    snapshot = taken(config, small, tmp_path)
    assert (snapshot.rows, snapshot.held_out_rows, snapshot.made) == (40, 12, False)
    assert json.loads(Path(evaluation_source(config, snapshot, tmp_path / "tick")).read_text()) == {
        "parts": [{"data": [str(held)]}]
    }


def test_slices_are_parts_with_names(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    land = np.arange(30) % 3
    held = write_day(tmp_path / "held" / "h.arrow", rows=30, seed=9, land=land)
    slices = {"column": "land", "require": "eval.loss < 9", "values": [0, 2]}
    config = config_of(tmp_path, evaluation={"files": str(held), "slices": slices})
    snapshot = taken(config, small, tmp_path)
    assert snapshot.slices == {"land=0": 10, "land=2": 10, "land=other": 10}
    parts = json.loads(Path(evaluation_source(config, snapshot, tmp_path / "tick")).read_text())[
        "parts"
    ]
    assert [part["name"] for part in parts] == ["land=0", "land=2", "land=other"]
    assert (
        len(rows_of(evaluation_source(config, snapshot, tmp_path / "tick"), small, tmp_path)["cls"])
        == 30
    )


def test_slices_whose_long_names_begin_alike_stay_apart(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    held = write_day(tmp_path / "held" / "h.arrow", rows=30, seed=9)
    table = pa.ipc.open_file(str(held)).read_all()
    long = pa.array([f"{'country' * 30}{number % 3}" for number in range(30)])
    with (
        pa.OSFile(str(held), "wb") as sink,
        pa.ipc.new_file(sink, table.append_column("land", long).schema) as writer,
    ):
        writer.write_table(table.append_column("land", long))
    config = config_of(
        tmp_path,
        evaluation={"files": str(held), "slices": {"column": "land", "require": "eval.loss < 9"}},
    )
    snapshot = taken(config, small, tmp_path)
    assert sorted(snapshot.slices.values()) == [10, 10, 10]
    assert max(map(len, snapshot.slices)) == 128


def test_too_many_slices_are_refused(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    held = write_day(tmp_path / "held" / "h.arrow", rows=100, seed=9, land=np.arange(100))
    config = config_of(
        tmp_path,
        evaluation={"files": str(held), "slices": {"column": "land", "require": "eval.loss < 9"}},
    )
    assert (
        "the column of the slices has too many distinct values"
        in taken(config, small, tmp_path).refused
    )


def test_columns_that_are_no_inputs_are_dropped_where_that_is_asked_for(
    small: Package, tmp_path: Path
) -> None:
    write_day(tmp_path / "data" / "1.arrow", number=np.arange(40))
    assert "columns that are not inputs" in taken(config_of(tmp_path), small, tmp_path).refused
    config = config_of(tmp_path, data=data(tmp_path, drop=["number"]))
    snapshot = take(config, WHEN, small, set(), tmp_path / "other")
    assert set(rows_of(train_source(config, snapshot, tmp_path / "other"), small, tmp_path)) == {
        "x",
        "cls",
    }


def bad(tmp_path: Path, kind: str) -> None:
    broken = np.zeros((40, 4), dtype=np.float32)
    broken[7, 2] = np.nan
    if kind == "no file":
        (tmp_path / "data" / "2.arrow").write_bytes(b"nonsense")
    else:
        columns: dict[str, dict[str, Any]] = {
            "nan": {"x": broken},
            "column": {"cls": None},
            "dtype": {"cls": np.zeros(40)},
        }
        write_day(tmp_path / "data" / "2.arrow", **columns[kind])


WORDS = {
    "nan": "column 'x': 1 rows hold NaN or infinity, the first is row 7",
    "column": "the data has no column 'cls'",
    "dtype": "input 'cls' has the wrong dtype",
    "no file": "the file cannot be read",
}


@pytest.mark.parametrize("kind", WORDS)
def test_bad_data_is_refused_with_the_file_and_what_is_wrong(
    small: Package, tmp_path: Path, kind: str
) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    bad(tmp_path, kind)
    snapshot = taken(config_of(tmp_path), small, tmp_path)
    assert snapshot.refused.startswith("1 of 2 files are bad")
    assert WORDS[kind] in snapshot.refused
    assert "2.arrow" in snapshot.refused


@pytest.mark.parametrize("kind", WORDS)
def test_or_left_out_where_that_is_asked_for(small: Package, tmp_path: Path, kind: str) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    bad(tmp_path, kind)
    config = config_of(tmp_path, data=data(tmp_path, bad="skip"))
    snapshot = taken(config, small, tmp_path)
    assert (snapshot.refused, [Path(file.name).name for file in snapshot.good]) == ("", ["1.arrow"])
    assert snapshot.rows + snapshot.held_out_rows == 40


def test_bad_held_out_data_is_refused_in_any_case(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    held = write_day(tmp_path / "held.arrow", cls=None)
    config = config_of(tmp_path, data=data(tmp_path, bad="skip"), evaluation={"files": str(held)})
    assert taken(config, small, tmp_path).refused.startswith("the held-out data is bad")


def test_a_file_that_changed_since_is_noticed(small: Package, tmp_path: Path) -> None:
    path = write_day(tmp_path / "data" / "1.arrow")
    snapshot = taken(config_of(tmp_path), small, tmp_path)
    check_unchanged(snapshot)
    write_day(path, seed=4)
    with pytest.raises(DataError, match="has changed since it was inspected"):
        check_unchanged(snapshot)


def test_a_file_that_is_gone_is_noticed(small: Package, tmp_path: Path) -> None:
    path = write_day(tmp_path / "data" / "1.arrow")
    snapshot = taken(config_of(tmp_path), small, tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="a file of the tick's data no longer exists"):
        check_unchanged(snapshot)


def test_rows_are_chosen_of_tables_alone(small: Package, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.savez(
        tmp_path / "data" / "1.npz",
        x=np.zeros((20, 4), dtype=np.float32),
        cls=np.zeros(20, dtype=np.int64),
    )
    config = config_of(tmp_path, data={"files": str(tmp_path / "data" / "*.npz")})
    with pytest.raises(RequestError, match="from files in certain formats"):
        taken(config, small, tmp_path)


def test_other_formats_are_used_as_they_are(small: Package, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.savez(
        tmp_path / "data" / "1.npz",
        x=np.zeros((20, 4), dtype=np.float32),
        cls=np.zeros(20, dtype=np.int64),
    )
    held = write_day(tmp_path / "held.arrow")
    config = config_of(
        tmp_path, data={"files": str(tmp_path / "data" / "*.npz")}, evaluation={"files": str(held)}
    )
    assert taken(config, small, tmp_path).rows == 20


def test_files_may_lie_at_urls(small: Package, tmp_path: Path) -> None:
    path = write_day(tmp_path / "1.arrow")
    fsspec.filesystem("memory").pipe("/stream/1.arrow", path.read_bytes())
    config = config_of(tmp_path, data={"files": "memory://stream/*.arrow"})
    first = taken(config, small, tmp_path)
    assert first.rows + first.held_out_rows == 40
    again = taken(config, small, tmp_path, had=[(file.name, file.identity) for file in first.files])
    assert again.empty
    fsspec.filesystem("memory").rm("/stream", recursive=True)


def test_values_are_told_of(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow", rows=400)
    statistics = taken(config_of(tmp_path), small, tmp_path).statistics
    assert (statistics["cls"].least, statistics["cls"].greatest, set(statistics["cls"].counts)) == (
        0.0,
        2.0,
        {"0", "1", "2"},
    )
    assert statistics["x"].count == 1600
    assert len(statistics["x"].percentiles) == 101


def test_columns_may_be_in_another_order_from_file_to_file(small: Package, tmp_path: Path) -> None:
    for number, order in enumerate((["x", "cls"], ["cls", "x"])):
        table = (
            pa.ipc.open_file(str(write_day(tmp_path / "made" / f"{number}.arrow", seed=number)))
            .read_all()
            .select(order)
        )
        nullable = [
            pa.field(field.name, field.type, nullable=bool(number)) for field in table.schema
        ]
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(table.cast(pa.schema(nullable)), tmp_path / "data" / f"{number}.parquet")
    config = config_of(tmp_path, data={"files": str(tmp_path / "data" / "*.parquet")})
    snapshot = taken(config, small, tmp_path)
    assert (snapshot.refused, snapshot.rows + snapshot.held_out_rows) == ("", 80)
    assert (
        len(rows_of(train_source(config, snapshot, tmp_path / "tick"), small, tmp_path)["cls"])
        == snapshot.rows
    )


@pytest.mark.parametrize("kind", ["dangling", "secret"])
def test_a_file_that_cannot_be_read_is_bad_and_new_when_it_can(
    small: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    path = write_day(tmp_path / "data" / "2.arrow", seed=2)
    with monkeypatch.context() as patch:
        if kind == "secret":
            patch.setattr(LocalFile, "opened", refusing(path))
            patch.setattr(
                LocalFile, "identity", lambda file, _: "" if file.path != path else raising()
            )
        else:
            path.unlink()
            path.symlink_to(tmp_path / "nowhere.arrow")
        config = config_of(tmp_path, data=data(tmp_path, bad="skip"))
        first = taken(config, small, tmp_path)
    assert [(Path(file.name).name, bool(file.problem)) for file in first.files] == [
        ("1.arrow", False),
        ("2.arrow", True),
    ]
    path.unlink()
    write_day(path, seed=2)
    again = taken(config, small, tmp_path, had=[(file.name, file.identity) for file in first.files])
    assert "2.arrow" in [Path(file.name).name for file in again.good]


def raising() -> str:
    raise PermissionError(13, "Permission denied")


def refusing(path: Path) -> Any:
    real = LocalFile.opened
    return lambda file: raising() if file.path == path else real(file)


def timed(tmp_path: Path, values: Any, times: Any) -> Config:
    """Return the config for a window of two days, and write 200 rows, one per hour until now."""
    path = write_day(tmp_path / "made" / "1.arrow", rows=200, x=values)
    (tmp_path / "data").mkdir()
    table = pa.ipc.open_file(str(path)).read_all().append_column("time", pa.array(times))
    pq.write_table(table, tmp_path / "data" / "1.parquet")
    window = {"kind": "column", "column": "time", "span": "2d"}
    return config_of(
        tmp_path,
        data={"files": str(tmp_path / "data" / "*.parquet"), "window": window, "inspect_rows": 30},
    )


HOURS = WHEN.timestamp() + np.arange(-199, 1) * 3600.0


def test_values_are_told_of_rows_in_the_window_alone(small: Package, tmp_path: Path) -> None:
    values = np.zeros((200, 4), dtype=np.float32)
    values[-49:] = 50.0
    statistics = taken(timed(tmp_path, values, HOURS), small, tmp_path).statistics["x"]
    assert (statistics.count, statistics.least, statistics.greatest) == (120, 50.0, 50.0)


def test_a_nan_outside_of_the_window_is_nobodys_business(small: Package, tmp_path: Path) -> None:
    values = np.zeros((200, 4), dtype=np.float32)
    values[3] = np.nan
    assert taken(timed(tmp_path, values, HOURS), small, tmp_path).refused == ""


def test_a_nan_in_it_is_told_by_its_row(small: Package, tmp_path: Path) -> None:
    values = np.zeros((200, 4), dtype=np.float32)
    values[160] = np.nan
    assert "the first is row 160" in taken(timed(tmp_path, values, HOURS), small, tmp_path).refused


def test_a_row_without_a_time_is_bad_data(small: Package, tmp_path: Path) -> None:
    times = [None if row == 5 else when for row, when in enumerate(HOURS)]
    snapshot = taken(timed(tmp_path, np.zeros((200, 4), dtype=np.float32), times), small, tmp_path)
    assert "the time column contains nulls" in snapshot.refused


def test_what_is_said_of_a_file_is_cut_where_a_record_ends(small: Package, tmp_path: Path) -> None:
    many: dict[str, Any] = {f"column_{'long' * 10}_{number}": np.zeros(40) for number in range(400)}
    write_day(tmp_path / "data" / "1.arrow", **many)
    snapshot = taken(config_of(tmp_path), small, tmp_path)
    assert Snapshot.model_validate_json(snapshot.model_dump_json()) == snapshot
    assert len(snapshot.refused) == 8192


def test_another_snapshot_of_a_tick_has_a_folder_of_its_own(small: Package, tmp_path: Path) -> None:
    write_day(tmp_path / "data" / "1.arrow")
    config = config_of(tmp_path)
    one = taken(config, small, tmp_path)
    first = Path(train_source(config, one, tmp_path / "tick"))
    before = first.read_bytes()
    write_day(tmp_path / "data" / "2.arrow", seed=2)
    two = taken(config, small, tmp_path)
    assert (
        Path(train_source(config, two, tmp_path / "tick")) != first,
        first.read_bytes() == before,
    ) == (True, True)


def test_rows_that_cannot_be_chosen_are_found_before_anything_runs(
    small: Package, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    np.savez(
        tmp_path / "data" / "1.npz",
        x=np.zeros((20, 4), dtype=np.float32),
        cls=np.zeros(20, dtype=np.int64),
    )
    config = config_of(tmp_path, data={"files": str(tmp_path / "data" / "*.npz")})
    with pytest.raises(RequestError, match="from files in certain formats"):
        newest(config, WHEN, small, 10)
