"""Check that a line's lease never has two holders, with processes on two simulated machines.

    python benchmarks/lease_fight.py [--leases 1000] [--processes 8] [--s3]

Half of the processes cannot see whether those of the other half are alive, as if they were on
another machine. Each acquires the lease, acts a few times, promotes, and releases the lease. At
random, one is paused for longer than its lease lasts and tries to act and to promote when it wakes
up; or it is killed. To act means to check the lease (`Held.check`) and to write a line with the
time to the process's own log. Two leases overlap if an act with an earlier one follows an act with
a later one. The store is a folder, or is in S3: moto's server on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from measure import RESULTS, ROOT, alone, machine, save, screen, table

SECONDS, SECONDS_S3 = 0.6, 4.0
"""Duration of a lease.

moto's server handles one request at a time, so with it heartbeats are delayed.
"""
PAUSED, KILLED = 0.02, 0.02
"""Fraction of leases whose owner is paused, and killed."""


@contextmanager
def s3() -> Iterator[str]:
    """Yield the URL of a store on a new server. Processes started in the context can access it."""
    sys.path.insert(0, str(ROOT))
    from tests.packaging.places import s3_place, s3_server

    with s3_server() as server:
        place = s3_place(server)
        os.environ.update(place.environment)
        yield place.url


def prepare(folder: str, store: str) -> None:
    """Create a store with two releases."""
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    import torch
    from retrain_job import job

    import trainload
    from trainload.packaging.write import with_weights

    package = trainload.freeze(job(), Path(folder) / "1.tl")
    tensors = {name: package.weights.tensor(name) for name in package.weights.names()}
    changed = with_weights(
        package,
        Path(folder) / "2.tl",
        ((name, torch.zeros_like(tensor)) for name, tensor in tensors.items()),
    )
    trainload.push(package.path, store, line="main")
    trainload.push(changed.path, store, line="main", promote=False)


def fight(store: str, log: Path, seed: int, far: bool, leases: int, seconds: float) -> None:
    """Run one process until the given number of leases has been acquired."""
    from trainload.core import processes
    from trainload.core.errors import ConflictError
    from trainload.core.storage import lease
    from trainload.packaging.stores.store import Store
    from trainload.retraining.ticks.line_lease import Held, LineLeases

    chance = random.Random(seed)
    if far:
        real = processes.this_process
        # appears as another boot of another machine
        processes.this_process = lease.this_process = lambda: real().replace(" ", "-far ", 1)
    place = Store(store)
    line = LineLeases(place, "main", f"process {os.getpid()}")
    with log.open("a", buffering=1) as out:

        def act(held: Held, what: str) -> None:
            try:
                held.check()
                out.write(json.dumps([time.monotonic(), int(held.id), what]) + "\n")
            except ConflictError:
                out.write(
                    json.dumps([time.monotonic(), int(held.id), "knew that it had lost it"]) + "\n"
                )

        while int(line.last() or 0) < leases:
            held = line.take_for("20260101T000000Z", seconds)
            if not isinstance(held, Held):
                time.sleep(chance.uniform(0.0, 0.02))
                continue
            act(held, "taken")
            fate = chance.random()
            if fate < PAUSED:
                if os.fork() == 0:  # wakes this process up
                    time.sleep(chance.uniform(2.0, 4.0) * seconds)
                    os.kill(os.getppid(), signal.SIGCONT)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGSTOP)
                act(held, "after a pause")
                promote(place, held, out, "paused")
                os.wait()
            elif fate < PAUSED + KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(chance.randrange(3)):
                time.sleep(chance.uniform(0.0, 0.005))
                act(held, "acted")
            if chance.random() < 0.2:
                promote(place, held, out, "owner")
            held.close()


def promote(place: Any, held: Any, out: Any, who: str) -> None:
    """Promote without checking the lease."""
    from trainload.core.errors import ConflictError

    try:
        pointer = place.promote(
            "main", 1 + int(held.id) % 2, after=held.after, reason=f"owner of {int(held.id)}"
        )
        held.after = pointer.id
        out.write(json.dumps([time.monotonic(), int(held.id), f"promoted as {who}"]) + "\n")
    except ConflictError:
        out.write(
            json.dumps([time.monotonic(), int(held.id), f"could not promote as {who}"]) + "\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--leases", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--s3", action="store_true", help="put the store in S3")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    lease_seconds = SECONDS_S3 if options.s3 else SECONDS
    with (
        tempfile.TemporaryDirectory() as folder,
        s3() if options.s3 else nullcontext(f"{folder}/store") as store,
    ):
        alone(prepare, folder, store)
        began = time.monotonic()
        killed, number = 0, 0
        running: dict[int, tuple[int, bool]] = {}
        while True:
            while len(running) < options.processes and killed >= 0:
                far = sum(each for _, each in running.values()) < options.processes // 2
                number += 1
                child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        fight(
                            store,
                            Path(folder) / f"{number}.log",
                            number,
                            far,
                            options.leases,
                            lease_seconds,
                        )
                        status = 0
                    except Exception:  # noqa: BLE001  # the parent sees the status
                        traceback.print_exc()
                    finally:
                        os._exit(status)
                running[child] = (number, far)
            child, status = os.wait()
            running.pop(child)
            if status == 0:
                break
            assert os.WIFSIGNALED(status), "a process failed of something else than its fate"
            killed += 1
        for child in running:
            os.waitpid(child, 0)
        seconds = time.monotonic() - began
        result = judged(Path(folder), store)
    result = {"processes": options.processes, "seconds": seconds, "killed": killed, **result}
    screen().print(
        table(
            "Who has the lease",
            ("", "value"),
            [(name.replace("_", " "), str(value)) for name, value in result.items()],
        )
    )
    save(
        {"machine": machine(), **result},
        options.output or RESULTS / ("lease_fight_s3.json" if options.s3 else "lease_fight.json"),
    )


def judged(folder: Path, url: str) -> dict[str, Any]:
    """Return the verdict from the logs and the store."""
    from collections import Counter

    from trainload.packaging.stores.store import Store

    acts = sorted(
        tuple(json.loads(line))
        for log in folder.glob("*.log")
        for line in log.read_text().splitlines()
    )
    said = Counter(what for _, _, what in acts)
    overlaps, greatest = 0, 0
    for _, lease, what in acts:
        if what in ("taken", "acted", "after a pause"):
            overlaps += lease < greatest
            greatest = max(greatest, lease)
    store = Store(url)
    history = [entry.reason.split(" ") for entry in store.history("main")]
    promoted = [int(words[2]) for words in history if words[0] == "owner"]
    taken_over = sum(words[0] == "lease" for words in history)
    # whoever takes over writes an entry before it acts, so no promotion with an older lease may
    # follow it
    late, newest = 0, 0
    for words in history:
        if words[0] in ("owner", "lease"):
            number = int(words[2] if words[0] == "owner" else words[1])
            late += number < newest
            newest = max(newest, number)
    return {
        "leases": len(store.files.names("lines/main/leases")),
        "acts": said["taken"] + said["acted"] + said["after a pause"],
        "overlaps": overlaps,
        "taken_over_from_the_silent": taken_over,
        "knew_that_they_had_lost_it": said["knew that it had lost it"],
        "acted_after_a_pause": said["after a pause"],
        "promotions": len(promoted),
        "promotions_of_the_paused_before_anyone_took_over": said["promoted as paused"],
        "promotions_of_the_paused_that_failed": said["could not promote as paused"],
        "promotions_after_the_lease_was_taken": late,
    }


if __name__ == "__main__":
    main()
