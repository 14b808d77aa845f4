"""Two machines' worth of processes fight for the lease of a line: never two of them may act at
once.

    python benchmarks/lease_fight.py [--leases 1000] [--processes 8] [--s3]

Half of the processes cannot see whether those of the other half live, as if they were on another
machine. Each takes the lease, acts a few times, promotes, and gives it back. At random one is
paused for longer than its lease lasts, and tries to act and to promote when it wakes; or it is
killed. An act is a look at the lease (`Held.check`) and a line in the process's own log, with the
time. Two leases overlap where an act under an earlier one comes after an act under a later one. The
store is a folder, or lies in S3: moto's server on this machine.
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
"""Of a lease. moto's server serves one request after another, so there an owner says later that it
lives.
"""
PAUSED, KILLED = 0.02, 0.02
"""Share of leases in which that happens to the owner."""


@contextmanager
def s3() -> Iterator[str]:
    """The URL of a store on a server of its own, which all that is started meanwhile can reach."""
    sys.path.insert(0, str(ROOT))
    from tests.packaging.places import s3_place, s3_server

    with s3_server() as server:
        place = s3_place(server)
        os.environ.update(place.environment)
        yield place.url


def prepare(folder: str, store: str) -> None:
    """A store with two releases."""
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
    """What each process does until there were so many leases."""
    from trainload.core import processes
    from trainload.core.errors import ConflictError
    from trainload.core.storage import lease
    from trainload.packaging.stores.store import Store
    from trainload.retraining.ticks.line_lease import Held, LineLeases

    chance = random.Random(seed)
    if far:
        real = processes.this_process
        # another start of another machine
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
                if os.fork() == 0:  # somebody who wakes it
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
    """Promotes without a look at the lease."""
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
    parser.add_argument("--s3", action="store_true", help="the store lies in S3")
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
    """What the logs and the store say."""
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
    # whoever takes over writes an entry before it acts: no promotion of an older lease may follow
    # it
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
