"""Run a year of retraining in minutes: 50 ticks with drift, a simulated clock and faults.

    python benchmarks/retrain_year.py [--ticks 50] [--seed 0]

Random events: no new data, a NaN, a missing column, digits with random labels (a worse challenger),
two concurrent schedulers, a clock that jumps forward by days or backward, a tick killed at a random
point. Each tick is a process of its own, forked from one that has imported everything; the loop is
that of `trainload retrain run`. Meanwhile a reader polls the current release with all its files. At
the end:

- the lineage of every release leads back to the first freeze, and every promotion satisfies the
  gate, evaluated again from the records;
- every scheduled time was run once: no tick has two releases, and every tick that began has ended;
- one tick of each outcome is repeated from the same state, killed by SIGKILL before each single
  file operation (observed by an audit hook: open for writing, rename, link, remove, mkdir,
  truncate), and then run to its end: it must end the same way, and the current release must be
  complete all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from measure import RESULTS, ROOT, alone, machine, note, save, screen, table

FIRST = datetime(2026, 1, 1, 3, tzinfo=UTC)
EVERY = timedelta(days=1)
GATE = "eval.loss <= champion.eval.loss * 1.01 and eval.steps >= 10 and eval.accuracy > 0.2"
DATA_KINDS = (("good", 50), ("none", 15), ("nan", 8), ("missing", 7), ("worse", 20))
FAULTS = (("nothing", 50), ("two at once", 15), ("forward", 10), ("back", 10), ("killed", 15))
LINE = "digits"
OPERATIONS = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.link",
    "os.truncate",
    "os.symlink",
    "os.rmdir",
}


def write_package(path: str) -> None:
    """Freeze the job in a process of its own.

    This process must not have used torch's threads before it forks.
    """
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    from retrain_job import job

    import trainload

    trainload.freeze(job(), path)


def config_of(folder: Path) -> Any:
    """Return the retraining configuration for a folder."""
    from trainload.retraining.config.config import checked

    return checked(
        {
            "store": str(folder / "store"),
            "line": LINE,
            "package": str(folder / "package.tl"),
            "runs": str(folder / "runs"),
            "data": {"files": str(folder / "data" / "*.arrow")},
            "evaluation": {"hold_out": 0.2},
            "train": {"epochs": 1.0, "checkpoint_every": 4},
            "cluster": {"backend": "local", "compile": False},
            "gate": {"require": GATE},
            "lease": {"seconds": "5s", "taken": "queue"},
            "schedule": {"every": "1d"},
            "retention": {"runs": 3},
            "attempts": 2,
        },
        "the benchmark",
    )


class Death:
    """Counts the file operations in a folder, and kills this process before the n-th (1-based)."""

    def __init__(self, folder: Path, die_at: int | None) -> None:
        self._folder, self._die_at, self._done = str(folder), die_at, 0
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            _, _, flags = arguments
            if not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
                return
        elif event not in OPERATIONS:
            return
        path = str(arguments[0])
        # heartbeats are not deterministic
        if not path.startswith(self._folder) or "/heartbeats/" in path:
            return
        self._done += 1
        if self._done == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def done(self) -> int:
        """Number of operations so far."""
        return self._done


def forked(work: Callable[[], None], log: Path) -> int:
    """Call a function in a child process. Returns its exit status, or minus the signal number."""
    return os.waitstatus_to_exitcode(os.waitpid(started(work, log), 0)[1])


def started(work: Callable[[], None], log: Path) -> int:
    """Start a child process that calls a function. Returns its pid."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        import torch

        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException:  # noqa: BLE001  # the status and the log report it
        traceback.print_exc()
    finally:
        os._exit(status)


def tick(
    folder: Path, when: datetime, *, die_at: int | None = None, count: Path | None = None
) -> None:
    """Run one tick in this process."""
    from trainload.retraining.ticks.tick import Scheduler
    from trainload.retraining.ticks.tick_stages import Opening, Stages

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    death = Death(folder, die_at)
    Scheduler(config_of(folder), Stages(Opening(), say), say).tick(when)
    if count is not None:
        count.write_text(str(death.done))


class SimulatedClock:
    """Clock that advances when someone waits for it."""

    def __init__(self, start: datetime) -> None:
        self.time = start

    def now(self) -> datetime:
        return self.time

    def wait(self, seconds: float) -> bool:
        self.time += timedelta(seconds=seconds * 60)  # an hour at a time
        return False


def read_on(folder: Path, over: Path, result: Path) -> None:
    """Poll the current release with all of its files until the file `over` exists."""
    from trainload.packaging.stores.store import Store, blob_path

    reads, failures, seen = 0, [], set()
    while not over.exists():
        try:
            store = Store(folder / "store")
            pointer = store.current(LINE)
        except Exception as error:  # noqa: BLE001  # readers' failures are counted
            failures.append(str(error))
            continue
        if pointer is None:
            failures.append("nothing is current")
            continue
        try:
            release = store.release(LINE, int(pointer.release))
            lacking = [
                path
                for path, entry in release.files.items()
                if store.files.size(blob_path(entry.sha256)) != entry.size
            ]
            if release.package != pointer.package or lacking:
                failures.append(f"release {release.name} is not whole: {lacking[:3]}")
        except Exception as error:  # noqa: BLE001  # as above
            failures.append(str(error))
        reads += 1
        seen.add(pointer.release)
        time.sleep(0.002)
    result.write_text(
        json.dumps(
            {
                "reads": reads,
                "failures": len(failures),
                "first_failures": failures[:5],
                "releases_seen": len(seen),
            }
        )
    )


