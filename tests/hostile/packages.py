"""Hostile packages: each case changes a valid package and recomputes all digests.

The package is that of tests/packaging/jobs.py, with a derived graph that is sealed with the user's
own key.
"""

from __future__ import annotations

import hmac
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hostile.graphs import ATTACKS, Change
from tests.packaging.tampering import UNKNOWN_LIBRARY, edit_graph, edit_manifest, rechunk, reseal

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.packaging.format.user_key import user_key

KEY = "cpu-torch2.13.0"
STEP = f"derived/{KEY}/step.json"
SEAL = f"derived/{KEY}/seal.json"
MANIFEST = "manifest.json"
TRAIN = "graphs/train.json"
INDEX = "weights/model.safetensors.index.json"
CHUNKS = "weights/chunks.json"
FIRST = "weights/model-00001-of-00003.safetensors"
CONSTANTS = "constants.safetensors"

Attack = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Case:
    """An attack.

    Attributes:
        what: description of the attack.
        file: file that the error message names.
        attack: changes the folder of a package.
    """

    what: str
    file: str
    attack: Attack


# Files


def put(package: Path, file: str, data: bytes) -> None:
    """Replace a file, and recompute the digests that cover it."""
    (package / file).write_bytes(data)
    if file == STEP:
        reseal_step(package)
    elif file.startswith("weights/model-") and file.endswith(".safetensors"):
        rechunk(package)
    if not file.startswith(("derived/", "debug/", "signatures/")) and file != MANIFEST:
        reseal(package)


def reseal_step(package: Path) -> None:
    """Seal the step graph with the user's own key: the attacker may be their other program."""
    data = (package / STEP).read_bytes()
    fields = {
        name: value
        for name, value in json.loads((package / SEAL).read_bytes()).items()
        if name not in ("mac", "checksum")
    }
    fields |= {"sha256": sha256_bytes(data), "size": len(data)}
    fields["mac"] = hmac.digest(user_key(create=True), canonical_json(fields), "sha256").hex()
    (package / SEAL).write_bytes(
        canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))})
    )


def edit_step(package: Path, change: Change) -> None:
    document = json.loads((package / STEP).read_bytes())
    change(document["graph"])
    put(package, STEP, canonical_json(document))


def text(file: str, change: Callable[[bytes], bytes]) -> Attack:
    return lambda package: put(package, file, change((package / file).read_bytes()))


def manifest(change: Callable[[dict[str, Any]], object]) -> Attack:
    return lambda package: edit_manifest(package, change)


def listed(path: str) -> Attack:
    """Return an attack that lists a path, without such a file."""
    entry = {"media_type": "text/plain", "sha256": sha256_bytes(b""), "size": 0}
    return manifest(lambda fields: fields["files"].update({path: entry}))


def header(file: str, change: Callable[[dict[str, Any]], object]) -> Attack:
    """Return an attack that changes the header of a file of tensors."""

    def attack(package: Path) -> None:
        data = (package / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + length])
        change(fields)
        encoded = canonical_json(fields)
        encoded += b" " * (-len(encoded) % 8)
        put(package, file, len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])

    return attack


def tensor(file: str, **changes: object) -> Attack:
    """Return an attack that changes the header's entry of a file's last tensor."""
    return header(
        file,
        lambda fields: fields[
            max(fields, key=lambda name: fields[name].get("data_offsets", [0])[0])
        ].update(changes),
    )


def _as_fractions(fields: dict[str, Any]) -> None:
    """Write 8.0 for 8 in the shape and offsets of the last tensor: Python considers them equal."""
    entry = fields[max(fields, key=lambda name: fields[name].get("data_offsets", [0])[0])]
    entry.update({key: [float(value) for value in entry[key]] for key in ("shape", "data_offsets")})


def header_text(file: str, encoded: bytes) -> Attack:
    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        padded = encoded + b" " * (-len(encoded) % 8)
        return len(padded).to_bytes(8, "little") + padded + data[8 + length :]

    return text(file, change)


def weight_map(home: str) -> Attack:
    def change(data: bytes) -> bytes:
        fields = json.loads(data)
        fields["weight_map"][min(fields["weight_map"])] = home
        return canonical_json(fields)

    return text(INDEX, change)


def chunks(change: Callable[[dict[str, Any]], object]) -> Attack:
    def attack(data: bytes) -> bytes:
        fields = json.loads(data)
        change(fields)
        return canonical_json(fields)

    return text(CHUNKS, attack)


def link(file: str, to: str) -> Attack:
    def attack(package: Path) -> None:
        path = package / file
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        path.symlink_to(to)

    return attack


