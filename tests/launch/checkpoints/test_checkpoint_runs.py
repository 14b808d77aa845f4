"""Runs with checkpoints outside their folder train, finish, stop and resume as usual."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.launch.checkpoint_places import Kept, use, wire_to
from tests.packaging.places import BUCKET

import trainload
from trainload.cli import main as cli
from trainload.core.errors import RunInterrupted, StorageError
from trainload.launching.checkpoints.index import CHECKPOINTS
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.run.result import RunResult
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_spec import read_spec, write_spec
from trainload.packaging.package import Package

pytestmark = pytest.mark.slow

STEPS = 6
Capture = pytest.CaptureFixture[str]


def launch(package: Package, data: Path, run_dir: Path, **options: Any) -> RunResult:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    usual: dict[str, Any] = {
        "steps": STEPS,
        "checkpoint_every": 2,
        "compile": False,
        "backend": "local",
        "output": run_dir.with_suffix(".tl"),
    }
    return trainload.launch(package, plan, data, run_dir=run_dir, **usual | options)


@pytest.fixture(scope="module")
def usual(gpt: Package, gpt_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Run with its checkpoints in its own folder."""
    return launch(gpt, gpt_data, tmp_path_factory.mktemp("usual") / "run")


def test_a_run_comes_to_the_same_wherever_its_checkpoints_lie(
    gpt: Package, gpt_data: Path, usual: RunResult, kept: Kept, tmp_path: Path
) -> None:
    result = launch(gpt, gpt_data, tmp_path / "run", checkpoints=kept.url)
    assert result.output_digest == usual.output_digest
    assert losses(read_events(Path(result.run_dir))) == losses(read_events(Path(usual.run_dir)))
    assert not (tmp_path / "run" / CHECKPOINTS).exists()
    assert list(kept.place.published()) == [4, 6]
    assert str(result.checkpoint) == str(kept.place.published()[6])


