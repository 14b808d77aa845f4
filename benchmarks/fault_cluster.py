"""Fault injection for `trainload launch --address` runs on a local Ray cluster of several nodes.

Every node is a separate raylet (`ray.cluster_utils.Cluster`) with one worker. The run's driver is a
process, as in production.
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from faults_op import BROKEN, SLOW, STUCK, SWITCHES
from measure import ROOT, note
from network_nodes import NetworkNodes, Weather

if TYPE_CHECKING:
    from trainload.launching.run.journal import Event

HERE = Path(__file__).resolve().parent
HANG_TIMEOUT = 10.0
PATIENCE = 240.0
"""Timeout in seconds for the conditions that a fault waits for."""
LIBRARY = "faults=faults_op"
_SLOWER = "warning: rank 1 ("
_TOLD = frozenset({"failure", "warning", "waiting", "preemption", "resize", "start", "failed"})


class Nodes:
    """Local Ray cluster to which nodes can be added and from which they can be removed.

    The head has no worker. Nodes must be added by the main thread.

    Args:
        count: number of nodes.
        caches: folder for a cache of each node; None if they share one.
    """

    def __init__(self, count: int, caches: Path | None = None) -> None:
        self._caches = caches
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self._port = one.getsockname()[1]
        self._start(count)

    def _start(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        logging.getLogger("ray").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings raised inside Ray
            head = {"num_cpus": 0, "include_dashboard": False, "gcs_server_port": self._port}
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
            self._nodes: dict[str, Any] = {}
            for _ in range(count):
                self.add()

    @property
    def address(self) -> str:
        """Return the address of the cluster."""
        return str(self._cluster.address)

    def add(self) -> None:
        """Add a node."""
        variables = {}
        if self._caches is not None:
            cache = self._caches / f"node-{secrets.token_hex(4)}"
            variables["TRAINLOAD_CACHE_DIR"] = str(cache)
        node = self._cluster.add_node(num_cpus=1, env_vars=variables)
        self._nodes[node.node_id] = node

    def remove(self, node_id: str) -> None:
        """Remove a node without warning, as in a power failure."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def drain(self, node_id: str, seconds: float) -> None:
        """Send the preemption notice that a cloud provider sends before it takes a machine back."""
        subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
                *("--address", self.address, "--node-id", node_id),
                *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "preempted"),
                *("--deadline-remaining-seconds", str(round(seconds))),
            ],
            check=True,
            capture_output=True,
        )

    def restart(self, seconds: float) -> None:
        """Shut the cluster down and restart it at the same address with as many nodes."""
        count = len(self._nodes)
        self._cluster.shutdown()
        time.sleep(seconds)
        self._start(count)

    def close(self) -> None:
        self._cluster.shutdown()


