"""A registry server for the tests: Debian's docker-registry, on loopback.

Its files are in a folder of the test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
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
    """Return the program that `make env` has unpacked, or that is installed."""
    unpacked = Path(sys.prefix) / "registry/usr/bin/docker-registry"
    return str(unpacked) if unpacked.is_file() else shutil.which("docker-registry")


@contextmanager
def registry_server(folder: Path) -> Iterator[str]:
    """Start an empty registry, and yield its HOST:PORT."""
    program = binary()
    if program is None:
        pytest.skip("there is no docker-registry: make env fetches it from Debian, where it can")
    (folder / "config.yml").write_text(_CONFIG % (folder / "files"))
    environment = {**os.environ, "OTEL_TRACES_EXPORTER": "none"}
    log = folder / "log"
    with log.open("w") as output:
        # so that it always ends with this process
        guarded = ["setpriv", "--pdeathsig", "KILL"]
        command = [*guarded, program, "serve", str(folder / "config.yml")]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        while (listening := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())) is None:
            assert process.poll() is None, f"the registry did not start: {log.read_text()}"
            time.sleep(0.02)
        yield listening[1]
    finally:
        process.kill()
        process.wait(timeout=20)
