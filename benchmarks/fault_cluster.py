"""Runs with faults: a Ray cluster of several nodes on this machine, a run that `trainload launch
--address` drives, and faults.

Every node is a raylet of its own (`ray.cluster_utils.Cluster`), with one worker. The run's driver
is a process, as for users.
"""

from __future__ import annotations

import logging
import os
import random
import re
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
from faults_op import BROKEN, STUCK
from measure import ROOT, note

if TYPE_CHECKING:
    from trainload.launching.run.journal import Event

HERE = Path(__file__).resolve().parent
HANG_TIMEOUT = 10.0
PATIENCE = 240.0
"""Seconds that an injector waits for what it waits for."""
LIBRARY = "faults=faults_op"
_TOLD = frozenset({"failure", "warning", "waiting", "preemption", "resize", "start", "failed"})


class Nodes:
    """A Ray cluster of this machine whose nodes come and go.

    The head has no worker. Nodes are added by the main thread alone.
    """

    def __init__(self, count: int) -> None:
        os.environ.update(
            RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",
            RAY_CHDIR_TO_TRIAL_DIR="0",
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        )
        os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self._port = one.getsockname()[1]
        self._start(count)

    def _start(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        logging.getLogger("ray").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own
            head = {"num_cpus": 0, "include_dashboard": False, "gcs_server_port": self._port}
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
            self._nodes: dict[str, Any] = {}
            for _ in range(count):
                self.add()

    @property
    def address(self) -> str:
        """Of the cluster."""
        return str(self._cluster.address)

    def add(self) -> None:
        """One node more."""
        node = self._cluster.add_node(num_cpus=1)
        self._nodes[node.node_id] = node

    def remove(self, node_id: str) -> None:
        """A node is gone, as when its power is."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def drain(self, node_id: str, seconds: float) -> None:
        """A node is told that it will be gone: what a cloud says before it takes a machine back."""
        from ray._raylet import GcsClient

        client = GcsClient(address=self._cluster.address)
        client.drain_node(node_id, 2, "preempted", int((time.time() + seconds) * 1000))

    def restart(self, seconds: float) -> None:
        """The whole cluster goes, and comes back at the same address with as many nodes."""
        count = len(self._nodes)
        self._cluster.shutdown()
        time.sleep(seconds)
        self._start(count)

    def close(self) -> None:
        self._cluster.shutdown()


@dataclass
class Run:
    """A run, and what is known of it. at: when its fault happened, seconds since 1970. cleared:
    when that had ended, where it lasts.
    destroyed: checkpoints that were destroyed on purpose. lines: what its driver has said, with the
    time.
    """

    folder: Path
    data: Path
    nodes: Nodes
    events: list[Event] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    at: float = 0.0
    cleared: float = 0.0
    destroyed: set[int] = field(default_factory=set)
    quiet: bool = False
    _process: subprocess.Popen[str] | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def launch(self, package: Path, *options: str) -> None:
        """Starts it."""
        self._drive(
            "launch",
            str(package),
            "--data",
            str(self.data),
            "--run-dir",
            str(self.folder),
            "--no-compile",
            "--strategy",
            "zero3",
            *options,
        )

    def resume(self) -> None:
        """Goes on with it, after its driver has ended."""
        self._drive("resume", str(self.folder))

    def _drive(self, *arguments: str) -> None:
        from trainload.launching.run.journal import Follower

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
        )

        def listen() -> None:
            assert process.stderr is not None
            self.lines.extend((time.time(), line.rstrip()) for line in process.stderr)

        follower = Follower(self.folder, from_end=True)

        def follow() -> None:
            while True:
                over = process.poll() is not None
                with suppress(OSError):  # while its storage fails
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
        """Whether its driver has ended."""
        return self._process is not None and self._process.poll() is not None

    def join(self) -> int:
        """Waits for its end. Returns: its driver's exit status."""
        assert self._process is not None
        status = self._process.wait()
        for thread in self._threads:
            thread.join()
        return status

    def end(self) -> None:
        """Ends its driver, if it is still there, with all that it started."""
        if self._process is not None and not self.over:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, ready: Callable[[], Any]) -> Any:
        """Waits until something is so. Returns: what says so."""
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
        """The last event of a kind."""
        return next(
            (event for event in reversed(self.events) if event.kind == kind and event.time > since),
            None,
        )

    def reach(self, step: int) -> None:
        """Waits for a step."""
        self.wait(
            lambda: (found := self.last("step")) is not None and int(found.data["step"]) >= step
        )

    def started(self) -> Event:
        """The start of the present attempt."""
        found = self.last("start")
        assert found is not None
        return found

    def pid(self, rank: int) -> int:
        """Of a worker."""
        return int(self.started().data["workers"][rank].rpartition(":")[2])

    def node(self, rank: int) -> str:
        """The id of a worker's node."""
        return str(self.started().data["nodes"][rank])

    @property
    def keeper(self) -> int:
        """The pid of the process that was launched."""
        assert self._process is not None
        return self._process.pid

    def driver(self) -> int:
        """The pid of the present driver, which the process that was launched keeps."""
        from trainload.launching.run.run_state import read_state

        state = read_state(self.folder)
        assert state is not None
        return state.pid

    def heard(self, text: str) -> float | None:
        """When its driver said something, since the fault."""
        return next((at for at, line in self.lines if at > self.at and text in line), None)


