"""A run whose data is named by a reference to a secret.

It trains, and nothing that it writes or prints contains the secret.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.launch.commands import TRAINLOAD, refused
from tests.launch.forked import done
from tests.launch.tiny import write_rows

from trainload.core import redaction
from trainload.launching.run.journal import Event, Journal, last_word
from trainload.launching.run.run_spec import read_spec
from trainload.packaging.package import Package

SECRET = "hunter2000"
REFERENCE = "${env:DATA_SECRET}"
STEPS = ("--steps", "3", "--checkpoint-every", "2", "--no-compile", "--backend", "local")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", {})


def command(folder: Path, *arguments: str | Path, **secrets: str) -> tuple[int, str, str]:
    """Run `trainload` in a folder with its own cache; return exit status, stdout and stderr."""
    return done(
        *arguments, cwd=folder, first=None, TRAINLOAD_CACHE_DIR=str(folder / "cache"), **secrets
    )


def holding(folder: Path, text: str) -> list[str]:
    """Return the paths below a folder whose names or contents contain a text."""
    return [
        str(path)
        for path in folder.rglob("*")
        if text in path.name or (path.is_file() and text.encode() in path.read_bytes())
    ]


@pytest.fixture(scope="module")
def trained(
    tiny: Package, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Folder of a run, and the output of its commands.

    Its data and held-out data are in a folder that is named like the secret.
    """
    folder, elsewhere = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("storage")
    (elsewhere / SECRET).mkdir()
    shutil.copy(tiny_data, elsewhere / SECRET / "train.npz")
    write_rows(elsewhere / SECRET / "held-out.npz", 21, seed=2)
    mixture = folder / "mixture.json"
    mixture.write_text(json.dumps({"parts": [{"data": f"{elsewhere}/{REFERENCE}/train.npz"}]}))
    told = (
        "--eval-data",
        f"{elsewhere}/{REFERENCE}/held-out.npz",
        "--run-dir",
        "run",
        "--output",
        "trained.tl",
        "--json",
    )
    first = command(
        folder, "launch", tiny.path, "--data", "mixture.json", *told, *STEPS, DATA_SECRET=SECRET
    )
    again = command(folder, "resume", "run", "--backend", "local", DATA_SECRET=SECRET)
    assert (first[0], again[0]) == (0, 0), first[2] + again[2]
    shutil.rmtree(elsewhere / SECRET)
    lost = command(folder, "resume", "run", "--backend", "local", DATA_SECRET=SECRET)
    assert lost[0] != 0
    assert REFERENCE in lost[2]
    printed = [command(folder, "status", "run"), command(folder, "logs", "run"), first, again, lost]
    return folder, "".join(out + err for _, out, err in printed)


def test_no_file_of_a_run_its_cache_or_what_it_made_has_the_secret(
    trained: tuple[Path, str],
) -> None:
    folder, _ = trained
    assert (folder / "trained.tl" / "manifest.json").exists()
    assert any((folder / "cache").rglob("*.npy"))
    assert holding(folder, SECRET) == []


def test_nothing_that_a_run_prints_has_the_secret(trained: tuple[Path, str]) -> None:
    _, printed = trained
    assert "trained.tl" in printed
    assert SECRET not in printed


def test_a_run_keeps_the_reference(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    eval_data = read_spec(folder / "run").eval_data
    assert eval_data is not None
    assert REFERENCE in eval_data


def test_a_reference_that_begins_a_path_is_no_relative_path(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    arguments = ("launch", tiny.path, "--data", "${env:DATA_PATH}", "--run-dir", "run", *STEPS)
    status, _, err = command(tmp_path, *arguments, DATA_PATH=str(tiny_data))
    assert status == 0, err
    assert read_spec(tmp_path / "run").data == "${env:DATA_PATH}"


def test_a_reference_to_nothing_is_said_at_once(
    tiny: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(
        [
            "launch",
            tiny.path,
            "--data",
            f"/rows/{REFERENCE}.npz",
            "--run-dir",
            tmp_path / "run",
            *STEPS,
        ],
        tmp_path,
        capsys,
    )
    assert (
        "${env:DATA_SECRET} names an environment variable that is not set here. Set DATA_SECRET"
        in line
    )


@pytest.mark.parametrize("option", ["--data", "--eval-data", "--output", "--run-dir"])
def test_credentials_in_a_url_are_refused_before_anything_is_written(
    option: str,
    tiny: Package,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "--data": str(tiny_data),
        "--run-dir": "run",
        option: f"s3://key:{SECRET}@bucket/rows.npz",
    }
    line = refused(
        ["launch", tiny.path, *(word for pair in given.items() for word in pair), *STEPS],
        tmp_path,
        capsys,
    )
    assert SECRET not in line
    assert "s3:/" in line
    assert "${env:NAME}" in line


def test_a_setting_that_there_is_not_is_not_repeated_with_its_password(
    tiny: Package, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(
        ["launch", tiny.path, "--data", tiny_data, "--set", f"tracking=http://me:{SECRET}@host/"],
        tmp_path,
        capsys,
    )
    assert SECRET not in line


def test_the_journal_has_no_credentials(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(
        "warning",
        message=f"no answer from https://me:{SECRET}@host/",
        doing={"0": f"https://me:{SECRET}@host/"},
    )
    journal.append([last_word(RuntimeError(f"https://me:{SECRET}@host/"))])
    assert holding(tmp_path, SECRET) == []


def test_an_event_is_told_without_credentials() -> None:
    assert Event("warning", {"message": f"https://me:{SECRET}@host/"}).data == {
        "message": "https://me:***@host/"
    }


@pytest.mark.slow
def test_a_tracking_server_that_is_away_is_named_without_its_password(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    server = {
        "MLFLOW_TRACKING_URI": f"http://me:{SECRET}@127.0.0.1:9",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    status, out, err = command(
        tmp_path,
        "launch",
        tiny.path,
        "--data",
        tiny_data,
        "--run-dir",
        "run",
        "--set",
        "sinks=mlflow",
        *STEPS,
        **server,
    )
    assert status == 2
    assert "MLflow did not accept the run" in err
    assert SECRET not in out + err
    assert holding(tmp_path, SECRET) == []


def test_an_error_that_nobody_expected_is_printed_without_secrets(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        f"raise ZeroDivisionError('http://me:{SECRET}@host/'.replace('hunter', 'rabbit'))\n"
    )
    # a new interpreter, whose own excepthook prints the error
    freeze = [*TRAINLOAD, "freeze", "job.py:job", "-o", "out.tl"]
    said = subprocess.run(
        freeze, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    ).stderr
    assert "http://me:***@host/" in said
    assert "rabbit2000" not in said
