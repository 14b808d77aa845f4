"""Measure ticks of a retraining in fresh pods: empty folders and caches, everything in S3.

    python benchmarks/fresh_tick.py [--rounds 3] [--width 512] [--layers 4]

moto's S3 server on loopback has the store, with the line's first release, and the data, to which
each tick adds a file. Each tick is a `trainload retrain tick` process. "no build": before the store
has one. "build": `trainload retrain build` has pushed a signed one, and the pod's policy trusts its
maker. "warm": the cache of the build's pod, which a pod does not have. Rounds alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from fresh_start import make_policy, trainload
from measure import RESULTS, ROOT, alone, machine, median, note, save, screen, table
from retrain_cost import first_step, write_package

KINDS = ("no build", "build", "warm")
LINE = "digits"
FIRST = datetime(2026, 1, 1, 3, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Tick:
    """Durations and results of one tick.

    Attributes:
        first_step: from the command to the end of the first step, in seconds.
        whole: from the command to its end, in seconds.
        kernels: libraries that the compiler has written to the pod's cache.
        sources: where the pod got its builds.
    """

    first_step: float
    whole: float
    kernels: int
    sources: list[str]


class Pods:
    """Runs ticks in folders that only have the retraining's file."""

    def __init__(self, scratch: Path, bucket: str, policy: Path) -> None:
        self.scratch = scratch
        self.bucket = bucket
        self.policy = policy
        self._ticks = 0
        self._draw = np.random.default_rng(0)

    @property
    def store(self) -> str:
        """The store's URL."""
        return f"{self.bucket}/store"

    def config(self, folder: Path) -> Path:
        """Write the retraining's file to a new folder, and return its path."""
        folder.mkdir()
        config = {
            "store": self.store,
            "line": LINE,
            "data": {"files": f"{self.bucket}/data/*.arrow"},
            "evaluation": {"hold_out": 0.2},
            "train": {"steps": 5},
            "cluster": {"backend": "local"},
            "gate": {"require": "eval.loss <= champion.eval.loss * 2"},
            "schedule": {"every": "1d"},
        }
        path = folder / "retrain.yaml"
        path.write_text(json.dumps(config))  # JSON is valid YAML
        return path

    def upload_day(self) -> None:
        """Upload the next file of data."""
        import fsspec
        from retrain_job import write_day

        days = self.scratch / "days"
        write_day(days, self._ticks, "good", self._draw)
        newest = max(days.glob("*.arrow"), key=lambda path: path.stat().st_mtime)
        fsspec.filesystem("s3").put(str(newest), f"{self.bucket}/data/{newest.name}")

    def tick(self, cache: Path, *, trusted: bool) -> Tick:
        """Run the next day's tick with a cache. `trusted`: the pod's policy trusts the builds."""
        self.upload_day()
        when = FIRST + timedelta(days=self._ticks)
        folder = self.scratch / f"pod-{self._ticks}"
        self._ticks += 1
        config = self.config(folder)
        policies = ["--policy", self.policy] if trusted else []
        before = kernels(cache)
        began = time.time()
        at = f"{when:%Y-%m-%dT%H:%M:%SZ}"
        trainload(cache, *policies, "retrain", "tick", config, "--at", at, folder=folder)
        whole = time.time() - began
        (journal,) = folder.glob("**/events.jsonl")
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        sources = [event["data"]["source"] for event in events if event["kind"] == "build"]
        new = kernels(cache) - before
        return Tick(first_step(journal.parent) - began, whole, len(new), sources)


def kernels(cache: Path) -> set[Path]:
    """Return the libraries that the compiler has written to a cache."""
    return set((cache / "trainload" / "kernels").rglob("*.so"))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS / "fresh_tick.json")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(Path(__file__).parent)]
    from tests.packaging.places import BUCKET, KEYS, s3_server

    found: dict[str, list[Tick]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="trainload-pods-") as name, s3_server() as url:
        os.environ |= {**KEYS, "AWS_ENDPOINT_URL": url, "OMP_NUM_THREADS": "1"}
        scratch = Path(name)
        package = scratch / "package.tl"
        alone(write_package, str(package), options.width, options.layers, False)
        key, policy = make_policy(scratch)
        pods = Pods(scratch, f"s3://{BUCKET}", policy)
        trainload(scratch / "maker", "push", package, pods.store, "--line", LINE)
        caches = [scratch / f"cache-{number}" for number in range(options.rounds + 1)]
        found["no build"].append(pods.tick(caches.pop(), trusted=False))
        config = pods.config(scratch / "maker-of-builds")
        began = time.time()
        trainload(scratch / "maker", "retrain", "build", config, "--key", key)
        making = time.time() - began
        note(f"the build took {making:.1f} s")
        for cache in caches:
            for kind in KINDS[1:]:
                found[kind].append(pods.tick(cache, trusted=True))
                note(f"{kind}: {found[kind][-1]}")
    rows = [
        (
            kind,
            ", ".join(f"{each.first_step:.1f}" for each in ticks),
            f"{median(each.first_step for each in ticks):.1f}",
            f"{median(each.whole for each in ticks):.1f}",
            ", ".join(str(each.kernels) for each in ticks),
            ", ".join(source for each in ticks for source in each.sources) or "its cache",
        )
        for kind, ticks in found.items()
    ]
    titles = (
        *("", "to the first step, s", "median", "whole tick, s", "kernels compiled"),
        "the build is from",
    )
    screen().print(table("A tick in a fresh pod, everything in S3", titles, rows, marked=()))
    save(
        {
            "machine": machine(),
            "making": making,
            "ticks": {kind: [asdict(each) for each in ticks] for kind, ticks in found.items()},
        },
        options.out,
    )


if __name__ == "__main__":
    main()
