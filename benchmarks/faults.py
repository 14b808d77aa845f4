"""What befalls runs, and what becomes of them: each fault on a Ray cluster of several nodes, beside a run that nothing befalls.

    python benchmarks/faults.py [NAME ...]

Every node is a raylet of its own on this machine (`ray.cluster_utils.Cluster`), with one worker. For each fault: seconds until the run's
driver says so, seconds until the first step after it, steps that were done again, checkpoints that were lost, and whether the losses are
those of the run that was left alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from faults_op import STUCK
from measure import RESULTS, machine, note, save, screen, table
from prepare import prepare

if TYPE_CHECKING:
    from trainload.launch.journal import Event

HERE = Path(__file__).resolve().parent
STEPS = 240
CHECKPOINT_EVERY = 20
HANG_TIMEOUT = 10.0
BAR = 1e-5
AT = 70
"""The step at which something happens."""
PATIENCE = 240.0
"""Seconds that an injector waits for what it waits for."""


class Nodes:
    """A Ray cluster of this machine whose nodes come and go. The head has no worker."""

    def __init__(self, count: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        os.environ.update(RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2", RAY_CHDIR_TO_TRIAL_DIR="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
        os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own
            self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
            self._nodes = {node.node_id: node for node in (self._cluster.add_node(num_cpus=1) for _ in range(count))}
            self._cluster.wait_for_nodes()
            ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)

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

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@dataclass
class Run:
    """A run that something will befall. at: when it did, seconds since 1970. cleared: when what it was had ended, where it lasts."""

    folder: Path
    data: Path
    nodes: Nodes
    events: list[Event] = field(default_factory=list)
    at: float = 0.0
    cleared: float = 0.0
    over: bool = False

    def hear(self, event: Event) -> None:
        """What the driver says."""
        self.events.append(event)
        if event.kind in ("failure", "warning", "waiting", "preemption", "resize", "start"):
            since = f"{event.time - self.at:6.1f} s" if self.at else "   before"
            note(f"  {since}  {event.kind}: {event.data.get('message', event.data.get('step'))}")
            for rank, text in event.data.get("doing", {}).items():
                note(f"            rank {rank}: {text}")

    def wait(self, ready: Callable[[], Any]) -> Any:
        """Waits until something is so. Returns: what says so."""
        until = time.monotonic() + PATIENCE
        while not (found := ready()):
            if time.monotonic() > until or self.over:
                raise TimeoutError("what the fault waits for did not happen")
            time.sleep(0.02)
        return found

    def last(self, kind: str, since: float = 0.0) -> Event | None:
        """The last event of a kind."""
        return next((event for event in reversed(self.events) if event.kind == kind and event.time > since), None)

    def reach(self, step: int) -> None:
        """Waits for a step."""
        self.wait(lambda: (found := self.last("step")) is not None and int(found.data["step"]) >= step)

    def pid(self, rank: int) -> int:
        """Of a worker."""
        start = self.last("start")
        assert start is not None
        return int(start.data["workers"][rank].rpartition(":")[2])

    def node(self, rank: int) -> str:
        """The id of a worker's node."""
        start = self.last("start")
        assert start is not None
        return str(start.data["nodes"][rank])


@dataclass(frozen=True)
class Fault:
    """Something that befalls a run. act: does it. nodes: that there are. said: the kind of event by which the driver says so. disk: MiB of
    the run's own disk. sizes: numbers of nodes that the run may be on.
    """

    name: str
    act: Callable[[Run], None]
    nodes: int = 2
    said: str = "failure"
    disk: int | None = None
    sizes: tuple[int, ...] = ()


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


def fail_storage(run: Run) -> None:
    """Storage takes nothing for a minute."""
    run.at = time.time()
    while subprocess.run(["mount", "-o", "remount,ro", str(run.folder.parent)], capture_output=True, check=False).returncode:
        time.sleep(0.005)  # somebody is writing
    time.sleep(60.0)
    subprocess.run(["mount", "-o", "remount,rw", str(run.folder.parent)], check=True)
    run.cleared = time.time()


def fill_disk(run: Run) -> None:
    """Somebody else fills the disk, for half a minute."""
    run.at = time.time()
    filler = run.folder.parent / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            pass
    time.sleep(30.0)
    filler.unlink()
    run.cleared = time.time()


def lose_data(run: Run) -> None:
    """The data is gone when a worker dies, and comes back later."""
    away = run.data.with_suffix(".away")
    run.data.rename(away)
    run.at = time.time()
    os.kill(run.pid(1), signal.SIGKILL)
    time.sleep(30.0)
    away.rename(run.data)
    run.cleared = time.time()


FAULTS = (
    Fault("worker killed", kill),
    Fault("worker stopped (SIGSTOP)", stop),
    Fault("worker stuck outside a collective", stick),
    Fault("node lost, a spare there", lose_node, nodes=3),
    Fault("node lost, another one later", lose_node_for_a_while),
    Fault("node lost, elastic from 1 to 2", shrink_and_grow, sizes=(1, 2)),
    Fault("node gained, elastic from 1 to 2", gain, nodes=1, said="resize", sizes=(1, 2)),
    Fault("preemption notice, a spare there", preempt, nodes=3, said="preemption"),
    Fault("storage takes nothing for 60 s", fail_storage, said="warning", disk=64),
    Fault("disk full for 30 s", fill_disk, said="warning", disk=8),
    Fault("data gone for 30 s, worker killed", lose_data),
)


