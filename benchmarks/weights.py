"""Compare writing, reading and sharding several GB of safetensors with plain reads.

    python benchmarks/weights.py [--gib 4] [--rounds 3]

The weights are generated tensor by tensor while they are written, so the process never holds all of
them. Then every byte is read, alternately and in separate processes, by `dd`, by a plain loop, by
safetensors (which verifies nothing) and by the package's reader (which verifies every digest);
before each read, the files are evicted from the page cache. Finally, each of N ranks reads its
slices of ZeRO-3's buckets, and the bytes that it reads are counted. Writes
benchmarks/results/weights.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "weights.json"
GIB = 2**30
SHARD = 512 * 2**20
WIDTH = 4096
"""Size of a parameter, which is (WIDTH, WIDTH) float32: 64 MiB."""
WAYS = ("dd", "plain read", "safetensors", "trainload")
RANKS = (1, 2, 4, 8)


class Made(Mapping[str, torch.Tensor]):
    """State whose tensors are generated on access."""

    def __init__(self, count: int) -> None:
        self._names = [f"layer{number:03d}.weight" for number in range(count)]

    def __getitem__(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._names.index(name))
        return torch.randn(WIDTH, WIDTH, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def resident() -> int:
    """Return the peak resident memory of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(folder: Path, count: int) -> dict[str, float]:
    """Write only the weights of a package. Returns seconds and additional memory."""
    from trainload.packaging.format.manifest_records import ParameterEntry
    from trainload.packaging.tensors.safetensors_file import TensorSpec
    from trainload.packaging.tensors.weight_shards import write_weights

    state = Made(count)
    entries = [
        ParameterEntry(
            name=name, dtype="float32", shape=(WIDTH, WIDTH), trainable=True, alias_of=None
        )
        for name in state
    ]
    specs = [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in entries]
    state[next(iter(state))]
    before, began = resident(), time.perf_counter()
    write_weights(folder, (specs, []), ((name, state[name]) for name in state), SHARD)
    return {"seconds": time.perf_counter() - began, "resident": resident() - before}


def manifest_of(folder: Path, count: int) -> Any:
    """Return a manifest that lists these weights and has only what a weight reader needs."""
    from trainload.autograd_trace.graphs import GroupRecipe, Recipe
    from trainload.core.canonical_json import sha256_file
    from trainload.packaging.format.manifest import Manifest
    from trainload.packaging.format.manifest_records import FileEntry, ParameterEntry

    names = list(Made(count))
    listed = {
        f"weights/{path.name}": FileEntry(
            media_type="application/octet-stream",
            # the reader verifies chunks instead
            sha256=sha256_file(path) if path.suffix == ".json" else "0" * 64,
            size=path.stat().st_size,
        )
        for path in sorted((folder / "weights").iterdir())
    }
    recipe = Recipe(
        optimizer="SGD",
        groups=(GroupRecipe(name="all", parameters=tuple(names), learning_rates=(0.1,)),),
        steps=1,
        global_batch=1,
    )
    parameters = tuple(
        ParameterEntry(
            name=name, dtype="float32", shape=(WIDTH, WIDTH), trainable=True, alias_of=None
        )
        for name in names
    )
    nothing: dict[str, Any] = {
        "features": (),
        "graphs": {},
        "buffers": (),
        "constants": (),
        "updates": (),
        "ops": {},
    }
    nothing |= {"higher_order_ops": (), "op_libraries": {}, "passes": (), "parent": None}
    return Manifest(parameters=parameters, recipe=recipe, files=listed, **nothing)


def read(folder: Path, way: str) -> dict[str, float]:
    """Read every byte in one way. Returns seconds and additional memory."""
    files = sorted((folder / "weights").glob("*.safetensors"))
    count = len(
        json.loads((folder / "weights/model.safetensors.index.json").read_bytes())["weight_map"]
    )
    if way == "trainload":
        from trainload.packaging.tensors.weight_shards import WeightReader

        reader = WeightReader(folder, manifest_of(folder, count))
    if way == "safetensors":
        import safetensors
    torch.empty(1).add_(1)
    before, began = resident(), time.perf_counter()
    if way == "dd":
        for file in files:
            subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=4M", "status=none"], check=True)
    elif way == "plain read":
        block = bytearray(4 * 2**20)
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(block):
                    pass
    elif way == "safetensors":
        for file in files:
            with safetensors.safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    opened.get_tensor(name).clone()
    else:
        for name in reader.names():
            reader.tensor(name)
    return {"seconds": time.perf_counter() - began, "resident": resident() - before}


