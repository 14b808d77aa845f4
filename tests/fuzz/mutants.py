"""Mutants of a package: bytes, JSON values, headers and files are changed at random.

Its digests are left wrong or are recomputed.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hostile.packages import MANIFEST, SEAL, STEP, reseal_step
from tests.packaging.tampering import rechunk, reseal, write_manifest

from trainload.core.canonical_json import canonical_json

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of a package.

    Attributes:
        how: description of the change.
        files: path -> new content; None: the file is removed.
        sealed: True if digests and checksums are recomputed.
    """

    how: str
    files: Mapping[str, bytes | None]
    sealed: bool

    def apply(self, folder: Path) -> None:
        """Change the package in `folder`."""
        for file, data in self.files.items():
            path = folder / file
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        if not self.sealed:
            return
        if MANIFEST in self.files:
            write_manifest(folder, json.loads((folder / MANIFEST).read_bytes()))
            return
        if (
            any(file.startswith("weights/model-") for file in self.files)
            and "weights/chunks.json" not in self.files
        ):
            rechunk(folder)
        if STEP in self.files:
            reseal_step(folder)
        if any(not file.startswith(("derived/", "debug/")) for file in self.files):
            reseal(folder)

    def to_json(self) -> str:
        files = {
            file: None if data is None else base64.b64encode(data).decode()
            for file, data in self.files.items()
        }
        return (
            json.dumps(
                {"how": self.how, "sealed": self.sealed, "files": files}, indent=1, sort_keys=True
            )
            + "\n"
        )

    @classmethod
    def from_json(cls, text: str) -> Mutant:
        told = json.loads(text)
        files = {
            file: None if data is None else base64.b64decode(data)
            for file, data in told["files"].items()
        }
        return cls(told["how"], files, told["sealed"])


