"""Differences between two packages, by name.

No graph is loaded, so missing operators or weights do not matter.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.core.canonical_json import parse_canonical
from trainload.packaging.comparison.graph_difference import GraphDifference, graph_difference
from trainload.packaging.comparison.graph_lines import GraphLines, graph_lines
from trainload.packaging.comparison.json_change import ABSENT, Change, changes
from trainload.packaging.comparison.weight_distance import TensorDifference, weight_differences
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_files import read_checked
from trainload.packaging.package import Package, check_graph, open_to_look

MAX_TEXT = 2**20
"""Maximum bytes of an asset whose lines are compared."""
_UPDATE_INPUTS = ("param", "grad", "lr")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two packages, and its digests."""

    path: Path
    digest: str
    program: str
    weights: str


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the manifest, and the changes in it."""

    title: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class TextDifference:
    """The lines of an asset that differ, as a unified diff without its header."""

    file: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PackageDifference:
    """The differences between two packages.

    Laws: `same` is True if and only if the digests are equal; if they are not, a section has a
    change.

    Attributes:
        before, after: the packages.
        relation: relation of the packages, by their recorded parents.
        sections: sections of the manifest with changes.
        graphs: graphs in both packages whose files differ.
        texts: text assets in both packages that differ.
        weights: parameters, buffers and constants with other values; None if they were not
            compared.
        weights_note: a remark on the weights, for example why they were not compared.
    """

    before: Side
    after: Side
    relation: str
    sections: tuple[Section, ...]
    graphs: tuple[GraphDifference, ...]
    texts: tuple[TextDifference, ...]
    weights: tuple[TensorDifference, ...] | None
    weights_note: str

    @property
    def same(self) -> bool:
        """True if both are the same package. debug/, derived/ and signatures/ do not count."""
        return self.before.digest == self.after.digest


def package_difference(before: Path, after: Path, *, weights: bool = True) -> PackageDifference:
    """Compare two packages.

    Args:
        before: a package's folder.
        after: another package's folder.
        weights: if True, compare tensors too. Those with different digests are read, block by
            block.

    Raises:
        StorageError: there is no package.
        IntegrityError, UnsafePackageError, PackageError: a package does not match its manifest, or
            is not safe.
    """
    a, b = open_to_look(before), open_to_look(after)
    differs = a.digest != b.digest
    compared, note = (
        _weights(a, b) if weights and differs else (None, "" if differs else "the same")
    )
    return PackageDifference(
        before=_side(a),
        after=_side(b),
        relation=_relation(a, b),
        sections=tuple(section for section in _sections(a.manifest, b.manifest) if section.changes)
        if differs
        else (),
        graphs=tuple(_graphs(a, b)) if differs else (),
        texts=tuple(_texts(a, b)) if differs else (),
        weights=compared,
        weights_note=note if weights or not differs else "not compared",
    )


def _side(package: Package) -> Side:
    return Side(
        package.path,
        package.digest,
        package.manifest.program_digest,
        package.manifest.weights_digest,
    )


def _relation(a: Package, b: Package) -> str:
    if a.digest == b.digest:
        return "the same package"
    if b.manifest.parent == a.digest:
        return "the second was made from the first"
    if a.manifest.parent == b.digest:
        return "the first was made from the second"
    if a.manifest.parent is not None and a.manifest.parent == b.manifest.parent:
        return "both were made from one package"
    return "neither says that it was made from the other"


def _sections(a: Manifest, b: Manifest) -> Iterator[Section]:
    """Yield the manifest section by section.

    Section "manifest" has all remaining fields, so that nothing is left out.
    """
    one, other = ({**manifest.model_dump(mode="json"), "files": {}} for manifest in (a, b))
    for title, fields in (
        ("format", ("format_version", "features", "abstract", "parent", "training")),
        ("recipe", ("recipe",)),
        ("passes", ("passes",)),
        ("operator libraries", ("op_libraries",)),
        ("operators", ("ops", "higher_order_ops")),
    ):
        section_changes = [
            change
            for field in fields
            for change in changes(
                "" if len(fields) == 1 or field == "ops" else field, *_pop_field(one, other, field)
            )
        ]
        yield Section(title, tuple(section_changes))
    for title, spell in (
        ("parameters", _parameter),
        ("buffers", _buffer),
        ("constants", _constant),
    ):
        tables = (
            {entry["name"]: spell(entry) for entry in entries}
            for entries in _pop_field(one, other, title)
        )
        yield Section(title, _compare_ordered(title, *tables))
    graphs = [
        {name: _graph(entry) for name, entry in entries.items()}
        for entries in _pop_field(one, other, "graphs")
    ]
    yield Section("inputs, outputs and guards of graphs", tuple(changes("", *graphs)))
    yield Section("updates", tuple(changes("", *_pop_field(one, other, "updates"))))
    yield Section("manifest", tuple(changes("", one, other)))
    yield Section("files", tuple(_files(a.files, b.files)))


def _pop_field(one: dict[str, Any], other: dict[str, Any], field: str) -> tuple[Any, Any]:
    return one.pop(field, ABSENT), other.pop(field, ABSENT)


def _compare_ordered(title: str, one: dict[str, str], other: dict[str, str]) -> tuple[Change, ...]:
    """Return the changes between two tables whose order matters."""
    table_changes = tuple(changes("", one, other))
    if not table_changes and list(one) != list(other):
        return (Change("order", f"{title} in one order", f"{title} in another"),)
    return table_changes


def _shape(entry: Mapping[str, Any]) -> str:
    return f"{entry['dtype']}[{', '.join(map(str, entry['shape']))}]"


def _parameter(entry: Mapping[str, Any]) -> str:
    alias = f", alias of {entry['alias_of']}" if entry["alias_of"] is not None else ""
    return _shape(entry) + ("" if entry["trainable"] else ", frozen") + alias


def _buffer(entry: Mapping[str, Any]) -> str:
    return _shape(entry) + ("" if entry["persistent"] else ", not persistent")


def _constant(entry: Mapping[str, Any]) -> str:
    return _shape(entry)


def _graph(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a graph's entry with its inputs and outputs in readable form."""
    inputs = {f"input {i['name']}": _shape(i) for i in entry["inputs"]}
    examples = {
        f"input {i['name']}, quantiles of the example": i["quantiles"] for i in entry["inputs"]
    }
    outputs = {
        f"output {number}": f"{output['name']}, {output['role']}"
        for number, output in enumerate(entry["outputs"])
    }
    remaining = {key: value for key, value in entry.items() if key not in ("inputs", "outputs")}
    return {**inputs, **examples, **outputs, **remaining}