def _pipe(package: Path) -> None:
    (package / TRAIN).unlink()
    os.mkfifo(package / TRAIN)


def _socket(package: Path) -> None:
    (package / "assets/LICENSE").unlink()
    here = os.open(".", os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(package / "assets")  # the length of a socket's path is limited
        try:
            bound.bind("LICENSE")
        finally:
            os.fchdir(here)
            os.close(here)


def _two_million_nodes(data: bytes) -> bytes:
    node = (
        b'{"inputs":[],"is_hop_single_tensor_return":null,"metadata":{},"name":"n","outputs":[],'
        b'"target":"torch.ops.aten.t.default"}'
    )
    return data.replace(b'"nodes":[', b'"nodes":[' + (node + b",") * 2_000_000, 1)


def _sparse(file: str, size: int) -> Attack:
    """Return an attack that makes a file sparse, of any size, and lists it with this size."""

    def attack(package: Path) -> None:
        os.truncate(package / file, size)
        if file != MANIFEST:
            edit_manifest(package, lambda fields: fields["files"][file].update(size=size))

    return attack


def _key_twice_in_the_manifest(package: Path) -> None:
    data = (package / MANIFEST).read_bytes()
    (package / MANIFEST).write_bytes(data.replace(b'"buffers":', b'"buffers":[],"buffers":', 1))


def _another_checksum(package: Path) -> None:
    fields = json.loads((package / MANIFEST).read_bytes())
    (package / MANIFEST).write_bytes(canonical_json({**fields, "checksum": "0" * 64}))


def _seal_of_another_key(package: Path) -> None:
    fields = json.loads((package / SEAL).read_bytes())
    fields = {name: value for name, value in fields.items() if name != "checksum"} | {
        "key": "../../x"
    }
    (package / SEAL).write_bytes(
        canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))})
    )


def _other_ports(package: Path) -> None:
    document = json.loads((package / STEP).read_bytes())
    document["inputs"][0] = ["os.system", "x"]
    put(package, STEP, canonical_json(document))


def _other_tags(package: Path) -> None:
    document = json.loads((package / STEP).read_bytes())
    document["tags"] = {next(iter(document["tags"]), "x"): {"__class__": "os.system"}}
    put(package, STEP, canonical_json(document))


def _extra(file: str) -> Attack:
    def attack(package: Path) -> None:
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text("x")

    return attack


def _missing(file: str) -> Attack:
    return lambda package: (package / file).unlink()


def _a_library_that_is_a_module(fields: dict[str, Any]) -> None:
    fields["op_libraries"]["os"] = {**UNKNOWN_LIBRARY, "distribution": "os", "modules": ["os"]}


def _shapes_that_overflow(fields: dict[str, Any]) -> None:
    fields["parameters"][0]["shape"] = [2**31, 2**31, 2**31]


# Cases

_DEEP = b"[" * 100_000
_PATHS = (
    "../x",
    "a/../../x",
    "/etc/passwd",
    "//host/x",
    "C:\\x",
    "a/./b",
    "a//b",
    "a/",
    "",
    "x" * 513,
    "con",
    "nul.txt",
    "a.",
    "a\nb",
    "a\x00b",
    "\u0430",
    ".hidden",
    "dev/~",
    "manifest.json",
    "debug/x",
    "derived/x",
    "signatures/x",
)


def _json_cases() -> Iterator[Case]:
    for file in (MANIFEST, TRAIN, INDEX, CHUNKS, STEP, SEAL):
        yield Case("JSON of 100,000 levels", file, text(file, lambda data: _DEEP))
        yield Case(
            "JSON of 100,000 levels within",
            file,
            text(file, lambda data: data[:-1] + b',"zz":' + _DEEP),
        )
        yield Case("NaN", file, text(file, lambda data: data[:-1] + b',"zz":NaN}'))
        yield Case(
            "a number that reads as infinity",
            file,
            text(file, lambda data: data[:-1] + b',"zz":1e999}'),
        )
        yield Case("invalid UTF-8", file, text(file, lambda data: data[:-1] + b',"zz":"\xff\xfe"}'))
        yield Case(
            "a lone surrogate", file, text(file, lambda data: data[:-1] + b',"zz":"\\ud800"}')
        )
        yield Case(
            "an integer of 5,000 digits",
            file,
            text(file, lambda data: data[:-1] + b',"zz":' + b"9" * 5000 + b"}"),
        )
        yield Case(
            "a space that canonical JSON has not", file, text(file, lambda data: data + b" ")
        )
        yield Case("a byte order mark", file, text(file, lambda data: b"\xef\xbb\xbf" + data))
        yield Case("UTF-16", file, text(file, lambda data: data.decode().encode("utf-16")))
        yield Case("no bytes", file, text(file, lambda data: b""))
        yield Case("another kind of value", file, text(file, lambda data: b"[]"))
        yield Case("an unknown field", file, text(file, lambda data: data[:-1] + b',"zz":1}'))
        yield Case("a key twice", file, text(file, lambda data: b'{"":1,"":2,' + data[1:]))


