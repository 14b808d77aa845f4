"""derived/: cached step graphs, which a second start on the same device need not derive again.

A derived graph could be replaced by one that trains something else, and the manifest would not show
it. Therefore a cached graph is used only if this user derived it: its seal carries an HMAC with a
key from the user's state directory, which is in no package. Any other graph is treated as absent
and derived again.
"""

from __future__ import annotations

import errno
import hmac
import logging
import re
import shutil
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.core.atomic import temporary_folder
from trainload.core.canonical_json import MAX_BYTES, canonical_json, parse_canonical, sha256_bytes
from trainload.core.errors import IntegrityError, PackageError, StorageError, UnsafePackageError
from trainload.core.garbage import garbage_collection_disabled
from trainload.core.logs import log_handled, logged_suppress
from trainload.core.paths import link_or_copy, open_inside, write_bytes
from trainload.packaging.format.package_files import walk
from trainload.packaging.format.user_key import user_key
from trainload.packaging.graphs.graph_json import flat_from_json, flat_to_json
from trainload.packaging.graphs.torch_operators import running_schema
from trainload.packaging.graphs.validate import GraphFacts, parse_graph, validate_graph
from trainload.packaging.package import Package

_log = logging.getLogger(__name__)

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_TAGS = ("partitioner_tag",)
"""Node metadata that a step graph keeps, besides keys that begin with "trainload"; strings, numbers
and booleans only.
"""


