"""Write packages or train in children that are killed by SIGKILL at random moments.

A moment is just before an operation that writes to the folder (open, rename, remove), or a time; it
is drawn from the seed. `packages` and `runs`, which are called in a process of their own, print a
line of JSON for each child: whether it was killed, and for each visible thing whether it is
complete.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import trainload
from trainload.core.errors import CheckpointError, TrainloadError
from trainload.launching.checkpoints.index import published
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.node.build import uncompiled_build
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_spec import read_spec
from trainload.launching.worker import preparation
from trainload.packaging.signatures.verify import verify_package
from trainload.packaging.write import with_weights, write_package

OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.rmtree"}
_DRAWN = re.compile(r"[0-9a-f]{12}(?=\.part)|[0-9a-f]{32}|\d+")
"""Parts that differ between operations of a kind: attempts, steps, the names of drafts."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch(folder: Path, see: Callable[[str], None]) -> None:
    """Call `see` with the kind of every operation that is about to write below `folder`.

    This includes writes to paths that are named after `folder`.
    """
    places = (str(folder), str(folder.with_name(f".{folder.name}")))

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if (
            event in OPERATIONS
            and str(args[0]).startswith(places)
            and not (event == "open" and _reads(*args))
        ):
            path = str(args[0]).removeprefix(str(folder.parent)).replace(folder.name, "NAME")
            see(f"{event} {_DRAWN.sub('#', path)}")

    sys.addaudithook(hear)


def _reads(path: object, mode: str | None, flags: int) -> bool:
    return (
        "r" in mode and "+" not in mode
        if mode is not None
        else flags & (os.O_WRONLY | os.O_RDWR) == 0
    )


def kill_at(folder: Path, number: int, kind: str | None = None) -> None:
    """Kill this process before its n-th operation below `folder`, of a given kind or of any."""
    left = number

    def count_down(seen: str) -> None:
        nonlocal left
        left -= kind in (None, seen)
        if left == 0:
            die()

    watch(folder, count_down)


def child(act: Callable[[], None], arm: Callable[[], object]) -> bool:
    """Run `act` in a child process. Return True if it was killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            arm()
            act()
            status = 0
        except BaseException as error:  # noqa: BLE001  # a forked child must not continue with what its parent does
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended in (0, -signal.SIGKILL), f"a child ended with {ended}"
    return ended != 0


def measured(act: Callable[[], None], folder: Path) -> tuple[list[str], float]:
    """Return the operations of an uninterrupted child below `folder`, and its seconds."""
    note = folder.with_name(f"operations-{folder.name}")
    began = time.monotonic()

    def noted() -> None:
        seen: list[str] = []
        watch(folder, seen.append)
        act()
        note.write_text(json.dumps(seen))

    assert not child(noted, lambda: None)
    return list(json.loads(note.read_text())), time.monotonic() - began


def kill_after(seconds: float) -> None:
    """Kill this process after a time."""
    timer = threading.Timer(seconds, die)
    timer.daemon = True
    timer.start()


def packages(folder: Path, seed: int, package: Path, children: int) -> None:
    """Run children that each write a package, then one with new weights next to it.

    Half of them are killed at an operation, the first three at the first one, the last one, and the
    first one of the second package; half after a time.
    """
    on_one_core()
    rng, source = random.Random(seed), trainload.open(package)
    program, updates = source.program(), source.updates()
    state = dict(program.state)

    def write_into(place: Path) -> Callable[[], None]:
        def act() -> None:
            first = write_package(
                place / "first.tl", program, updates, source.recipe, max_shard=4000
            )
            with_weights(first, place / "second.tl", state.items(), max_shard=4000)

        place.mkdir()
        return act

    operations, seconds = measured(write_into(folder / "measured"), folder / "measured")
    between = 1 + next(at for at, kind in enumerate(operations) if "second.tl" in kind)
    for number in range(children):
        place = folder / str(number)
        at = {0: 1, 2: len(operations), 4: between}.get(number, rng.randint(1, len(operations)))
        after = rng.uniform(0.0, seconds)
        arm = partial(kill_at, place, at) if number % 2 == 0 else partial(kill_after, after)
        killed = child(write_into(place), arm)
        visible = [path for path in sorted(place.iterdir()) if not path.name.startswith(".")]
        report(killed, {path.name: is_whole_package(path) for path in visible})


def runs(folder: Path, seed: int, package: Path, data: Path, steps: int) -> None:
    """Run children that train, each of which resumes where the previous one was killed.

    When a run is complete, the next child begins another. There is a child for every kind of
    operation, and more until the last run is complete.
    """
    on_one_core()
    rng, source = random.Random(seed), trainload.open(package)
    plan = trainload.plan(source, trainload.Cluster(), "single", bucket_bytes=6_000)
    built = uncompiled_build(source, plan, torch.device("cpu"))
    # children then need not derive the same graphs again
    patch.object(preparation, "uncompiled_build", lambda *_, **__: built).start()

    def train_in(run_dir: Path) -> Callable[[], None]:
        def act() -> None:
            if (run_dir / RUN_FILE).exists():
                trainload.resume(run_dir, backend="local")
            else:
                options: dict[str, Any] = {
                    "steps": steps,
                    "checkpoint_every": 1,
                    "backend": "local",
                    "compile": False,
                }
                trainload.launch(
                    source,
                    plan,
                    data,
                    run_dir=run_dir,
                    output=run_dir.with_suffix(".tl"),
                    **options,
                )

        return act

    operations, _ = measured(train_in(folder / "whole"), folder / "whole")
    kinds = sorted(set(operations))
    rng.shuffle(kinds)
    number = 0
    killed = False
    while kinds or killed:
        run_dir = folder / f"run{number}"
        kind = kinds.pop() if kinds else None
        arm = (
            partial(kill_at, run_dir, rng.randint(1, min(2, operations.count(kind))), kind)
            if kind is not None
            else lambda: None
        )
        killed = child(train_in(run_dir), arm)
        visible = {path.name: is_whole_checkpoint(path) for path in published(run_dir).values()}
        if run_dir.with_suffix(".tl").exists():
            visible["output"] = is_whole_package(run_dir.with_suffix(".tl"))
        if (run_dir / RUN_FILE).exists():
            visible[RUN_FILE] = read_spec(run_dir).steps == steps
        report(killed, visible, run_dir.name)
        number += not killed


def on_one_core() -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def is_whole_package(path: Path) -> bool:
    try:
        return verify_package(path).ok
    except TrainloadError:
        return False


def is_whole_checkpoint(path: Path) -> bool:
    try:
        Checkpoint.open(path).verify()
    except CheckpointError:
        return False
    return True


def report(killed: bool, visible: dict[str, bool], name: str = "") -> None:
    print(json.dumps({"killed": killed, "visible": visible, "run": name}), flush=True)
