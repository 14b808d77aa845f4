"""Data from functions that return rows.

The launching process calls them once; the rows are stored in the run's folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainload
from trainload.cli import main as cli
from trainload.core.errors import DataError, PlanError, StorageError
from trainload.launching.data.made_data import in_files
from trainload.launching.run.journal import losses, read_events
from trainload.launching.run.run_spec import read_spec
from trainload.packaging.package import Package

STEPS = 4
SOURCE = """
import numpy as np

def rows(path={path!r}):
    print("called")
    with np.load(path) as found:
        for part in np.array_split(found["tokens"], 7):
            yield {{"tokens": part}}

def whole(path):
    with np.load(path) as found:
        return dict(found)

def half(part, token="none"):
    assert token in ("none", "secret-of-mine")
    with np.load({path!r}) as found:
        yield {{"tokens": found["tokens"][:45] if part == "first" else found["tokens"][45:]}}

def fails():
    yield {{"tokens": np.zeros((2, 3), np.uint8)}}
    raise KeyError("the database is gone")

def nothing():
    return []

def number():
    return 7

thing = 3
"""


@pytest.fixture
def source(tmp_path: Path, tiny_data: Path) -> Path:
    path = tmp_path / "my_rows.py"
    path.write_text(SOURCE.format(path=str(tiny_data)))
    return path


def run(package: Package, data: Any, run_dir: Path, **options: Any) -> list[float]:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(
        package,
        plan,
        data,
        run_dir=run_dir,
        **{"steps": STEPS, "compile": False, "backend": "local", **options},
    )
    return losses(read_events(run_dir))


@pytest.fixture(scope="module")
def expected(
    tiny: Package, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    return run(tiny, tiny_data, tmp_path_factory.mktemp("expected") / "run")


def test_a_function_that_is_named_gives_the_rows_of_a_run(
    tiny: Package,
    source: Path,
    expected: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tiny, f"python:{source}:rows", tmp_path / "run") == expected
    assert capsys.readouterr().out.count("called") == 1
    spec = read_spec(tmp_path / "run")
    assert spec.made == {"data": f"python:{source}:rows"}
    assert Path(spec.data) == tmp_path / "run" / "data" / "train.arrow"


@pytest.mark.slow
def test_a_function_gets_its_arguments_as_texts(
    tiny: Package, source: Path, tiny_data: Path, expected: list[float], tmp_path: Path
) -> None:
    assert run(tiny, f"python:{source}:whole?path={tiny_data}", tmp_path / "run") == expected


def test_a_function_that_is_passed_gives_the_rows_of_a_run(
    tiny: Package, tiny_data: Path, expected: list[float], tmp_path: Path
) -> None:
    def rows() -> Iterator[pa.Table]:
        tokens = np.load(tiny_data)["tokens"]
        for part in np.array_split(tokens, 3):
            flat = pa.array(part.reshape(-1))
            yield pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, tokens.shape[1])})

    assert run(tiny, rows, tmp_path / "run") == expected
    assert read_spec(tmp_path / "run").made["data"].endswith("rows")


def test_held_out_data_is_made_too(
    tiny: Package, source: Path, tiny_data: Path, tmp_path: Path
) -> None:
    run(
        tiny,
        tiny_data,
        tmp_path / "run",
        eval_data=f"python:{source}:half?part=first",
        eval_batches=2,
    )
    spec = read_spec(tmp_path / "run")
    assert spec.made.keys() == {"eval_data"}
    assert Path(str(spec.eval_data)).name == "eval.arrow"
    assert any(event.kind == "eval" for event in read_events(tmp_path / "run"))


def test_an_argument_may_refer_to_a_secret(
    tiny: Package, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret-of-mine")
    run(tiny, f"python:{source}:half?part=second&token=${{env:MY_TOKEN}}", tmp_path / "run")
    assert "secret-of-mine" not in "".join(
        path.read_text() for path in (tmp_path / "run").glob("*.json*")
    )


def test_a_run_that_was_moved_goes_on_with_its_own_rows(
    tiny: Package, source: Path, expected: list[float], tmp_path: Path
) -> None:
    run(tiny, f"python:{source}:rows", tmp_path / "run", checkpoint_every=2)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoints" / f"step-{STEPS:08}")
    source.unlink()
    trainload.resume(tmp_path / "moved", backend="local")
    starts = [
        event.data["step"] for event in read_events(tmp_path / "moved") if event.kind == "start"
    ]
    assert starts == [0, 2]
    assert losses(read_events(tmp_path / "moved")) == expected


def test_the_command_takes_a_function(
    source: Path, tiny: Package, expected: list[float], tmp_path: Path
) -> None:
    options = [
        "--run-dir",
        tmp_path / "run",
        "--steps",
        STEPS,
        "--no-compile",
        "--backend",
        "local",
    ]
    assert (
        cli.run(
            [
                str(part)
                for part in ("launch", tiny.path, "--data", f"python:{source}:rows", *options)
            ]
        )
        == 0
    )
    assert losses(read_events(tmp_path / "run")) == expected


def test_a_dry_run_makes_the_data_and_leaves_nothing(
    tiny: Package, source: Path, tiny_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    report = trainload.dry_run(
        tiny,
        plan,
        f"python:{source}:rows",
        run_dir=tmp_path / "runs" / "a",
        steps=STEPS,
        compile=False,
        backend="local",
    )
    assert report.rows == len(np.load(tiny_data)["tokens"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("rows", "this does not name a function"),
        ("nowhere.py:rows", "there is no such file"),
        ("{source}:absent", "there is no function 'absent'"),
        ("{source}:thing", "there is no function 'thing'"),
        ("{source}:half", "missing a required argument: 'part'"),
        ("{source}:rows?size=3", "unexpected keyword argument 'size'"),
        ("{source}:half?part=a&part=b", "an argument is given twice"),
        ("{source}:half?part", "does not take these arguments"),
        ("{source}:fails", r"KeyError: 'the database is gone'.*"),
        ("{source}:nothing", "there are no rows"),
        ("{source}:number", r"does not return rows.*got int"),
    ],
)
def test_what_gives_no_rows_says_why_and_leaves_nothing(
    tiny: Package, source: Path, tmp_path: Path, reference: str, told: str
) -> None:
    with pytest.raises(DataError, match=told):
        run(tiny, "python:" + reference.format(source=source), tmp_path / "runs" / "a")
    assert not (tmp_path / "runs").exists()


def test_an_error_in_a_function_names_its_line(tiny: Package, source: Path, tmp_path: Path) -> None:
    line = SOURCE.splitlines().index('    raise KeyError("the database is gone")') + 1
    with pytest.raises(DataError) as caught:
        run(tiny, f"python:{source}:fails", tmp_path / "run")
    assert f"{source}:{line}" in str(caught.value)


def test_rows_that_do_not_fit_leave_nothing(tiny: Package, source: Path, tmp_path: Path) -> None:
    def rows() -> dict[str, Any]:
        return {"tokens": np.zeros((4, 3), np.float32)}

    with pytest.raises(DataError, match=r"train\.arrow, column 'tokens'"):
        run(tiny, rows, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_taken_is_said_before_the_function_is_called(
    tiny: Package, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(StorageError, match="a run already exists here"):
        run(tiny, f"python:{source}:rows", tmp_path / "run")
    assert "called" not in capsys.readouterr().out


def test_files_in_the_runs_folder_that_others_put_there_stay(
    tiny: Package, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(DataError):
        run(tiny, f"python:{source}:nothing", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_something_else_is_no_data(tiny: Package, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"this is not a data source .* got dict"):
        run(tiny, {"tokens": np.zeros((4, 3), np.uint8)}, tmp_path / "run")


def test_one_of_torchruns_processes_cannot_make_the_data(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"torchrun starts one per rank.*write_rows"):
        in_files(f"python:{source}:rows", None, tmp_path / "run", alone=False)


def test_a_plan_of_another_package_is_said_before_the_function_is_called(
    tiny: Package,
    packaged: Package,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = trainload.plan(packaged, trainload.Cluster(), "single")
    with pytest.raises(PlanError):
        trainload.launch(
            tiny, plan, f"python:{source}:rows", run_dir=tmp_path / "runs" / "a", backend="local"
        )
    assert "called" not in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