def _manifest_cases() -> Iterator[Case]:
    yield Case("a key twice, both known", MANIFEST, _key_twice_in_the_manifest)
    yield Case("another checksum", MANIFEST, _another_checksum)
    yield Case("a manifest of a terabyte", MANIFEST, _sparse(MANIFEST, 2**40))
    yield Case(
        "an unknown field, sealed",
        MANIFEST,
        manifest(lambda fields: fields.update(guards_code=["x"])),
    )
    yield Case(
        "a newer format", MANIFEST, manifest(lambda fields: fields.update(format_version=999))
    )
    yield Case(
        "a fraction for a count",
        MANIFEST,
        manifest(lambda fields: fields["recipe"].update(steps=8.0)),
    )
    yield Case(
        "a version that is no number",
        MANIFEST,
        manifest(lambda fields: fields.update(format_version=True)),
    )
    yield Case(
        "a feature that nobody knows",
        MANIFEST,
        manifest(lambda fields: fields["features"].append("zz-run-code")),
    )
    yield Case(
        "an operator library that is a module", MANIFEST, manifest(_a_library_that_is_a_module)
    )
    yield Case(
        "an operator that is none",
        MANIFEST,
        manifest(lambda fields: fields["ops"].update({"os.system": "x"})),
    )
    yield Case(
        "an alias of itself",
        MANIFEST,
        manifest(
            lambda fields: fields["parameters"][0].update(alias_of=fields["parameters"][0]["name"])
        ),
    )
    yield Case(
        "a parameter twice",
        MANIFEST,
        manifest(lambda fields: fields["parameters"].append(fields["parameters"][0])),
    )
    yield Case(
        "a shape below zero",
        MANIFEST,
        manifest(lambda fields: fields["parameters"][0].update(shape=[-1])),
    )
    yield Case(
        "a shape of 2^63",
        MANIFEST,
        manifest(lambda fields: fields["parameters"][0].update(shape=[2**63])),
    )
    yield Case(
        "a name of a parameter that is a path",
        MANIFEST,
        manifest(lambda fields: fields["buffers"][0].update(name="../../x")),
    )
    yield Case(
        "a graph's file elsewhere",
        MANIFEST,
        manifest(lambda fields: fields["graphs"]["train"].update(file="../train.json")),
    )
    yield Case(
        "a graph's file that is the manifest",
        MANIFEST,
        manifest(lambda fields: fields["graphs"]["train"].update(file=MANIFEST)),
    )
    yield Case(
        "a graph's file that is another's",
        MANIFEST,
        manifest(lambda fields: fields["graphs"]["train"].update(file="graphs/eval.json")),
    )
    yield Case(
        "constants without their file",
        MANIFEST,
        manifest(lambda fields: fields["files"].pop(CONSTANTS)),
    )
    yield Case(
        "weights without their index", MANIFEST, manifest(lambda fields: fields["files"].pop(INDEX))
    )
    yield Case(
        "a negative size", MANIFEST, manifest(lambda fields: fields["files"][TRAIN].update(size=-1))
    )
    yield Case(
        "a file's digest in capitals",
        MANIFEST,
        manifest(lambda fields: fields["files"][TRAIN].update(sha256="A" * 64)),
    )
    for path in _PATHS:
        shown = path if path.isprintable() and len(path) < 40 else ascii(path[:20])
        yield Case(f"the path {shown or '(empty)'}", MANIFEST, listed(path))
    yield Case("names that differ in case only", MANIFEST, listed("graphs/Train.json"))
    yield Case("folders that differ in case only", MANIFEST, listed("Graphs/other.json"))


def _folder_cases() -> Iterator[Case]:
    yield Case("a listed file that is not there", "assets/LICENSE", _missing("assets/LICENSE"))
    yield Case("weights that are not there", FIRST, _missing(FIRST))
    yield Case("a file that is not listed", "extra.py", _extra("extra.py"))
    yield Case(
        "a file of weights that is not listed",
        "weights/pytorch_model.bin",
        _extra("weights/pytorch_model.bin"),
    )
    yield Case("another size than listed", TRAIN, lambda package: os.truncate(package / TRAIN, 10))
    yield Case("a link to a file", TRAIN, link(TRAIN, "/etc/hostname"))
    yield Case("a link to a device", FIRST, link(FIRST, "/dev/zero"))
    yield Case("a link that leads nowhere", FIRST, link(FIRST, "nowhere"))
    yield Case("a link to a folder", "weights", link("weights", "/tmp"))
    yield Case("a link in derived/", STEP, link(STEP, "/etc/hostname"))
    yield Case("a manifest that is a link", MANIFEST, link(MANIFEST, "graphs/train.json"))
    yield Case("a pipe", TRAIN, _pipe)
    yield Case("a socket", "assets/LICENSE", _socket)
    yield Case("a graph file of a terabyte", TRAIN, _sparse(TRAIN, 2**40))
    yield Case("an index of a terabyte", INDEX, _sparse(INDEX, 2**40))