@dataclass
class Run:
    """A run and its observed events.

    Attributes:
        folder: its folder, or the working copy of the one who watches it.
        url: its URL; None if it is in a folder.
        variables: environment variables of its driver.
        at: time of the fault, in seconds since 1970.
        cleared: end of the fault, if it is temporary.
        destroyed: checkpoints that were deliberately corrupted.
        lines: output lines of the driver, with their time.
    """

    folder: Path
    data: Path | str
    nodes: Nodes | NetworkNodes
    url: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    at: float = 0.0
    cleared: float = 0.0
    destroyed: set[int] = field(default_factory=set)
    quiet: bool = False
    _process: subprocess.Popen[str] | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def launch(self, package: Path | str, *options: str) -> None:
        """Start the run."""
        self._drive(
            "launch",
            str(package),
            "--data",
            str(self.data),
            "--run-dir",
            self.url or str(self.folder),
            "--no-compile",
            "--strategy",
            "zero3",
            *options,
        )

    def resume(self) -> None:
        """Resume the run after its driver has ended."""
        self._drive("resume", self.url or str(self.folder))

    def _drive(self, *arguments: str) -> None:
        from trainload.core.errors import StorageError
        from trainload.launching.run.journal import Follower
        from trainload.launching.run.working_copy import RunFiles

        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "trainload",
            "--library",
            LIBRARY,
            *arguments,
            "--address",
            self.nodes.address,
        ]
        self._process = process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, **self.variables},
        )

        def listen() -> None:
            assert process.stderr is not None
            self.lines.extend((time.time(), line.rstrip()) for line in process.stderr)

        follower = Follower(self.folder, from_end=True)
        files = RunFiles(self.folder)

        def follow() -> None:
            while True:
                over = process.poll() is not None
                with suppress(OSError, StorageError):  # while the run's storage fails
                    files.update()
                    for event in follower.new():
                        self._hear(event)
                if over:
                    return
                time.sleep(0.02)

        self._threads = [threading.Thread(target=each, daemon=True) for each in (listen, follow)]
        for thread in self._threads:
            thread.start()

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        if not self.quiet and event.kind in _TOLD:
            since = f"{event.time - self.at:6.1f} s" if self.at else "   before"
            note(f"  {since}  {event.kind}: {event.data.get('message', event.data.get('step'))}")
            for rank, text in event.data.get("doing", {}).items():
                note(f"            rank {rank}: {text}")

    @property
    def over(self) -> bool:
        """Return True if the driver has ended."""
        return self._process is not None and self._process.poll() is not None

    def join(self) -> int:
        """Wait for the driver to end and return its exit status."""
        assert self._process is not None
        status = self._process.wait()
        for thread in self._threads:
            thread.join()
        return status

    def end(self) -> None:
        """Terminate the driver, if it is still running, and everything that it started."""
        if self._process is not None and not self.over:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, ready: Callable[[], Any]) -> Any:
        """Wait until `ready` returns a true value, and return that value."""
        until = time.monotonic() + PATIENCE
        while not (found := ready()):
            if time.monotonic() > until or self.over:
                said = "\n".join(text for _, text in self.lines[-20:])
                raise TimeoutError(
                    f"what the fault waits for did not happen; the driver said:\n{said}"
                )
            time.sleep(0.02)
        return found

    def last(self, kind: str, since: float = 0.0) -> Event | None:
        """Return the last event of a kind."""
        return next(
            (event for event in reversed(self.events) if event.kind == kind and event.time > since),
            None,
        )

    def reach(self, step: int) -> None:
        """Wait until a step is complete."""
        self.wait(
            lambda: (found := self.last("step")) is not None and int(found.data["step"]) >= step
        )

    def started(self) -> Event:
        """Return the start event of the current attempt."""
        found = self.last("start")
        assert found is not None
        return found

    def pid(self, rank: int) -> int:
        """Return the pid of a worker."""
        return int(self.started().data["workers"][rank].rpartition(":")[2])

    def node(self, rank: int) -> str:
        """Return the id of a worker's node."""
        return str(self.started().data["nodes"][rank])

    @property
    def keeper(self) -> int:
        """Return the pid of the process that was launched."""
        assert self._process is not None
        return self._process.pid

    def driver(self) -> int:
        """Return the pid of the current driver, a child of the process that was launched."""
        from trainload.launching.run.run_state import read_state

        state = read_state(self.folder)
        assert state is not None
        return state.pid

    def heard(self, text: str) -> float | None:
        """Return the time when the driver first printed a text after the fault."""
        return next((at for at, line in self.lines if at > self.at and text in line), None)


@dataclass(frozen=True)
class Fault:
    """A fault to inject into a run.

    Attributes:
        act: injects the fault.
        nodes: number of nodes at the start.
        said: kind of the event that reports the fault, and after ": " the beginning of its message
            if others are of that kind; or, in double quotes, a text that the process that was
            launched prints.
        disk: size in MiB of a separate disk for the run; None: no separate disk.
        sizes: allowed numbers of nodes, as for --nodes.
        resumed: True if the run fails and is resumed manually.
        networked: True if the nodes have interfaces of their own.
        at_url: True if package, data and run are in S3, and the nodes share no folder.
    """

    name: str
    act: Callable[[Run], None]
    nodes: int = 2
    said: str = "failure"
    disk: int | None = None
    sizes: str = "2"
    resumed: bool = False
    networked: bool = False
    at_url: bool = False


def kill(run: Run) -> None:
    run.at = time.time()
    os.kill(run.pid(1), signal.SIGKILL)


def stop(run: Run) -> None:
    run.at = time.time()
    os.kill(run.pid(1), signal.SIGSTOP)


def stick(run: Run) -> None:
    run.at = time.time()
    Path(os.environ[STUCK]).write_text(str(run.pid(1)))


