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
from pathlib import Path

import pytest
from tests.house.source import ROOT
from tests.ports import free_port
from tests.retraining.conftest import folder, lived, small, store, wider
from tests.waiting import wait_until

__all__ = ["folder", "lived", "small", "store", "wider"]

COMMAND = Path(os.environ.get("MLFLOW_COMMAND", ROOT / ".mlflow" / "bin" / "mlflow"))


class Server:
    """A server with its records in a folder, and its processes."""

    def __init__(self, records: Path) -> None:
        self._records, self._port = records, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start it, again at the same address if it was killed."""
        options = ["--backend-store-uri", f"sqlite:///{self._records}/mlflow.db", "--workers", "1"]
        options += ["--artifacts-destination", str(self._records)]
        options += ["--host", "127.0.0.1", "--port", str(self._port)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with (self._records / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [COMMAND, "server", *options],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=self._records,
                start_new_session=True,
            )
        wait_until(lambda: responds(self.url), meanwhile=self._check_running, every=0.2)

    def _check_running(self) -> None:
        assert self._process.poll() is None, (self._records / "log").read_text()[-2000:]

    def kill(self) -> None:
        """Kill it and its workers, if it is running."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


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
    records = tmp_path / "mlflow-server"
    records.mkdir()
    running = Server(records)
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", running.url)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        yield running
    finally:
        running.kill()