def test_a_run_that_was_stopped_goes_on_from_there(
    gpt: Package, gpt_data: Path, usual: RunResult, kept: Kept, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    def stop(event: Event) -> None:
        if event.kind == "step" and event.data["step"] == 2:
            (run_dir / Request.STOP.file).touch()

    with pytest.raises(RunInterrupted):
        launch(
            gpt,
            gpt_data,
            run_dir,
            checkpoints=kept.url,
            steps=200,
            checkpoint_every=1,
            on_event=stop,
        )
    (stopped,) = list(kept.place.published())[-1:]
    spec = read_spec(run_dir)
    (run_dir / RUN_FILE).unlink()
    write_spec(spec.model_copy(update={"steps": stopped + 2}))  # so that it ends soon
    trainload.resume(run_dir, backend="local")
    starts = [event.data["step"] for event in read_events(run_dir) if event.kind == "start"]
    assert starts == [0, stopped]
    again = losses(read_events(run_dir))
    assert again[:STEPS] == losses(read_events(Path(usual.run_dir)))[: len(again[:STEPS])]


def test_a_newest_checkpoint_that_is_damaged_gives_way_and_the_run_says_so(
    gpt: Package, gpt_data: Path, usual: RunResult, kept: Kept, tmp_path: Path
) -> None:
    result = launch(gpt, gpt_data, tmp_path / "run", checkpoints=kept.url, output=None)
    shard = next(
        path
        for path in kept.files()
        if path.startswith("step-00000006/") and path.endswith(".safetensors")
    )
    kept.write(shard, kept.read(shard)[:-1] + b"\xff")
    again = trainload.resume(tmp_path / "run", backend="local")
    said = [
        event.data["message"]
        for event in read_events(Path(result.run_dir))
        if event.kind == "warning"
    ]
    assert len(said) == 1
    assert "a checkpoint cannot be used" in said[0]
    assert "step-00000006" in said[0]
    assert [
        event.data["step"] for event in read_events(Path(result.run_dir)) if event.kind == "start"
    ] == [0, 4]
    assert again.last_loss == usual.last_loss


def test_a_place_with_checkpoints_is_not_taken_for_a_new_run(
    gpt: Package, gpt_data: Path, kept: Kept, tmp_path: Path
) -> None:
    launch(gpt, gpt_data, tmp_path / "run", checkpoints=kept.url)
    with pytest.raises(StorageError, match="checkpoints already exist here"):
        launch(gpt, gpt_data, tmp_path / "other", checkpoints=kept.url)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(
    "where", [f"s3://no-such-{BUCKET}/run", "nosuch://bucket/run", "oci://host/name:tag"]
)
def test_a_url_that_cannot_be_written_is_told_before_anything_starts(
    s3: str, gpt: Package, gpt_data: Path, tmp_path: Path, capsys: Capture, where: str, dry: bool
) -> None:
    arguments = [
        "launch",
        str(gpt.path),
        "--data",
        str(gpt_data),
        "--run-dir",
        str(tmp_path / "run"),
        "--backend",
        "local",
    ]
    assert (
        cli.run([*arguments, "--set", f"checkpoints={where}", *(["--dry-run"] if dry else [])]) == 2
    )
    assert where in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_away_is_told_before_anything_starts(
    s3: str, gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    with wire_to(s3) as wire:
        wire.refuse = True
        with pytest.raises(
            StorageError, match=r"stored here \(expected to list the files, got .*cannot be reached"
        ):
            launch(gpt, gpt_data, tmp_path / "run", checkpoints=f"s3://{BUCKET}/away")


def test_a_file_where_the_folder_of_checkpoints_should_be_is_told(
    gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match=r"file/kept: the folder of the checkpoints cannot be written"
    ):
        launch(gpt, gpt_data, tmp_path / "run", checkpoints=tmp_path / "file" / "kept")


def test_a_relative_folder_is_meant_from_here(
    gpt: Package, gpt_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launch(gpt, gpt_data, tmp_path / "run", checkpoints="kept")
    assert read_spec(tmp_path / "run").checkpoints == str(tmp_path / "kept")


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--run-dir", "/proc/run"],
            "/proc/run: the run's folder cannot be written (expected to create a file in /proc",
        ),
        (
            ["--set", "checkpoints=/proc/kept"],
            "/proc/kept: the folder of the checkpoints cannot be written (expected to create",
        ),
        (
            ["--output", "/proc/out.tl"],
            (
                "/proc: the trained package cannot be written there (expected to create a file in"
                " /proc"
            ),
        ),
        (["--output", "/nowhere/out.tl"], "/nowhere: there is no such folder"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_starts_whoever_asks(
    gpt: Package,
    gpt_data: Path,
    tmp_path: Path,
    capsys: Capture,
    options: list[str],
    line: str,
    dry: bool,
) -> None:
    """Use /proc, where no file can be created: permissions do not stop root."""
    arguments = [
        "launch",
        str(gpt.path),
        "--data",
        str(gpt_data),
        "--run-dir",
        str(tmp_path / "run"),
        "--backend",
        "local",
        *options,
    ]
    assert cli.run([*arguments, *(["--dry-run"] if dry else [])]) == 2
    assert line in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


class Refusing(BaseHTTPRequestHandler):
    """S3 server whose objects can be listed, but neither written nor removed."""

    protocol_version = "HTTP/1.1"  # clients that send `Expect: 100-continue` wait for a response

    def do_GET(self) -> None:
        self._answer(
            200,
            "<ListBucketResult"
            ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>false</IsTruncated></ListBucketResult>',
        )

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(
            403,
            "<Error><Code>AccessDenied</Code><Message>User may not s3:PutObject</Message></Error>",
        )

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def test_a_store_that_may_not_be_written_is_told_with_its_own_words(
    s3: str, gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        use(f"http://127.0.0.1:{server.server_port}")
        try:
            with pytest.raises(StorageError) as caught:
                launch(gpt, gpt_data, tmp_path / "run", checkpoints="s3://readable/kept")
        finally:
            use(s3)
            server.shutdown()
            thread.join()
    assert "s3://readable/kept: checkpoints cannot be stored here (expected to write probe-" in str(
        caught.value
    )
    assert "the store denied access: User may not s3:PutObject" in str(caught.value)
    assert not (tmp_path / "run").exists()