def _tensor_cases() -> Iterator[Case]:
    for file in (FIRST, CONSTANTS):
        yield Case(
            "a header that claims 2^60 bytes",
            file,
            text(file, lambda data: (2**60).to_bytes(8, "little") + data[8:]),
        )
        yield Case(
            "a header longer than the file",
            file,
            text(file, lambda data: len(data).to_bytes(8, "little") + data[8:]),
        )
        yield Case("a file without bytes", file, text(file, lambda data: b""))
        yield Case("a file of 7 bytes", file, text(file, lambda data: data[:7]))
        yield Case("a header of 100,000 levels", file, header_text(file, _DEEP))
        yield Case("a key twice in a header", file, header_text(file, b'{"a":1,"a":1}'))
        yield Case("no JSON in a header", file, header_text(file, b"\x80\x04\x95."))
        yield Case("a tensor that overlaps another", file, tensor(file, data_offsets=[0, 4]))
        yield Case(
            "a tensor past the end of the file", file, tensor(file, data_offsets=[2**40, 2**40 + 4])
        )
        yield Case("a tensor before the start", file, tensor(file, data_offsets=[-8, -4]))
        yield Case("a tensor of 2^60 elements", file, tensor(file, shape=[2**30, 2**30]))
        yield Case("a tensor of negative sizes", file, tensor(file, shape=[-1, -1]))
        yield Case("sizes of a tensor with fractions", file, header(file, _as_fractions))
        yield Case("a tensor of no elements", file, tensor(file, shape=[0], data_offsets=[0, 0]))
        yield Case("another dtype", file, tensor(file, dtype="F64"))
        yield Case("an unknown dtype", file, tensor(file, dtype="PICKLE"))
        yield Case(
            "one tensor more",
            file,
            header(
                file,
                lambda fields: fields.update(
                    {"../../x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
                ),
            ),
        )
        yield Case(
            "metadata with something in it",
            file,
            header(file, lambda fields: fields["__metadata__"].update(code="x")),
        )
        yield Case("bytes after the last tensor", file, text(file, lambda data: data + bytes(8)))
        yield Case("a pickle", file, text(file, lambda data: b"\x80\x04cos\nsystem\n(S'true'\ntR."))
    yield Case(
        "a shape whose product overflows", "graphs/eval.json", manifest(_shapes_that_overflow)
    )
    yield Case("an index that leaves the folder", INDEX, weight_map("../../../etc/passwd"))
    yield Case("an index that names the constants", INDEX, weight_map("../constants.safetensors"))
    yield Case("chunks of no bytes", CHUNKS, chunks(lambda fields: fields.update(chunk_size=0)))
    yield Case(
        "fewer chunks than the file has",
        CHUNKS,
        chunks(lambda fields: fields["files"].update({FIRST: []})),
    )
    yield Case(
        "chunks of another file",
        CHUNKS,
        chunks(lambda fields: fields["files"].update({"../x": []})),
    )
    yield Case(
        "the digest of other bytes",
        FIRST,
        chunks(lambda fields: fields["files"].update({FIRST: ["0" * 64]})),
    )


def _graph_cases() -> Iterator[Case]:
    yield Case("a graph of two million nodes", TRAIN, text(TRAIN, _two_million_nodes))
    yield Case("a step graph of two million nodes", STEP, text(STEP, _two_million_nodes))
    for what, change in ATTACKS.items():
        yield Case(what, TRAIN, lambda package, change=change: edit_graph(package, change))  # type: ignore[misc]
        yield Case(what, STEP, lambda package, change=change: edit_step(package, change))  # type: ignore[misc]
    yield Case("a seal whose key is a path", SEAL, _seal_of_another_key)
    yield Case("an input of an unknown kind", STEP, _other_ports)
    yield Case("a tag that is not allowed", STEP, _other_tags)


CASES: tuple[Case, ...] = (
    *_manifest_cases(),
    *_json_cases(),
    *_folder_cases(),
    *_tensor_cases(),
    *_graph_cases(),
)