@dataclass(frozen=True)
class Fault:
    """A fault of a run. act: does it. nodes: that there are. said: the kind of event by which the
    driver says so, or in quotation marks what its keeper says. disk: MiB of the run's own disk.
    sizes: numbers of nodes that the run may be on, as --nodes takes them. resumed: whether the run
    fails, and is resumed by hand.
    """

    name: str
    act: Callable[[Run], None]
    nodes: int = 2
    said: str = "failure"
    disk: int | None = None
    sizes: str = "2"
    resumed: bool = False


def kill(run: Run) -> None:
    run.at = time.time()
    os.kill(run.pid(1), signal.SIGKILL)


def stop(run: Run) -> None:
    run.at = time.time()
    os.kill(run.pid(1), signal.SIGSTOP)


def stick(run: Run) -> None:
    run.at = time.time()
    Path(os.environ[STUCK]).write_text(str(run.pid(1)))


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
    """A node is gone, and another one comes when the run goes on without it."""
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
    """A node is told that it will be gone when there is no other; one comes a few seconds later."""
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
    """Storage takes nothing for a minute."""
    run.at = time.time()
    while subprocess.run(
        ["mount", "-o", "remount,ro", str(run.folder.parent)], capture_output=True, check=False
    ).returncode:
        time.sleep(0.005)  # somebody is writing
    time.sleep(seconds)
    subprocess.run(["mount", "-o", "remount,rw", str(run.folder.parent)], check=True)
    run.cleared = time.time()


def fill_disk(run: Run, seconds: float = 30.0) -> None:
    """Somebody else fills the disk, for half a minute."""
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
    """The data is gone when a worker dies, and comes back later."""
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
    """A byte of the newest checkpoint changes, and a worker dies."""
    from trainload.launching.checkpoints.index import published

    step, folder = list(published(run.folder).items())[-1]
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    run.destroyed.add(step)
    kill(run)


def break_loss(run: Run) -> None:
    """A rank computes NaN once, and the run is resumed when it has failed."""
    run.at = time.time()
    Path(os.environ[BROKEN]).write_text(str(run.pid(1)))
    run.join()
    run.resume()


FAULTS = (
    Fault("worker killed", kill),
    Fault("worker stopped (SIGSTOP)", stop),
    Fault("worker stuck outside a collective", stick),
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
    """A folder, on a disk of its own where a size is given."""
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
    """Rows of the job."""
    chance = np.random.default_rng(0)
    np.savez(
        path, x=chance.standard_normal((600, 32), dtype=np.float32), y=chance.integers(0, 8, 600)
    )
    return path


def set_up(scratch: Path) -> Path:
    """Freezes the job of the faults.

    Returns: its package. From now on this process and what it starts find what they need.
    """
    from prepare import prepare

    os.environ["TRAINLOAD_CACHE_DIR"] = str(scratch / "cache")
    os.environ[STUCK], os.environ[BROKEN] = str(scratch / "stuck"), str(scratch / "broken")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE), str(ROOT / "src"), os.environ.get("PYTHONPATH")))
    )
    note("freezing")
    return prepare(f"{HERE / 'faults_job.py'}:job", scratch / "job", "zero3", 2)


def losses_by_step(events: Sequence[Event]) -> dict[int, float]:
    """The loss of each step, as it was last."""
    return {
        int(event.data["step"]): float(event.data["loss"])
        for event in events
        if event.kind == "step"
    }


def time_said(run: Run, said: str) -> float | None:
    """When a run's driver has said what is to be said."""
    quoted = re.fullmatch(r'"(.*)"', said)
    if quoted is not None:
        return run.heard(quoted[1])
    return next(
        (event.time for event in run.events if event.time > run.at and event.kind == said), None
    )


def draw(chance: random.Random, faults: Sequence[tuple[Fault, float]]) -> Fault:
    """One of some faults, each with its weight."""
    return chance.choices([fault for fault, _ in faults], [weight for _, weight in faults])[0]
