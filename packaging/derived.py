"""derived/: step graphs, kept beside the program so that a second start on the same device need not derive them again.

A derived graph could be replaced by one that trains something else, and nothing in the manifest would tell. So it is used only where
its maker is known: its seal carries an HMAC with a key that the user's state directory holds and no package can. Anything else is
treated as absent, and derived again.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.errors import IntegrityError, PackageError, StorageError, UnsafePackageError
from trainload.packaging.canonical import MAX_BYTES, canonical_json, parse_canonical, sha256_bytes
from trainload.packaging.files import open_inside, walk, write_bytes
from trainload.packaging.graph_json import flat_from_json, flat_to_json
from trainload.packaging.read import Package
from trainload.packaging.validate import validate_graph

STATE_DIR = "TRAINLOAD_STATE_DIR"
"""Environment variable: the folder of the user's key. By default ~/.local/state/trainload."""
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_KEY_BYTES = 32
_TAGS = ("partitioner_tag",)
"""Node metadata that a step graph keeps, beside what begins with "trainload": strings, numbers and booleans."""


class Seal(BaseModel):
    """seal.json: which program and which file it vouches for. `mac` is the HMAC-SHA256 of the other fields as canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    program: str
    sha256: str
    size: int
    mac: str

    def message(self) -> bytes:
        """What the HMAC is taken over."""
        return canonical_json(self.model_dump(exclude={"mac"}))

    def to_bytes(self) -> bytes:
        """The file: canonical JSON of the fields, and of `checksum`, the sha256 of the same without it."""
        fields = self.model_dump()
        return canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))})


def write_derived(package: Package, key: str, step: StepGraph) -> None:
    """Keep a step graph in the package, sealed as made here. One that is there already under this key is replaced.

    Args:
        package: the package that it was derived from.
        key: what it depends on beside the program: device kind and torch version, say "cuda-torch2.13.0".
        step: the graph. All nodes have `meta["val"]`.

    Raises:
        PackageError: the graph cannot be serialised, or the key is no plain name.
        StorageError: the package's folder or the state directory cannot be written.
    """
    _check_key(key)
    graph = flat_to_json(step.module, f"derived/{key}")
    document = {
        "graph": graph.document,
        "inputs": [[port.role.value, port.name] for port in step.inputs],
        "outputs": [[port.role.value, port.name] for port in step.outputs],
        "tags": _tags(step.module),
    }
    data = canonical_json(document)
    validate_graph(parse_canonical(data, key)["graph"], f"derived/{key}/step.json", package.namespaces)
    seal = Seal(key=key, program=package.manifest.program_digest, sha256=sha256_bytes(data), size=len(data), mac="")
    seal = seal.model_copy(update={"mac": hmac.digest(_user_key(create=True), seal.message(), "sha256").hex()})
    folder = package.path / "derived"
    try:
        folder.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".", dir=folder))
        try:
            write_bytes(made / "step.json", data)
            write_bytes(made / "seal.json", seal.to_bytes())
            made.chmod(0o755)
            _put(made, folder / key)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"the derived graph cannot be kept: {error.strerror}", where=str(folder)) from error


def read_derived(package: Package, key: str) -> StepGraph | None:
    """The step graph kept under `key`; None: there is none, or it was not made here for this program.

    Raises:
        PackageError: the key is no plain name, or what was made here cannot be read by the running torch.
    """
    _check_key(key)
    folder = package.path / "derived" / key
    if not (folder / "seal.json").is_file():
        return None
    secret = _user_key(create=False)
    if not secret:
        return None
    try:
        seal = _read_seal(package.path, key)
        data = _read_step(package.path, key, seal)
    except PackageError:
        return None  # damaged: derive again
    expected = hmac.digest(secret, seal.message(), "sha256").hex()
    if not hmac.compare_digest(expected, seal.mac) or seal.program != package.manifest.program_digest or seal.key != key:
        return None
    where = f"derived/{key}/step.json"
    return _load(parse_canonical(data, where), where, package.namespaces)


def derived_problems(root: Path) -> list[tuple[str, str]]:
    """(file, what is wrong with it) for every damaged or unknown file of derived/. It does not ask who made them."""
    if not (root / "derived").is_dir():
        return []
    problems: list[tuple[str, str]] = []
    present = {f"derived/{path}" for path, _ in walk(root / "derived") if not path.startswith(".")}  # "." is being written, or was left
    keys = sorted({path.split("/")[1] for path in present if path.count("/") == 2})
    known = {f"derived/{key}/{name}" for key in keys for name in ("seal.json", "step.json")}
    problems += [(path, "no part of a derived graph") for path in sorted(present - known)]
    for key in keys:
        try:
            _check_key(key)
            _read_step(root, key, _read_seal(root, key))
        except PackageError as error:
            problems.append((error.where, str(error)))
    return problems


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise PackageError("a derived graph's key is no plain name", where=f"derived/{key[:80]}", expected="letters, digits and _ . + -")


def _put(made: Path, target: Path) -> None:
    for _ in range(3):
        try:
            made.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        shutil.rmtree(target, ignore_errors=True)
    # Another process keeps writing the same graph: its copy will do.


def _read_seal(root: Path, key: str) -> Seal:
    where = f"derived/{key}/seal.json"
    with open_inside(root, where) as file:
        raw = parse_canonical(file.read(65_537), where, max_bytes=65_536, max_depth=4)
    checksum = raw.pop("checksum", None) if isinstance(raw, dict) else None
    if checksum is None or checksum != sha256_bytes(canonical_json(raw)):
        raise IntegrityError("the seal is damaged: its checksum is another one", where=where)
    try:
        return Seal.model_validate(raw)
    except ValidationError as error:
        raise IntegrityError("the seal is malformed", where=where) from error


def _read_step(root: Path, key: str, seal: Seal) -> bytes:
    where = f"derived/{key}/step.json"
    with open_inside(root, where) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) != seal.size or sha256_bytes(data) != seal.sha256:
        raise IntegrityError("a derived graph is not the one that its seal names", where=where, cure="Remove its folder.")
    return data


def _load(document: Any, where: str, namespaces: frozenset[str]) -> StepGraph:
    if not isinstance(document, dict) or set(document) != {"graph", "inputs", "outputs", "tags"}:
        raise UnsafePackageError("a derived graph has graph, inputs, outputs and tags", where=where)
    validate_graph(document["graph"], where, namespaces)
    inputs, outputs = _ports(document["inputs"], where), _ports(document["outputs"], where)
    module = flat_from_json(document["graph"], where)
    nodes = {node.name: node for node in module.graph.nodes}
    returned = next(node for node in module.graph.nodes if node.op == "output").args[0]
    taken = [node for node in nodes.values() if node.op == "placeholder"]
    if len(taken) != len(inputs) or not isinstance(returned, tuple) or len(returned) != len(outputs):
        raise PackageError("a derived graph has other inputs or outputs than its ports", where=where)
    for name, tags in _checked_tags(document["tags"], where).items():
        if name not in nodes:
            raise PackageError("a derived graph tags a node that it does not have", where=where, got=name)
        nodes[name].meta.update(tags)
    return StepGraph(module, inputs, outputs)


def _checked_tags(found: Any, where: str) -> dict[str, dict[str, Any]]:
    if not isinstance(found, dict) or not all(isinstance(tags, dict) for tags in found.values()):
        raise UnsafePackageError("a derived graph's tags are objects by node", where=where)
    for name, tags in found.items():
        for tag, value in tags.items():
            if not (tag in _TAGS or tag.startswith("trainload")) or not isinstance(value, str | int | float):
                raise UnsafePackageError("a derived graph has a tag that is not allowed", where=where, got=f"{name}: {tag}")
    return found


def _ports(pairs: Any, where: str) -> tuple[Port, ...]:
    try:
        return tuple(Port(Role(role), str(name)) for role, name in pairs)
    except (ValueError, TypeError) as error:
        raise UnsafePackageError("a derived graph's ports are pairs of role and name", where=where) from error


def _tags(module: torch.fx.GraphModule) -> dict[str, dict[str, str | int | float]]:
    found: dict[str, dict[str, str | int | float]] = {}
    for node in module.graph.nodes:
        tags = {
            tag: value
            for tag, value in node.meta.items()
            if (tag in _TAGS or tag.startswith("trainload")) and isinstance(value, str | int | float) and node.op != "output"
        }
        if tags:
            found[node.name] = tags
    return found


def _user_key(*, create: bool) -> bytes:
    """The user's secret; b"" where there is none and `create` is false."""
    folder = Path(os.environ.get(STATE_DIR) or Path.home() / ".local" / "state" / "trainload")
    path = folder / "derived.key"
    if create and not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".key", delete=False) as file:  # made with mode 0600
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(file.name, path)  # a process that came first keeps its key
            except FileExistsError:
                pass
            finally:
                os.unlink(file.name)
        except OSError as error:
            raise StorageError(f"no key can be made: {error.strerror}", where=str(folder), cure=f"Set {STATE_DIR}.") from error
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise StorageError("the key can be read by others", where=str(path), expected="mode 0600", cure="Remove it; another is made.")
        secret = path.read_bytes()
    except FileNotFoundError:
        return b""
    if len(secret) != _KEY_BYTES:
        raise StorageError("the key is damaged", where=str(path), cure="Remove it; another is made.")
    return secret
