"""Pushes in child processes of a test, which run this file, or `told_by` in a forked process.

    pushing.py push STORE LINE PACKAGE...     prints "ready", waits for a line of input, and pushes
                                              one package after another; with DIE_AFTER=N in the
                                              environment it is killed at its N-th progress report
    pushing.py together STORE LINE WRITERS PACKAGE...
                                              WRITERS forks, which begin at the same time, push the
                                              packages, each a part of them
    pushing.py killed STORES PACKAGE          for every kind of operation of a push to a store in a
                                              folder, a child is killed by SIGKILL just before it,
                                              in a store of its own; then prints what is visible,
                                              and the result of a push that continues

Prints a line of JSON for each push.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from trainload.packaging.stores.push import push
from trainload.packaging.stores.store import Store

_DRAWN = re.compile(
    r"[0-9a-f]{64}|[0-9a-f]{32}|[0-9a-f]{16}|[0-9a-f]{12}(?=\.part)|(?<=sha256/)[0-9a-f]{2}"
)
"""Parts that differ between operations of a kind."""
OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.link"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def pushes(store: str, line: str, packages: list[str]) -> None:
    left = int(os.environ.get("DIE_AFTER", "-1"))

    def on_progress(_done: int, _total: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()

    say("ready")
    sys.stdin.readline()
    for package in packages:
        say(asdict(push(package, store, line=line, on_progress=on_progress)))


def together(store: str, line: str, writers: int, packages: list[str]) -> int:
    """Push from forks that have already imported everything, so that they write concurrently.

    Returns:
        The worst of their exit codes.
    """
    waiting, begin = os.pipe()

    def work(number: int) -> NoReturn:
        code = 1
        try:
            os.close(begin)
            os.read(waiting, 1)  # returns when the last writing end is closed
            for package in packages[number::writers]:
                say(asdict(push(package, store, line=line)))
            code = 0
        except BaseException:  # noqa: BLE001  # a forked child must not continue with what its parent does
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    children = [os.fork() or work(number) for number in range(writers)]
    os.close(begin)
    return max((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), key=abs)


def hear(folder: Path, see: Callable[[str], None]) -> None:
    """Call `see` before every operation that writes below a folder, with its kind.

    The kind is the operation and what it writes to.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or not str(args[0]).startswith(str(folder)):
            return
        if event == "open" and not (isinstance(args[1], str) and set(args[1]) & set("wxa+")):
            return
        see(f"{event} {_DRAWN.sub('#', str(args[0]).removeprefix(str(folder)))}")

    sys.addaudithook(hook)


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a fork. Return its exit code: 0, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def moments(folder: Path, package: str) -> list[int]:
    """Return the numbers of the first and the last operation of each kind that a push performs.

    They are determined in a fork, since an audit hook cannot be removed.
    """
    notes = folder / "kinds"

    def work() -> None:
        kinds: list[str] = []
        hear(folder / "whole", kinds.append)
        push(package, folder / "whole")
        notes.write_text(json.dumps(kinds))

    assert in_child(work) == 0
    kinds = json.loads(notes.read_text())
    last = {kind: number for number, kind in enumerate(kinds, 1)}
    return sorted({*last.values(), *(kinds.index(kind) + 1 for kind in last)})


def killed(folder: Path, package: str) -> None:
    os.fsync = lambda fd: None  # the machine does not crash, so what its processes wrote remains
    for number in moments(folder, package):
        place = folder / f"store{number}"

        def work(place: Path = place, number: int = number) -> None:
            left = number

            def see(_kind: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    die()

            hear(place, see)
            push(package, place)

        ended = in_child(work)
        store = Store(place, create=True)
        seen = [state.release for line in store.lines() for state in store.releases(line)]
        whole = all(
            store.files.size(f"blobs/sha256/{e.sha256[:2]}/{e.sha256}") == e.size
            for r in seen
            for e in r.files.values()
        )
        pointer = store.current("main")
        blobs = [file for file in store.files.walk("blobs") if "/." not in file.path]
        say(
            {
                "killed": ended == -signal.SIGKILL,
                "releases": len(seen),
                "whole": (
                    whole and (pointer is None or pointer.release in store.release_ids("main"))
                ),
                "blobs": len(blobs),
                "then": asdict(push(package, place)),
                "after": [state.status for state in store.releases("main")],
            }
        )


def told_by(words: list[str]) -> None:
    """Execute the words of a command line."""
    match words:
        case ["killed", folder, package]:
            killed(Path(folder), package)
        case ["together", store, line, writers, *packages]:
            sys.exit(together(store, line, int(writers), packages))
        case ["push", store, line, *packages]:
            pushes(store, line, packages)


if __name__ == "__main__":
    told_by(sys.argv[1:])