def files_of(folder: Path) -> dict[str, bytes]:
    """Return path -> content for every file of a package."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def restore(folder: Path, files: Files, changed: Mutant) -> None:
    """Undo the changes of `apply`."""
    for file in {*changed.files, MANIFEST, "weights/chunks.json", SEAL}:
        path = folder / file
        if file in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[file])
        elif path.exists():
            path.unlink()
    for inner, _, names in os.walk(folder, topdown=False):
        if not names and not any(Path(inner).iterdir()):
            shutil.rmtree(inner)


# Values

_WORDS = [
    "",
    "x",
    "s0",
    "train",
    "weight",
    "Infinity",
    "NaN",
    "self",
    "torch.ops.aten.add.Tensor",
    "torch.ops.aten.from_file.default",
]
_WORDS += [
    "torch.ops.higher_order.cond",
    "os.system",
    "../x",
    "/dev/zero",
    "__class__",
    "import",
    "builtins.dict",
    "as_none",
    "a.b",
    "\n",
    "\x00",
]
_WORDS += [
    "Symbol('s0', integer=True)",
    "Pow(Symbol('s0'), Integer(64))",
    "Mod(Symbol('s0'), Integer(0))",
    "float64",
    "bool",
    "\U0001f600",
]
_NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    13,
    64,
    127,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    -(2**63),
    2**63,
    2**64 - 1,
    2**64,
]
_STRANGE: list[Any] = [
    None,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    [],
    {},
    [[]],
    [{}],
    {"as_int": 7},
    {"as_name": "x"},
    {"as_none": True},
]
_STRANGE += [
    {"as_tensor": {"name": "x"}},
    {"as_expr": {"expr_str": "Symbol('s0')", "hint": None}},
    {"as_string": "x"},
    {"as_bool": False},
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        holder = left.pop()
        for key, inner in holder.items() if isinstance(holder, dict) else enumerate(holder):
            found.append((holder, key))
            if isinstance(inner, dict | list):
                left.append(inner)
    return found


def _tweaked(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            [
                value + 1,
                value - 1,
                -value,
                value * 2,
                value + 2**32,
                rng.choice(_NUMBERS),
                float(value),
            ]
        )
    if isinstance(value, float):
        return rng.choice(
            [
                -value,
                value + 1,
                value / 3,
                int(value) if abs(value) < 2**63 else 0,
                rng.choice(_NUMBERS),
            ]
        )
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return rng.choice(
            [
                value[:at] + rng.choice("_.0x'(,é") + value[at + 1 :],
                value[:at],
                value + value[-1],
                rng.choice(_WORDS),
            ]
        )
    return rng.choice(_STRANGE)


def mutate_value(document: Any, rng: random.Random, others: list[Any]) -> Any:
    """Return a changed copy of a JSON value. Values of `others` may be inserted."""
    changed = copy.deepcopy(document)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = _places(changed)
        if not places:
            return rng.choice(_STRANGE)
        holder, key = places[rng.randrange(len(places))]
        kind = rng.randrange(7)
        if kind == 0:
            holder[key] = rng.choice(
                [rng.choice(_STRANGE), rng.choice(_NUMBERS), rng.choice(_WORDS)]
            )
        elif kind == 1:
            del holder[key]
        elif kind == 2:
            other, name = places[rng.randrange(len(places))]
            holder[key] = copy.deepcopy(other[name])
        elif kind == 3:
            other, name = rng.choice(_places(rng.choice(others)) or [([None], 0)])
            holder[key] = copy.deepcopy(other[name])
        elif kind == 4 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif kind == 4 and isinstance(holder, dict):
            holder[rng.choice(_WORDS)] = copy.deepcopy(holder[key])
        elif kind == 5 and isinstance(holder, list):
            to = rng.randrange(len(holder))
            holder[key], holder[to] = holder[to], holder[key]
        else:
            holder[key] = _tweaked(holder[key], rng)
    return changed


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return a changed copy of `data`."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice([1, 1, 2, 8, 64])
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(length))
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            del changed[at:]
        else:
            changed[at : at + length] = rng.choice(
                [b'"', b"[", b"{", b"}", b",", b"\\", b"\xff", b"9" * 30, b"null", bytes(8)]
            )
    return bytes(changed)


# Mutants


def _encoded(value: Any) -> bytes | None:
    try:
        return canonical_json(value)
    except ValueError:  # for example a lone surrogate, which canonical JSON cannot represent
        return None


def _of_bytes(files: Files, rng: random.Random, *, sealed: bool) -> Mutant:
    file = rng.choice(sorted(files))
    return Mutant(
        f"bytes of {file}", {file: mutate_bytes(files[file], rng)}, sealed and file != MANIFEST
    )


def _of_json(files: Files, rng: random.Random) -> Mutant:
    documents = [
        file for file in sorted(files) if file.endswith(".json") and not file.startswith("debug/")
    ]
    weights = [
        4 if file.startswith(("graphs/", "derived/")) or file == MANIFEST else 1
        for file in documents
    ]
    (file,) = rng.choices(documents, weights)
    others = [json.loads(files[rng.choice(documents)])]
    value = json.loads(files[file])
    if file in (MANIFEST, SEAL):
        value.pop("checksum")
    data = _encoded(mutate_value(value, rng, others))
    changed = json.loads(data) if data is not None else value
    if file in (MANIFEST, SEAL) and not isinstance(changed, dict):
        changed = value
    return Mutant(f"value of {file}", {file: canonical_json(changed)}, sealed=True)


def _of_header(files: Files, rng: random.Random) -> Mutant:
    file = rng.choice([file for file in sorted(files) if file.endswith(".safetensors")])
    data = files[file]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = _encoded(mutate_value(header, rng, [header])) or b"{}"
    text += b" " * (-len(text) % 8)
    stated = rng.choice([len(text)] * 8 + [0, len(text) + 8, 2**63])
    return Mutant(
        f"header of {file}",
        {file: stated.to_bytes(8, "little") + text + data[8 + length :]},
        sealed=True,
    )


def _of_files(files: Files, rng: random.Random) -> Mutant:
    names = sorted(file for file in files if file != MANIFEST)
    first, second = rng.choice(names), rng.choice(names)
    kind = rng.randrange(4)
    if kind == 0:
        return Mutant(f"{first} taken away", {first: None}, sealed=False)
    if kind == 1:
        return Mutant(f"{first} as {second}", {second: files[first]}, sealed=rng.random() < 0.7)
    if kind == 2:
        return Mutant(
            f"{first} and {second} exchanged",
            {first: files[second], second: files[first]},
            sealed=rng.random() < 0.7,
        )
    added = rng.choice(
        ["x.py", "graphs/x.json", "weights/x.bin", "extensions/x.whl", "TRAIN.json", f"{first}~"]
    )
    return Mutant(f"{added} added", {added: files[first]}, sealed=False)


_KINDS: list[tuple[int, Callable[[Files, random.Random], Mutant]]] = [
    (2, lambda files, rng: _of_bytes(files, rng, sealed=False)),
    (2, lambda files, rng: _of_bytes(files, rng, sealed=True)),
    (10, _of_json),
    (2, _of_header),
    (1, _of_files),
]


def mutant(files: Files, rng: random.Random) -> Mutant:
    """Return a random mutant of a package."""
    ((_, make),) = rng.choices(_KINDS, [weight for weight, _ in _KINDS])
    return make(files, rng)
