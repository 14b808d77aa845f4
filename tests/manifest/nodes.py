"""Ray cluster whose nodes are started, and whose jobs are submitted, the way KubeRay does it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.launch.commands import kill_all
from tests.ports import free_port
from tests.waiting import wait_until


@dataclass
class Cluster:
    """A head without devices, and workers with one CPU each.

    The nodes run `ray start --block`, like the containers of KubeRay's pods.
    """

    folder: Path
    variables: dict[str, str]
    port: int = field(default_factory=free_port)
    dashboard: int = field(default_factory=free_port)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    own: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp")))
    """Ray's temporary folder. Its path is short because it contains sockets."""

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        ray = Path(sys.executable).with_name("ray")
        own = (
            "--node-ip-address",
            "127.0.0.1",
            "--object-store-memory",
            "80000000",
            "--disable-usage-stats",
            "--block",
        )
        ports = ("--dashboard-agent-listen-port", str(free_port()))
        with self.log(len(self.started)).open("wb") as log:
            command = [str(ray), "start", *options, *own, *ports]
            made_here = subprocess.Popen(
                command, env=self.variables, stdout=log, stderr=log, start_new_session=True
            )
        self.started.append(made_here)
        return made_here

    def log(self, number: int) -> Path:
        """Return the log file of the n-th started node (0-based)."""
        return self.folder / f"ray-{number}.log"

    def start_head(self) -> None:
        where = (
            "--port",
            str(self.port),
            "--dashboard-host",
            "127.0.0.1",
            "--dashboard-port",
            str(self.dashboard),
        )
        self.start("--head", "--num-cpus", "0", "--temp-dir", str(self.own), *where)
        self.until(lambda: self.asked("/api/version") and self.nodes(), 60)

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start a worker and wait until the head lists it.

        Nodes that start on one machine at the same time may use the same sockets.
        """
        before = self.nodes()
        made_here = self.start("--address", f"127.0.0.1:{self.port}", "--num-cpus", "1")

        def there() -> bool:
            assert made_here.poll() is None, (
                f"`ray start` ended: {self.log(self.started.index(made_here)).read_text()[-2000:]}"
            )
            return bool(self.nodes() - before)

        self.until(there, 90)
        return made_here

    def nodes(self) -> set[str]:
        """Return the ids of the nodes that are alive according to the dashboard."""
        nodes = [node["raylet"] for node in self.asked("/nodes?view=summary")["data"]["summary"]]
        return {node["nodeId"] for node in nodes if node["state"] == "ALIVE"}

    def asked(self, path: str, body: dict[str, Any] | None = None, *, token: bool = True) -> Any:
        """Return the response of the dashboard, or None if it does not respond yet."""
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {self.variables['RAY_AUTH_TOKEN']}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(
                Request(f"http://127.0.0.1:{self.dashboard}{path}", data, headers), timeout=30
            ) as answer:
                return json.load(answer)
        except HTTPError:
            raise
        except OSError:
            return None

    def submit(self, entrypoint: str, name: str) -> None:
        assert (
            self.asked("/api/jobs/", {"entrypoint": entrypoint, "submission_id": name})[
                "submission_id"
            ]
            == name
        )

    def ended(self, name: str, seconds: float) -> tuple[str, str]:
        """Wait for the end of a job. Returns its final status and its output."""
        over = ("SUCCEEDED", "FAILED", "STOPPED")

        def ended() -> dict[str, Any]:
            job: dict[str, Any] = self.asked(f"/api/jobs/{name}")
            return job if job["status"] in over else {}

        job = self.until(ended, seconds)
        return job["status"], self.asked(f"/api/jobs/{name}/logs")["logs"]

    @staticmethod
    def until(condition: Callable[[], Any], seconds: float) -> Any:
        """Wait for a condition that takes a request, or reads a run's journal, to evaluate."""
        return wait_until(condition, seconds, every=0.2)

    def close(self) -> None:
        """Kill every process that has the nodes' token.

        A worker that receives SIGTERM would wait for the work that runs on it first.
        """
        kill_all(f"RAY_AUTH_TOKEN={self.variables['RAY_AUTH_TOKEN']}")
        for process in self.started:
            process.wait()
        shutil.rmtree(self.own)


def variables(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of nodes with caches in a folder and a random token."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRAINLOAD_CACHE_DIR": str(folder / "cache"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        **more,
    }