def rank(folder: Path, index: int, world: int) -> dict[str, float]:
    """Read the slices of one of `world` ranks.

    A slice is a contiguous part of a bucket of four flattened parameters.

    Returns seconds, bytes read, bytes owned and additional memory.
    """
    from trainload.packaging.tensors.weight_shards import WeightReader

    count = len(
        json.loads((folder / "weights/model.safetensors.index.json").read_bytes())["weight_map"]
    )
    reader = WeightReader(folder, manifest_of(folder, count))
    names, elements = list(reader.names()), WIDTH * WIDTH
    asked = _read_so_far()
    before, began, owned = resident(), time.perf_counter(), 0
    for first in range(0, len(names), 4):
        bucket = names[first : first + 4]
        length = len(bucket) * elements
        low, high = index * length // world, (index + 1) * length // world
        for number, name in enumerate(bucket):
            start, stop = max(low - number * elements, 0), min(high - number * elements, elements)
            if start < stop:
                owned += reader.slice(name, start, stop).nbytes
    return {
        "seconds": time.perf_counter() - began,
        "bytes": _read_so_far() - asked,
        "owned": owned,
        "resident": resident() - before,
    }


def _read_so_far() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def cold(folder: Path) -> None:
    """Evict the files from the page cache."""
    for file in (folder / "weights").iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def child(*arguments: object) -> dict[str, float]:
    """Run this script in a child process and return its printed result."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    made = Table(*columns, title=title)
    for row in rows:
        made.add_row(*row)
    Console().print(made)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        verb, folder, *rest = arguments.child
        done = {
            "write": lambda: write(Path(folder), int(rest[0])),
            "read": lambda: read(Path(folder), rest[0]),
            "rank": lambda: rank(Path(folder), int(rest[0]), int(rest[1])),
        }[verb]()
        print(json.dumps(done))
        return
    count = int(arguments.gib * GIB) // (WIDTH * WIDTH * 4)
    folder = Path(tempfile.mkdtemp(prefix="weights-", dir=os.environ.get("TMPDIR")))
    try:
        written = child("write", folder, count)
        reads: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(arguments.rounds):
            order = WAYS if number % 2 == 0 else tuple(reversed(WAYS))
            for way in order:
                cold(folder)
                reads[way].append(child("read", folder, way))
        ranks = {}
        for world in RANKS:
            cold(folder)
            ranks[world] = [child("rank", folder, index, world) for index in range(world)]
    finally:
        shutil.rmtree(folder)
    size = count * WIDTH * WIDTH * 4
    median = {way: statistics.median(each["seconds"] for each in reads[way]) for way in WAYS}
    shards = f"{size / GIB:.1f} GiB in shards of {SHARD // 2**20} MiB"
    table(
        f"writing {shards}",
        ("seconds", "GiB/s", "resident on top, MiB", "of one shard"),
        [
            (
                f"{written['seconds']:.1f}",
                f"{size / GIB / written['seconds']:.2f}",
                _mib(written["resident"]),
                f"{written['resident'] / SHARD:.2f}",
            )
        ],
    )
    table(
        f"reading it, from disk; medians of {arguments.rounds}",
        ("way", "seconds", "GiB/s", "of dd's speed", "resident on top, MiB", "of one shard"),
        [
            (
                way,
                f"{median[way]:.2f}",
                f"{size / GIB / median[way]:.2f}",
                f"{median['dd'] / median[way]:.2f}",
                _mib(max(each["resident"] for each in reads[way])),
                f"{max(each['resident'] for each in reads[way]) / SHARD:.2f}",
            )
            for way in WAYS
        ],
    )
    table(
        "what a rank reads of it",
        (
            "ranks",
            "bytes asked by the one that asks most",
            "of all",
            "of 1/N",
            "resident on top, MiB",
        ),
        [
            (
                str(world),
                f"{max(each['bytes'] for each in found):,.0f}",
                f"{max(each['bytes'] for each in found) / size:.4f}",
                f"{max(each['bytes'] for each in found) / (size / world):.3f}",
                _mib(max(each["resident"] for each in found)),
            )
            for world, found in ranks.items()
        ],
    )
    told = {
        "bytes": size,
        "shard": SHARD,
        "written": written,
        "reads": reads,
        "ranks": {str(world): found for world, found in ranks.items()},
    }
    RESULTS.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"written: {RESULTS}")


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f}"


if __name__ == "__main__":
    main()
