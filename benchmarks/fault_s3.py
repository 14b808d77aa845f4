"""Fault injection for runs whose package, data and records are in S3, on nodes that share nothing.

The server is moto's. The cluster reaches it through a proxy, which fails on demand; the one who
watches the run does not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fault_cluster import Fault, Nodes, Run, corrupt_checkpoint, kill
from measure import ROOT

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.launch.checkpoint_places import Wire, use
from tests.packaging.places import BUCKET, KEYS, s3_server

from trainload.core.storage.open_files import open_files
from trainload.launching.run.working_copy import working_copy

_SECONDS = 60.0


@dataclass
class RunAtUrl(Run):
    """A run in S3, and the proxy through which its cluster reaches that."""

    wire: Wire | None = None


@contextmanager
def run_in_s3(package: Path, rows: Path, scratch: Path, nodes: int) -> Iterator[RunAtUrl]:
    """Yield a run that can be launched with the package at `URL.tl`.

    Args:
        package: the package.
        rows: its data.
        scratch: folder for the caches.
        nodes: number of nodes.
    """
    os.environ.update(KEYS)
    os.environ["TRAINLOAD_CACHE_DIR"] = str(scratch / "watching")
    with s3_server() as server:
        wire = Wire(server)
        url = f"s3://{BUCKET}/runs/first"
        use(wire.url)
        cluster = Nodes(nodes, scratch)
        use(server)
        try:
            files = open_files(f"s3://{BUCKET}")
            files.replace("rows.npz", rows.read_bytes())
            for path in sorted(package.rglob("*")):
                if path.is_file():
                    files.replace(f"runs/first.tl/{path.relative_to(package)}", path.read_bytes())
            variables = {
                "AWS_ENDPOINT_URL": wire.url,
                "TRAINLOAD_CACHE_DIR": str(scratch / "driving"),
            }
            with working_copy(url) as folder:
                data = f"s3://{BUCKET}/rows.npz"
                yield RunAtUrl(folder, data, cluster, url, variables, wire=wire)
        finally:
            cluster.close()
            wire.close()


def wire_of(run: Run) -> Wire:
    """Return the proxy of a run in S3."""
    assert isinstance(run, RunAtUrl)
    assert run.wire is not None
    return run.wire


def cut_off(run: Run) -> None:
    """Refuse all connections for a minute."""
    wire = wire_of(run)
    run.at = time.time()
    wire.refuse = True
    wire.cut()
    time.sleep(_SECONDS)
    wire.refuse = False
    run.cleared = time.time()


def silence(run: Run) -> None:
    """Respond to nothing for a minute."""
    wire = wire_of(run)
    run.at = time.time()
    wire.silent = True
    time.sleep(_SECONDS)
    wire.silent = False
    wire.cut()
    run.cleared = time.time()


def deny(run: Run) -> None:
    """Deny all writes for a minute."""
    wire = wire_of(run)
    run.at = time.time()
    wire.denied = frozenset({b"PUT", b"POST"})
    time.sleep(_SECONDS)
    wire.denied = frozenset()
    run.cleared = time.time()


def replace_driver(run: Run) -> None:
    """Kill the driver with its supervisor, and resume the run with another cache."""
    run.at = time.time()
    driver = run.driver()
    os.kill(run.keeper, signal.SIGKILL)
    os.kill(driver, signal.SIGKILL)
    run.join()
    run.variables = {
        **run.variables,
        "TRAINLOAD_CACHE_DIR": f"{run.variables['TRAINLOAD_CACHE_DIR']}-elsewhere",
    }
    run.resume()


FAULTS_IN_S3 = (
    Fault("S3: worker killed", kill, at_url=True),
    Fault("S3: no connections for 60 s", cut_off, said="warning", at_url=True),
    Fault("S3: no responses for 60 s", silence, said="warning", at_url=True),
    Fault("S3: no permission to write for 60 s", deny, said="warning", at_url=True),
    Fault("S3: driver lost, resumed elsewhere", replace_driver, said="driver", at_url=True),
    Fault("S3: newest checkpoint changed, worker killed", corrupt_checkpoint, at_url=True),
)