def _files(one: Mapping[str, FileEntry], other: Mapping[str, FileEntry]) -> Iterator[Change]:
    for path in sorted({*one, *other}):
        a, b = one.get(path), other.get(path)
        if a != b:
            yield Change(
                path,
                *(
                    None
                    if entry is None
                    else f"{entry.size} bytes, {entry.media_type}, {entry.sha256[:12]}"
                    for entry in (a, b)
                ),
            )


def _graphs(a: Package, b: Package) -> Iterator[GraphDifference]:
    files_before, files_after = (
        {name: file for file, name in package.manifest.graph_files().items()} for package in (a, b)
    )
    for name in [name for name in files_before if name in files_after]:
        if a.manifest.files[files_before[name]] != b.manifest.files[files_after[name]]:
            yield graph_difference(
                name, _lines(a, name, files_before[name]), _lines(b, name, files_after[name])
            )


def _lines(package: Package, name: str, file: str) -> GraphLines:
    manifest = package.manifest
    document = parse_canonical(read_checked(package.path, file, manifest.files[file]), file)
    check_graph(manifest, document, file, frozenset(manifest.op_libraries))
    entry = manifest.graphs.get(name)
    if entry is not None:
        return graph_lines(document, [input_entry.name for input_entry in entry.inputs])
    states = next(
        update.state for update in manifest.updates if file in (update.first, update.following)
    )
    return graph_lines(document, [*_UPDATE_INPUTS, *(state.name for state in states)])


def _texts(a: Package, b: Package) -> Iterator[TextDifference]:
    for path in sorted(
        path
        for path in a.manifest.files.keys() & b.manifest.files.keys()
        if path.startswith("assets/")
    ):
        entries = (a.manifest.files[path], b.manifest.files[path])
        if (
            entries[0].sha256 == entries[1].sha256
            or max(entry.size for entry in entries) > MAX_TEXT
        ):
            continue
        try:
            texts = [
                read_checked(package.path, path, entry).decode("utf-8")
                for package, entry in zip((a, b), entries, strict=True)
            ]
        except UnicodeDecodeError:  # not text
            continue
        lines = list(
            difflib.unified_diff(texts[0].splitlines(), texts[1].splitlines(), lineterm="", n=1)
        )
        yield TextDifference(path, tuple(lines[2:]))


def _weights(a: Package, b: Package) -> tuple[tuple[TensorDifference, ...] | None, str]:
    abstract = [
        name
        for name, package in (("first", a), ("second", b))
        if package.manifest.abstract is not None
    ]
    if abstract:
        return None, f"not compared: the {' and the '.join(abstract)} package is abstract" if len(
            abstract
        ) == 1 else "both are abstract"
    if a.manifest.weights_digest == b.manifest.weights_digest and a.manifest.files.get(
        "constants.safetensors"
    ) == b.manifest.files.get("constants.safetensors"):
        return (), "the same"
    differences = weight_differences(a, b)
    return differences, "" if differences else "the same values"