def whole(folder: Path) -> str:
    """Return a description of what is wrong with the current release, or ""."""
    from trainload.packaging.stores.store import Store, blob_path

    store = Store(folder / "store")
    pointer = store.current(LINE)
    if pointer is None:
        return "nothing is current"
    release = store.release(LINE, int(pointer.release))
    lacking = [
        path
        for path, entry in release.files.items()
        if store.files.size(blob_path(entry.sha256)) != entry.size
    ]
    return f"release {release.name} lacks {lacking[:3]}" if lacking else ""


def outcome(folder: Path) -> dict[str, Any]:
    """Return the state of a line in a store, without times, random numbers, owners and attempts."""
    from trainload.packaging.stores.store import Store
    from trainload.retraining.ticks.lineage import read_line

    story = read_line(Store(folder / "store"), LINE)
    return {
        "current": [entry.release for entry in story.changes],
        "releases": [(state.release.package, state.status) for state in story.states],
        "ticks": {
            each.name: (
                None
                if each.ended is None
                else [each.ended.outcome, each.ended.reason, each.ended.release]
            )
            for each in story.ticks
        },
    }


def year(
    folder: Path, ticks: int, chance: random.Random
) -> tuple[dict[str, Any], dict[str, tuple[Path, datetime]]]:
    """Run the year.

    Returns:
        Counts of events, and for each outcome a copy of the folder from before a tick with this
        outcome,
        with the tick's time.
    """
    from retrain_job import write_day

    from trainload.packaging.stores.store import Store
    from trainload.retraining.service import serve
    from trainload.retraining.ticks.tick_records import Ended, Ticks, name_of
    from trainload.retraining.ticks.tick_times import Every

    draw = np.random.default_rng(0)
    clock = SimulatedClock(FIRST - timedelta(hours=5))
    data, counts, events = folder / "data", Counter[str](), Counter[str]()
    data.mkdir()
    before: dict[str, tuple[Path, datetime]] = {}
    day = 0
    refused = 0

    def one(when: datetime) -> None:
        nonlocal day, refused
        kind = (
            chance.choices([name for name, _ in DATA_KINDS], [share for _, share in DATA_KINDS])[0]
            if day
            else "good"
        )
        what = chance.choices([name for name, _ in FAULTS], [share for _, share in FAULTS])[0]
        counts[kind] += 1
        events[what] += 1
        day += 1
        if kind != "none":
            write_day(data, day, kind, draw)
        copy = folder.with_name(f"{folder.name}-before")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, symlinks=True)
        log = folder.with_name("ticks.log")
        if what == "killed":
            forked(lambda: tick(folder, when, die_at=chance.randrange(1, 200)), log)
        if what == "two at once":
            children = [started(lambda: tick(folder, when), log) for _ in range(2)]
            statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            assert statuses == [0, 0], f"tick {when} of two schedulers: {statuses}; see {log}"
        else:
            status = forked(lambda: tick(folder, when), log)
            assert status == 0, f"tick {when}: {status}; see {log}"
        if what == "back":
            clock.time -= timedelta(days=3)
            refused += forked(lambda: tick(folder, when - timedelta(hours=7)), log) != 0
        if what == "forward":
            clock.time += timedelta(days=chance.randrange(2, 5))
        ended = Ticks(Store(folder / "store"), LINE).read(Ended, name_of(when))
        assert ended is not None, f"tick {when} was not ended"
        note(f"{when:%Y-%m-%d}  {kind:8} {what:12} {ended.outcome}: {ended.reason[:90]}")
        if ended.outcome not in before and what == "nothing":
            kept = folder.with_name(f"{folder.name}-{ended.outcome.replace(' ', '-')}")
            copy.rename(kept)
            before[ended.outcome] = (kept, when)

    def last_done() -> datetime | None:
        from trainload.retraining.ticks.tick_records import time_of

        if not (folder / "store" / "store.json").exists():
            return None
        names = Ticks(Store(folder / "store"), LINE).names()
        return time_of(names[-1]) if names else None

    began = time.monotonic()
    serve(
        Every(EVERY), "once", one, last_done, on_event=lambda _text: None, clock=clock, ticks=ticks
    )
    return {
        "data": dict(counts),
        "events": dict(events),
        "refused": refused,
        "seconds": time.monotonic() - began,
    }, before