def slow_down(run: Run) -> None:
    """Make a rank slow until that is reported."""
    run.at = time.time()
    slow = Path(os.environ[SLOW])
    slow.write_text(str(run.pid(1)))
    run.wait(lambda: time_said(run, _SLOWER))
    slow.unlink()
    run.cleared = time.time()


def partition(run: Run, seconds: float = 20.0) -> None:
    """Take a node's interface down for a while."""
    assert isinstance(run.nodes, NetworkNodes)
    interface = run.nodes.interface_of(run.node(1))
    run.at = time.time()
    with run.nodes.cut(interface):
        time.sleep(seconds)
    run.cleared = time.time()


def worsen_network(run: Run) -> None:
    """Delay the control plane of a node by 200 ms, and lose 2 % of it, until the run has ended; a
    worker is killed meanwhile.
    """
    assert isinstance(run.nodes, NetworkNodes)
    weather = Weather(run.nodes.interface_of(run.node(1)), delay=0.2, loss=0.02)
    try:
        time.sleep(10.0)
        run.at = time.time()
        os.kill(run.pid(1), signal.SIGKILL)
        run.join()
        assert weather.dropped > 0, f"{weather.forwarded} frames, none dropped"
    finally:
        weather.close()


def lose_node(run: Run) -> None:
    run.at = time.time()
    run.nodes.remove(run.node(1))


def lose_node_for_a_while(run: Run) -> None:
    lose_node(run)
    run.wait(lambda: run.last("waiting", run.at))
    time.sleep(5.0)
    run.cleared = time.time()
    run.nodes.add()


def shrink_and_grow(run: Run) -> None:
    """Remove a node, and add another one once the run has continued without it."""
    lose_node(run)
    run.wait(lambda: (start := run.last("start", run.at)) is not None and start.data["world"] == 1)
    reached = run.last("step", run.at)
    run.wait(lambda: run.last("step", run.at) is not reached)
    run.cleared = time.time()
    run.nodes.add()


def gain(run: Run) -> None:
    run.at = time.time()
    run.nodes.add()


def preempt(run: Run) -> None:
    run.at = time.time()
    node = run.node(1)
    run.nodes.drain(node, 30.0)
    run.wait(lambda: run.last("start", run.at))
    run.nodes.remove(node)


def preempt_before_another_comes(run: Run) -> None:
    """Send a preemption notice while there is no spare node, and add a node a few seconds later."""
    run.at = time.time()
    node = run.node(1)
    run.nodes.drain(node, 60.0)
    run.wait(lambda: run.last("preemption", run.at))
    time.sleep(5.0)
    run.cleared = time.time()
    run.nodes.add()
    run.wait(lambda: run.last("start", run.at))
    run.nodes.remove(node)


def fail_storage(run: Run, seconds: float = 60.0) -> None:
    """Make the run's storage read-only for a minute."""
    run.at = time.time()
    while subprocess.run(
        ["mount", "-o", "remount,ro", str(run.folder.parent)], capture_output=True, check=False
    ).returncode:
        time.sleep(0.005)  # fails while a file is open for writing
    time.sleep(seconds)
    subprocess.run(["mount", "-o", "remount,rw", str(run.folder.parent)], check=True)
    run.cleared = time.time()


def fill_disk(run: Run, seconds: float = 30.0) -> None:
    """Fill the disk for half a minute, as another process might."""
    run.at = time.time()
    filler = run.folder.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            pass
    time.sleep(seconds)
    filler.unlink()
    run.cleared = time.time()


def lose_data(run: Run, seconds: float = 30.0) -> None:
    """Hide the data, kill a worker, and restore the data later."""
    assert isinstance(run.data, Path)
    away = run.data.with_suffix(".away")
    run.data.rename(away)
    run.at = time.time()
    os.kill(run.pid(1), signal.SIGKILL)
    time.sleep(seconds)
    away.rename(run.data)
    run.cleared = time.time()


def lose_driver(run: Run) -> None:
    run.at = time.time()
    os.kill(run.driver(), signal.SIGKILL)


def restart_cluster(run: Run) -> None:
    run.at = time.time()
    run.nodes.restart(5.0)
    run.cleared = time.time()