class Seal(BaseModel):
    """seal.json: the program and the file that it vouches for.

    `mac` is the HMAC-SHA256 of the other fields as canonical JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    program: str
    sha256: str
    size: int
    mac: str

    def message(self) -> bytes:
        """Return the bytes that the HMAC covers."""
        return canonical_json(self.model_dump(exclude={"mac"}))

    def to_bytes(self) -> bytes:
        """Return the file: canonical JSON of the fields, and their sha256 as `checksum`."""
        fields = self.model_dump()
        return canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))})


@garbage_collection_disabled()
def write_derived(package: Package, key: str, step: StepGraph) -> None:
    """Store a step graph in the package, sealed with the user's key.

    A graph that has this key already is replaced.

    Args:
        package: the package from which the graph was derived.
        key: what the graph depends on besides the program: device type and torch version, for
            example "cuda-torch2.13.0".
        step: the graph. All nodes have `meta["val"]`.

    Raises:
        PackageError: the graph cannot be serialised, or the key is not a plain name.
        StorageError: the package's folder or the state directory cannot be written.
    """
    _check_key(key)
    graph = flat_to_json(step.module, f"derived/{key}")
    document = {
        "graph": graph.document,
        "inputs": [[port.role.value, port.name] for port in step.inputs],
        "outputs": [[port.role.value, port.name] for port in step.outputs],
        "tags": _collect_tags(step.module),
    }
    data = canonical_json(document)
    _check_document(parse_graph(data, key), f"derived/{key}/step.json", package.namespaces)
    seal = Seal(
        key=key,
        program=package.manifest.program_digest,
        sha256=sha256_bytes(data),
        size=len(data),
        mac="",
    )
    seal = seal.model_copy(
        update={"mac": hmac.digest(user_key(create=True), seal.message(), "sha256").hex()}
    )
    folder = package.path / "derived"
    try:
        folder.mkdir(exist_ok=True)
        with temporary_folder(folder / key) as temporary:
            write_bytes(temporary / "step.json", data)
            write_bytes(temporary / "seal.json", seal.to_bytes())
            temporary.chmod(0o755)
            _move_into_place(temporary, folder / key)
    except OSError as error:
        raise StorageError(
            f"the derived graph cannot be saved: {error.strerror}", where=str(folder)
        ) from error


def cache_derived(package: Package, key: str, step: StepGraph) -> None:
    """Store a step graph like `write_derived`. A failure is logged: the graph is derived again."""
    message = f"the derived graph {key} was not stored; it will be derived again"
    with logged_suppress(_log, message, StorageError):
        write_derived(package, key, step)


def read_derived(package: Package, key: str) -> StepGraph | None:
    """Return the step graph stored under `key`, or None if there is none or its seal is not this
    user's for this program.

    Raises:
        PackageError: the key is not a plain name, or the running torch cannot read a graph with a
            valid seal.
    """
    _check_key(key)
    folder = package.path / "derived" / key
    if not (folder / "seal.json").is_file():
        return None
    secret = user_key(create=False)
    if not secret:
        return None
    try:
        seal = _read_seal(package.path, key)
        data = _read_step(package.path, key, seal)
    except PackageError as error:
        log_handled(_log, f"{folder} is damaged; the graph will be derived again", error)
        return None
    expected = hmac.digest(secret, seal.message(), "sha256").hex()
    if (
        not hmac.compare_digest(expected, seal.mac)
        or seal.program != package.manifest.program_digest
    ):
        return None
    where = f"derived/{key}/step.json"
    return _load(parse_graph(data, where), where, package.namespaces)


def share_derived(package: Path, program: str, others: Iterable[Path]) -> tuple[str, ...]:
    """Copy step graphs of the same program from other packages into a package.

    Seals are verified when a graph is read.

    Args:
        package: folder of the package, to which no other process writes yet.
        program: its manifest's `program_digest`.
        others: folders of other packages.

    Returns:
        The keys of the graphs that were copied.
    """
    copied: dict[str, None] = {}
    for other in others:
        for folder in (other / "derived").glob("[!.]*"):
            if folder.name in copied:
                continue
            message = f"{folder} is damaged or being removed; not shared"
            with logged_suppress(_log, message, OSError, PackageError, level=logging.DEBUG):
                if _read_seal(other, folder.name).program == program:
                    for file in ("step.json", "seal.json"):
                        link_or_copy(folder / file, package / "derived" / folder.name / file)
                    copied[folder.name] = None
    return tuple(copied)


def derived_problems(root: Path, namespaces: Set[str]) -> list[tuple[str, str]]:
    """Return (file, problem) for every damaged, unsafe or unknown file of derived/.

    Seals' HMACs are not verified.

    Args:
        root: the package's folder.
        namespaces: namespaces of operators of other libraries that graphs may name.
    """
    if not (root / "derived").is_dir():
        return []
    problems: list[tuple[str, str]] = []
    # "." marks temporary folders
    present = {f"derived/{path}" for path, _ in walk(root / "derived") if not path.startswith(".")}
    keys = sorted({path.split("/")[1] for path in present if path.count("/") == 2})
    expected_files = {
        f"derived/{key}/{name}" for key in keys for name in ("seal.json", "step.json")
    }
    problems += [(path, "not part of a derived graph") for path in sorted(present - expected_files)]
    for key in keys:
        try:
            _check_key(key)
            where = f"derived/{key}/step.json"
            _check_document(
                parse_graph(_read_step(root, key, _read_seal(root, key)), where), where, namespaces
            )
        except PackageError as error:
            problems.append((error.where.split(",")[0], str(error)))
    return problems


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise PackageError(
            "the key of a derived graph contains characters that are not allowed",
            where=f"derived/{key[:80]}",
            expected="letters, digits and _ . + -",
        )


def _move_into_place(draft: Path, target: Path) -> None:
    for _ in range(3):
        try:
            draft.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        shutil.rmtree(target, ignore_errors=True)
    # Another process keeps writing the same graph: its copy is as good.


def _read_seal(root: Path, key: str) -> Seal:
    where = f"derived/{key}/seal.json"
    with open_inside(root, where) as file:
        raw = parse_canonical(file.read(65_537), where, max_bytes=65_536, max_depth=4)
    checksum = raw.pop("checksum", None) if isinstance(raw, dict) else None
    if checksum is None or checksum != sha256_bytes(canonical_json(raw)):
        raise IntegrityError("the seal is damaged: its checksum does not match", where=where)
    try:
        seal = Seal.model_validate(raw)
    except ValidationError as error:
        raise IntegrityError("the seal is malformed", where=where) from error
    if seal.key != key:
        raise IntegrityError(
            "the seal belongs to another graph", where=where, expected=key, got=repr(seal.key[:80])
        )
    return seal


def _read_step(root: Path, key: str, seal: Seal) -> bytes:
    where = f"derived/{key}/step.json"
    with open_inside(root, where) as file:
        data = file.read(min(seal.size, MAX_BYTES) + 1)
    if len(data) != seal.size or sha256_bytes(data) != seal.sha256:
        raise IntegrityError(
            "a derived graph does not match its seal", where=where, hint="Remove its folder."
        )
    return data


def _check_document(
    document: Any, where: str, namespaces: Set[str]
) -> tuple[GraphFacts, tuple[Port, ...], tuple[Port, ...]]:
    """Check that a parsed step.json is safe.

    Return what its graph calls, its inputs and its outputs.
    """
    if not isinstance(document, dict) or set(document) != {"graph", "inputs", "outputs", "tags"}:
        raise UnsafePackageError(
            "a derived graph must have the fields graph, inputs, outputs and tags", where=where
        )
    facts = validate_graph(document["graph"], where, namespaces)
    _check_tags(document["tags"], where)
    return facts, _parse_ports(document["inputs"], where), _parse_ports(document["outputs"], where)


def _load(document: Any, where: str, namespaces: Set[str]) -> StepGraph:
    facts, inputs, outputs = _check_document(document, where, namespaces)
    unknown = sorted(name for name in facts.operators if running_schema(name) is None)
    if unknown:
        raise PackageError(
            "a derived graph calls an operator that the running torch does not have",
            where=where,
            got=", ".join(unknown[:5]),
        )
    module = flat_from_json(document["graph"], where)
    nodes = {node.name: node for node in module.graph.nodes}
    returned = next(node for node in module.graph.nodes if node.op == "output").args[0]
    placeholders = [node for node in nodes.values() if node.op == "placeholder"]
    if (
        len(placeholders) != len(inputs)
        or not isinstance(returned, tuple)
        or len(returned) != len(outputs)
    ):
        raise PackageError(
            "the inputs or outputs of a derived graph do not match its ports", where=where
        )
    for name, tags in document["tags"].items():
        if name not in nodes:
            raise PackageError(
                "a derived graph tags a node that it does not have", where=where, got=name
            )
        nodes[name].meta.update(tags)
    return StepGraph(module, inputs, outputs)


def _check_tags(tags_by_node: Any, where: str) -> None:
    if not isinstance(tags_by_node, dict) or not all(
        isinstance(tags, dict) for tags in tags_by_node.values()
    ):
        raise UnsafePackageError(
            "the tags of a derived graph must be objects keyed by node", where=where
        )
    for name, tags in tags_by_node.items():
        for tag, value in tags.items():
            if not (tag in _TAGS or tag.startswith("trainload")) or not isinstance(
                value, str | int | float
            ):
                raise UnsafePackageError(
                    "a derived graph has a tag that is not allowed",
                    where=where,
                    got=f"{name}: {tag}",
                )


def _parse_ports(pairs: Any, where: str) -> tuple[Port, ...]:
    try:
        return tuple(Port(Role(role), str(name)) for role, name in pairs)
    except (ValueError, TypeError) as error:
        raise UnsafePackageError(
            "the ports of a derived graph must be pairs of role and name", where=where
        ) from error


def _collect_tags(module: torch.fx.GraphModule) -> dict[str, dict[str, str | int | float]]:
    tags_by_node: dict[str, dict[str, str | int | float]] = {}
    for node in module.graph.nodes:
        tags = {
            tag: value
            for tag, value in node.meta.items()
            if (tag in _TAGS or tag.startswith("trainload"))
            and isinstance(value, str | int | float)
            and node.op != "output"
        }
        if tags:
            tags_by_node[node.name] = tags
    return tags_by_node
