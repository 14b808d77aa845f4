"""A registry server for the tests: Debian's docker-registry, on loopback, with its files in a folder of the test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CONFIG = """\
version: 0.1
log: {level: info, formatter: text}
storage:
  filesystem: {rootdirectory: %s}
  delete: {enabled: true}
http: {addr: "127.0.0.1:0"}
"""


def binary() -> str | None:
    """Where `make env` has unpacked it, or where it is installed."""
    unpacked = Path(sys.prefix) / "registry/usr/bin/docker-registry"
    return str(unpacked) if unpacked.is_file() else shutil.which("docker-registry")


@contextmanager
def registry_server(folder: Path) -> Iterator[str]:
    """HOST:PORT of an empty registry."""
    program = binary()
    if program is None:
        pytest.skip("there is no docker-registry: make env fetches it from Debian, where it can")
    (folder / "config.yml").write_text(_CONFIG % (folder / "files"))
    environment = {**os.environ, "OTEL_TRACES_EXPORTER": "none"}
    process = subprocess.Popen(
        [program, "serve", str(folder / "config.yml")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            listening = re.search(r"listening on (127\.0\.0\.1:\d+)", line)
            if listening is not None:
                break
        else:
            pytest.fail(f"the registry did not start: {''.join(said)}")
        # what it says from now on goes to nobody, and must not fill the pipe
        with subprocess.Popen([sys.executable, "-c", "import sys\nfor _ in sys.stdin: pass"], stdin=process.stdout):
            process.stdout.close()
            yield listening[1]
            process.terminate()
            process.wait(timeout=20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=20)