def corrupt_checkpoint(run: Run) -> None:
    """Change a byte of the newest checkpoint, and kill a worker."""
    from trainload.core.storage.open_files import open_files
    from trainload.launching.checkpoints.checkpoint_place import place_of

    step, folder = list(place_of(run.url or run.folder, None).published().items())[-1]
    files = open_files(folder)
    shards = [each for each in files.walk("") if each.path.endswith(".safetensors")]
    shard = max(shards, key=lambda each: each.modified or 0.0)
    content = files.read(shard.path, shard.size)
    assert content is not None
    files.replace(shard.path, content[:-1] + bytes([content[-1] ^ 1]))
    run.destroyed.add(step)
    kill(run)


def break_loss(run: Run) -> None:
    """Make a rank compute NaN once, and resume the run when it has failed."""
    run.at = time.time()
    Path(os.environ[BROKEN]).write_text(str(run.pid(1)))
    run.join()
    run.resume()


FAULTS = (
    Fault("worker killed", kill),
    Fault("worker stopped (SIGSTOP)", stop),
    Fault("worker stuck outside a collective", stick),
    Fault("worker three times slower", slow_down, said=_SLOWER),
    Fault("node cut off for 20 s", partition, networked=True),
    Fault("200 ms and 2 % loss, worker killed", worsen_network, networked=True),
    Fault("node lost, a spare there", lose_node, nodes=3),
    Fault("node lost, another one later", lose_node_for_a_while),
    Fault("node lost, elastic from 1 to 2", shrink_and_grow, sizes="1:2"),
    Fault("node gained, elastic from 1 to 2", gain, nodes=1, said="resize", sizes="1:2"),
    Fault("preemption notice, a spare there", preempt, nodes=3, said="preemption"),
    Fault("preemption notice, another one later", preempt_before_another_comes, said="preemption"),
    Fault("driver lost (SIGKILL)", lose_driver, said='"driver was lost"'),
    Fault("cluster and head restarted", restart_cluster, said='"driver was lost"'),
    Fault("storage takes nothing for 60 s", fail_storage, said="warning", disk=64),
    Fault("disk full for 30 s", fill_disk, said="warning", disk=8),
    Fault("data gone for 30 s, worker killed", lose_data),
    Fault("newest checkpoint changed, worker killed", corrupt_checkpoint),
    Fault("loss is NaN once, resumed by hand", break_loss, said="failed", resumed=True),
)


@contextmanager
def disk(folder: Path, mebibytes: int | None) -> Iterator[Path]:
    """Yield a new folder, on a separate disk if a size is given."""
    folder.mkdir()
    if mebibytes is None:
        yield folder
        return
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def write_rows(path: Path) -> Path:
    """Write training data for the job."""
    chance = np.random.default_rng(0)
    np.savez(
        path, x=chance.standard_normal((600, 32), dtype=np.float32), y=chance.integers(0, 8, 600)
    )
    return path


def set_up(scratch: Path) -> Path:
    """Freeze the job for the fault runs and return its package.

    Sets the environment variables that this process and its children need.
    """
    from prepare import prepare

    os.environ["TRAINLOAD_CACHE_DIR"] = str(scratch / "cache")
    for name in SWITCHES:
        os.environ[name] = str(scratch / name)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE), str(ROOT / "src"), os.environ.get("PYTHONPATH")))
    )
    note("freezing")
    return prepare(f"{HERE / 'faults_job.py'}:job", scratch / "job", "zero3", 2)


def losses_by_step(events: Sequence[Event]) -> dict[int, float]:
    """Return the last recorded loss of each step."""
    return {
        int(event.data["step"]): float(event.data["loss"])
        for event in events
        if event.kind == "step"
    }


def time_said(run: Run, said: str) -> float | None:
    """Return the time when a run reported its fault, or None."""
    quoted = re.fullmatch(r'"(.*)"', said)
    if quoted is not None:
        return run.heard(quoted[1])
    kind, _, beginning = said.partition(": ")
    return next(
        (
            event.time
            for event in run.events
            if event.time > run.at
            and event.kind == kind
            and str(event.data.get("message", "")).startswith(beginning)
        ),
        None,
    )


def draw(chance: random.Random, faults: Sequence[tuple[Fault, float]]) -> Fault:
    """Draw one of the faults, according to their weights."""
    return chance.choices([fault for fault, _ in faults], [weight for _, weight in faults])[0]