def judged(folder: Path) -> dict[str, Any]:
    """Return the verdict at the end."""
    from trainload.packaging.stores.store import Store
    from trainload.retraining.config.expression import parse
    from trainload.retraining.ticks.lineage import ancestry, read_line

    store = Store(folder / "store")
    story = read_line(store, LINE)
    ends = [ancestry(store, LINE, state.release.name)[-1] for state in story.states]
    bar = parse(GATE, "gate")
    disobeyed = 0
    for each in story.ticks:
        if each.ended is not None and each.ended.outcome == "promoted":
            assert each.evaluated is not None, "what was promoted was evaluated"
            assert each.trained is not None, "what was promoted was trained"
            values = {
                f"eval.{name}": value for name, value in each.evaluated.challenger.values.items()
            }
            values |= {
                f"champion.eval.{name}": value
                for name, value in each.evaluated.champion.values.items()
            }
            disobeyed += (
                bar.evaluate({**values, "eval.steps": float(each.trained.steps)})[0] is not True
            )
    made = Counter(state.release.facts.get("tick") for state in story.states)
    return {
        "ticks": len(story.ticks),
        "outcomes": dict(
            Counter("none" if each.ended is None else each.ended.outcome for each in story.ticks)
        ),
        "not_ended": sum(each.ended is None for each in story.ticks),
        "begun_more_than_once": sum(each.begun > 1 for each in story.ticks),
        "releases": len(story.states),
        "lineages_broken": sum(
            step.state.release.name != "1" or step.how != "frozen" for step in ends
        ),
        "ticks_with_two_releases": sum(
            count > 1 for name, count in made.items() if name is not None
        ),
        "promotions_against_the_gate": disobeyed,
        "store_bytes": sum(
            path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file()
        ),
    }


def enumerated(place: Path, when: datetime, limit: int | None) -> dict[str, Any]:
    """Repeat a tick from the same state, killed before every file operation."""
    log, work = place.with_name("kills.log"), place.with_name("work")
    home = place.with_name("year")

    def restored() -> None:
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(place, home, symlinks=True)

    restored()
    count = work.with_suffix(".count")
    assert forked(lambda: tick(home, when, count=count), log) == 0, f"see {log}"
    operations, wanted = int(count.read_text()), outcome(home)
    differ, broken, survived = 0, 0, 0
    points = range(1, operations + 1)
    for die_at in (
        points if limit is None else sorted(random.Random(0).sample(points, min(limit, operations)))
    ):
        restored()
        status = forked(lambda at=die_at: tick(home, when, die_at=at), log)  # type: ignore[misc]  # bound by a default
        survived += status != -signal.SIGKILL
        broken += bool(whole(home)) if (home / "store" / "lines").exists() else 0
        status = forked(lambda: tick(home, when), log)
        if status != 0 or outcome(home) != wanted:
            differ += 1
            note(
                f"killed before operation {die_at} of {operations}: status {status},"
                f" {outcome(home)['ticks']}"
            )
        broken += bool(whole(home))
    return {
        "operations": operations,
        "ended_otherwise": differ,
        "current_broken": broken,
        "not_killed": survived,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ticks", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kills",
        type=int,
        default=None,
        help="maximum number of random kill points per outcome; default: all",
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "retrain_year.json")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "year"
        folder.mkdir()
        os.environ["TRAINLOAD_CACHE_DIR"] = str(Path(scratch) / "cache")
        alone(write_package, str(folder / "package.tl"))
        # Imports done before the fork are shared by the processes of all ticks.
        import torch

        torch.set_num_threads(1)
        over, seen = Path(scratch) / "over", Path(scratch) / "seen.json"
        # publishes the first release
        status = forked(lambda: tick(folder, FIRST - EVERY), Path(scratch) / "ticks.log")
        assert status in (0, 1), f"see {scratch}/ticks.log"
        reader = started(lambda: read_on(folder, over, seen), Path(scratch) / "reader.log")
        summary, before = year(folder, options.ticks, random.Random(options.seed))
        over.touch()
        os.waitpid(reader, 0)
        ends, read = judged(folder), json.loads(seen.read_text())
        kills = {}
        for name, (place, when) in sorted(before.items()):
            began = time.monotonic()
            kills[name] = {
                **enumerated(place, when, options.kills),
                "seconds": time.monotonic() - began,
            }
            note(f"{name}: {kills[name]}")
    show("A year", {**summary, **ends})
    show("Who read what was current", read)
    lines = [
        (name, *(str(round(value)) for value in each.values())) for name, each in kills.items()
    ]
    titles = (
        "a tick that ends",
        "operations",
        "ended otherwise",
        "current broken",
        "not killed",
        "s",
    )
    screen().print(table("Killed before every operation on files", titles, lines))
    result = {
        "machine": machine(),
        "seed": options.seed,
        "year": summary,
        "end": ends,
        "reader": read,
        "kills": kills,
    }
    save(result, options.output)


def show(title: str, facts: dict[str, Any]) -> None:
    """Print facts."""
    screen().print(
        table(
            title,
            ("", "value"),
            [(name.replace("_", " "), str(value)) for name, value in facts.items()],
        )
    )


if __name__ == "__main__":
    main()
