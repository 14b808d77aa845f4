"""A real MLflow server, with its records in SQLite.

The full package requires other versions than constraints.txt has, so it has an environment of its
own, which `make integrations` creates.
"""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.house.source import ROOT
from tests.ports import free_port
from tests.retraining.conftest import folder, lived, small, store, wider
from tests.waiting import wait_until

__all__ = ["folder", "lived", "small", "store", "wider"]

COMMAND = Path(os.environ.get("MLFLOW_COMMAND", ROOT / ".mlflow" / "bin" / "mlflow"))


@dataclass(frozen=True, slots=True)
class Server:
    """A server and its processes."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill it and its workers."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server at MLFLOW_TRACKING_URI."""
    if not COMMAND.exists():
        pytest.skip(f"there is no MLflow server at {COMMAND}: `make integrations` installs one")
    url = f"http://127.0.0.1:{(port := free_port())}"
    records = tmp_path / "mlflow-server"
    records.mkdir()
    options = ["--backend-store-uri", f"sqlite:///{records}/mlflow.db", "--workers", "1"]
    options += ["--artifacts-destination", str(records), "--host", "127.0.0.1", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (records / "log").open("wb") as log:
        process = subprocess.Popen(
            [COMMAND, "server", *options],
            env=environment,
            stdout=log,
            stderr=log,
            cwd=records,
            start_new_session=True,
        )
    running = Server(url, process)

    def check_running() -> None:
        assert process.poll() is None, (records / "log").read_text()[-2000:]

    try:
        wait_until(lambda: responds(url), meanwhile=check_running, every=0.2)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        yield running
    finally:
        if process.poll() is None:
            running.kill()