@contextmanager
def disk(folder: Path, mebibytes: int | None) -> Iterator[Path]:
    """A folder, on a disk of its own where a size is given."""
    folder.mkdir()
    if mebibytes is None:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def write_rows(path: Path) -> Path:
    """Rows of the job."""
    chance = np.random.default_rng(0)
    np.savez(path, x=chance.standard_normal((600, 32), dtype=np.float32), y=chance.integers(0, 8, 600))
    return path


def launch(package: Any, run: Run, options: dict[str, Any], sizes: Sequence[int] = ()) -> None:
    """A run to its end."""
    import trainload
    from trainload.sharding.replan import plans_of_sizes

    plan = trainload.plan(package, trainload.Cluster(nodes=2), "zero3")
    if sizes:
        options = {**options, "plans": plans_of_sizes(package, plan, sizes)}
    trainload.launch(package, plan, run.data, run_dir=run.folder, on_event=run.hear, **options)


def befall(fault: Fault, package: Any, scratch: Path, reference: Sequence[float]) -> dict[str, Any]:
    """A run and its fault. Returns: a row of the table."""
    note(fault.name)
    nodes = Nodes(fault.nodes)
    stuck = scratch / "stuck"
    stuck.unlink(missing_ok=True)
    errors: list[BaseException] = []
    try:
        with disk(scratch / f"run-{fault.name.replace(' ', '-')}", fault.disk) as place:
            run = Run(place / "run", write_rows(scratch / "rows.npz"), nodes)

            def train() -> None:
                try:
                    launch(package, run, OPTIONS, fault.sizes)
                except BaseException as error:  # noqa: BLE001  # raised by the thread that waits
                    errors.append(error)
                    run.over = True

            thread = threading.Thread(target=train, name="run")
            thread.start()  # nodes are added by the main thread alone
            run.reach(AT)
            fault.act(run)
            thread.join()
            if errors:
                raise errors[0]
            return row(fault, run, reference)
    finally:
        nodes.close()


OPTIONS: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint_every": CHECKPOINT_EVERY,
    "compile": False,
    "hang_timeout": HANG_TIMEOUT,
    "node_patience": 120.0,
    "storage_patience": 120.0,
}


def row(fault: Fault, run: Run, reference: Sequence[float]) -> dict[str, Any]:
    """What came of it."""
    said = next(event for event in run.events if event.time > run.at and event.kind == fault.said)
    steps = [event for event in run.events if event.kind == "step"]
    before = [int(event.data["step"]) for event in steps if event.time <= said.time]
    after = [event for event in steps if event.time > said.time]
    starts = [event for event in run.events if event.kind == "start" and event.time > run.at]
    saved = max((int(event.data["step"]) for event in run.events if event.kind == "checkpoint" and event.time <= said.time), default=0)
    found = {int(event.data["step"]): float(event.data["loss"]) for event in steps}
    differences = [abs(found[step] - loss) / abs(loss) for step, loss in enumerate(reference)]
    return {
        "fault": fault.name,
        "seconds_to_notice": said.time - run.at,
        "seconds_to_next_step": after[0].time - run.at,
        "lasted": run.cleared - run.at if run.cleared else None,
        "steps_done_again": len(steps) - len(found),
        "checkpoints_lost": sum(int(event.data["step"]) < saved for event in starts),
        "all_steps": sorted(found) == list(range(len(reference))),
        "greatest_difference": max(differences),
        "equal": max(differences) <= BAR and sorted(found) == list(range(len(reference))),
        "last_before": before[-1],
        "worlds": [int(event.data["world"]) for event in run.events if event.kind == "start"],
        "said": said.data.get("message"),
    }


def measure(scratch: Path, names: Sequence[str]) -> dict[str, Any]:
    """Every fault that is named, or all."""
    import trainload

    os.environ["TRAINLOAD_CACHE_DIR"] = str(scratch / "cache")
    os.environ[STUCK] = str(scratch / "stuck")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    note("freezing")
    package = trainload.open(prepare(f"{HERE / 'faults_job.py'}:job", scratch / "job", "zero3", 2), libraries={"faults": "faults_op"})
    OPTIONS["libraries"] = {"faults": "faults_op"}
    nodes = Nodes(2)
    try:
        run = Run(scratch / "undisturbed", write_rows(scratch / "rows.npz"), nodes)
        launch(package, run, OPTIONS)
    finally:
        nodes.close()
    reference = [float(event.data["loss"]) for event in run.events if event.kind == "step"]
    chosen = [fault for fault in FAULTS if not names or any(name in fault.name for name in names)]
    return {"steps": STEPS, "hang_timeout": HANG_TIMEOUT, "rows": [befall(fault, package, scratch, reference) for fault in chosen]}


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    columns = ("fault", "s to notice", "s to next step", "lasted s", "steps again", "checkpoints lost", "equal", "what the driver says")
    lines = [
        (
            row["fault"],
            f"{row['seconds_to_notice']:.1f}",
            f"{row['seconds_to_next_step']:.1f}",
            "" if row["lasted"] is None else f"{row['lasted']:.0f}",
            str(row["steps_done_again"]),
            str(row["checkpoints_lost"]),
            f"yes, {row['greatest_difference']:.1e}" if row["equal"] else f"NO, {row['greatest_difference']:.1e}",
            str(row["said"])[:90],
        )
        for row in result["rows"]
    ]
    screen().print(table(f"What befalls runs of {result['steps']} steps (hang timeout {result['hang_timeout']:g} s)", columns, lines))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of faults; none: all")
    parser.add_argument("--output", type=Path, help="of all faults, by default, benchmarks/results/faults.json")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), arguments.names)
    show(result)
    if arguments.output is not None or not arguments.names:
        save({"machine": machine(), **result}, arguments.output or RESULTS / "faults.json")


if __name__ == "__main__":
    main()
