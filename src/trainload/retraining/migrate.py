"""Migrate weights to another program, so that newly frozen code starts with weights that were
trained with old code.
"""

from __future__ import annotations

import fnmatch
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainload.core.errors import ConflictError, PackageError, RequestError
from trainload.packaging.package import Package, check_weights
from trainload.packaging.write import with_weights
from trainload.retraining.ticks.lineage import LINE, RELEASE, STORE


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A tensor whose shape differs between the programs.

    `copied` is True if the common part was carried over.
    """

    name: str
    source: str
    old: tuple[int, ...]
    new: tuple[int, ...]
    copied: bool


@dataclass(frozen=True, slots=True)
class Migration:
    """Result of a migration.

    Law: every parameter and buffer of the new program is in exactly one of the lists `matched`,
    `converted`, `reshaped` and `missing`.

    Attributes:
        package: path of the package that was written.
        digest: its digest.
        matched: tensors that were carried over unchanged.
        converted: tensors that were carried over with another dtype.
        reshaped: tensors with another shape.
        missing: tensors that the old program does not have. They keep the new package's values.
        left: tensors of the old program that are not used.
        elements: number of elements of the new program's tensors.
        carried: number of these that have old values.
    """

    package: Path
    digest: str
    matched: tuple[str, ...]
    converted: tuple[str, ...]
    reshaped: tuple[Reshaped, ...]
    missing: tuple[str, ...]
    left: tuple[str, ...]
    elements: int
    carried: int


def migrate(
    new: Package,
    old: Package,
    output: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    overlap: bool = False,
    strict: bool = False,
) -> Migration:
    """Write a package with the program of one package and, by name, the weights of another.

    Args:
        new: package of the new code.
        old: package whose weights are carried over.
        output: path of the package to write, which must not exist.
        rename: name in the old program, or pattern with one `*` -> name in the new program.
        overlap: True to carry over the common part of tensors whose shapes differ but have the same
            number of dims, such as the rows of a vocabulary that grew.
        strict: True to require that everything is carried over.

    Raises:
        PackageError: a package is abstract; or, with `strict`, a tensor is missing, left or
            reshaped.
        RequestError: a name of `rename` is not in the old program, or two tensors would get the
            same name.
        StorageError: `output` exists or cannot be written.
    """
    check_weights(new)
    check_weights(old)
    names = _rename_tensors(old, rename or {})
    plan = [_match_tensor(new, old, name, names.get(name)) for name in new.weights.names()]
    sources = {source for fate, source, _ in plan if fate != "missing"}
    unused = tuple(sorted(source for source in names.values() if source not in sources))
    kinds = {
        kind: tuple(name for fate, _, name in plan if fate == kind)
        for kind in ("matched", "converted", "reshaped", "missing")
    }
    if strict and (unused or kinds["reshaped"] or kinds["missing"]):
        raise PackageError(
            "not all weights can be carried over",
            where=str(new.path),
            expected="the same names and shapes",
            got="; ".join(
                f"{outcome}: {', '.join(listed[:5])}"
                + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
                for outcome, listed in (
                    ("missing", kinds["missing"]),
                    ("reshaped", kinds["reshaped"]),
                    ("left", unused),
                )
                if listed
            ),
            hint="Map the old names to the new ones with --rename, or omit --strict.",
        )
    count = _Count()
    package = with_weights(new, Path(output), _tensors(new, old, plan, count, overlap=overlap))
    reshaped = tuple(
        Reshaped(
            name,
            source,
            tuple(old.weights.shape(source)),
            tuple(new.weights.shape(name)),
            name in count.overlapped,
        )
        for fate, source, name in plan
        if fate == "reshaped"
    )
    return Migration(
        package=package.path,
        digest=package.digest,
        matched=kinds["matched"],
        converted=kinds["converted"],
        reshaped=reshaped,
        missing=kinds["missing"],
        left=unused,
        elements=count.elements,
        carried=count.carried,
    )


class _Count:
    """Counts of what was carried over; `overlapped` has the names of tensors that were carried over
    in part.
    """

    def __init__(self) -> None:
        self.elements = self.carried = 0
        self.overlapped: set[str] = set()


def _rename_tensors(old: Package, rename: Mapping[str, str]) -> dict[str, str]:
    """Return name in the new program -> name in the old one."""
    sources: dict[str, str] = {}
    used_patterns: set[str] = set()
    for name in old.weights.names():
        target = name
        for pattern, replacement in rename.items():
            if (filled := _apply_pattern(pattern, replacement, name)) is not None:
                target = filled
                used_patterns.add(pattern)
                break
        if target in sources:
            raise RequestError(
                "two tensors would have the same name",
                where=target,
                got=f"{sources[target]} and {name}",
                hint="Change --rename.",
            )
        sources[target] = name
    for pattern in rename:
        if pattern not in used_patterns:
            raise RequestError(
                "no tensor has this name",
                where=f"--rename {pattern}",
                expected="a name in the old program, or a pattern that matches one",
            )
    return sources


def _apply_pattern(pattern: str, replacement: str, name: str) -> str | None:
    """Return the new name of a tensor; None if the pattern does not match.

    Raises RequestError if the pattern is invalid.
    """
    if pattern.count("*") > 1 or pattern.count("*") != replacement.count("*"):
        raise RequestError(
            "a renaming must have one * on both sides, or none",
            where=f"--rename {pattern}={replacement}",
        )
    if not fnmatch.fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]")):
        return None
    before, _, after = pattern.partition("*")
    return (
        replacement.replace("*", name[len(before) : len(name) - len(after)])
        if "*" in pattern
        else replacement
    )


def _match_tensor(
    new: Package, old: Package, name: str, source: str | None
) -> tuple[str, str, str]:
    """Return a new tensor's kind (the name of its list in `Migration`), the old tensor's name, and
    its own name.
    """
    if source is None:
        return "missing", "", name
    if tuple(new.weights.shape(name)) != tuple(old.weights.shape(source)):
        return "reshaped", source, name
    return (
        "matched" if new.weights.dtype(name) == old.weights.dtype(source) else "converted",
        source,
        name,
    )


def _tensors(
    new: Package,
    old: Package,
    plan: Sequence[tuple[str, str, str]],
    count: _Count,
    *,
    overlap: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the new program, one at a time."""
    for fate, source, name in plan:
        new_tensor = new.weights.tensor(name)
        count.elements += new_tensor.numel()
        if fate in ("matched", "converted"):
            count.carried += new_tensor.numel()
            yield name, old.weights.tensor(source).to(new_tensor.dtype)
        elif fate == "reshaped" and overlap and new_tensor.dim() == len(old.weights.shape(source)):
            old_tensor = old.weights.tensor(source)
            corner = tuple(
                slice(0, min(a, b)) for a, b in zip(new_tensor.shape, old_tensor.shape, strict=True)
            )
            with torch.no_grad():
                merged = new_tensor.clone()
                merged[corner] = old_tensor[corner].to(new_tensor.dtype)
            count.carried += merged[corner].numel()
            count.overlapped.add(name)
            yield name, merged
        else:
            yield name, new_tensor


def publish(migration: Migration, old: Package, store: str, line: str) -> str:
    """Publish a migrated package as the first release of a line, whose lineage continues with the
    source of the weights.

    Args:
        migration: result of the migration.
        old: package with the original weights.
        store: folder or fsspec URL of the store.
        line: line without releases.

    Returns:
        The number of the release.

    Raises:
        ConflictError: the line has releases already.
        StorageError: the store cannot be written.
    """
    from trainload.packaging.stores.push import push
    from trainload.packaging.stores.references import parts_of
    from trainload.packaging.stores.store import NOBODY, Store

    place = Store(store, create=True)
    line = place.line(line)
    if place.release_ids(line):
        raise ConflictError(
            "the line already has releases",
            where=f"{place.url}, line {line}",
            expected="an empty line for a new program",
            got=f"{len(place.release_ids(line))} releases",
            hint="Choose another --line.",
        )
    facts: dict[str, bool | int | float | str] = {
        "migrated.carried": migration.carried,
        "migrated.elements": migration.elements,
    }
    if old.source is not None and "#" in old.source:
        url, name, number = parts_of(old.source)
        assert name is not None and number is not None, "a package's source names its release"
        facts |= {LINE: name, RELEASE: number}
        # within one store, the reference stays valid if the store is moved
        if Store(url).url != place.url:
            facts[STORE] = url
    message = f"the weights of {old.source or old.digest[:12]}"
    return push(
        migration.package, store, line=line, only_if=NOBODY, message=message, facts=facts
    ).release


@contextmanager
def written_to(output: Path | None) -> Iterator[Path]:
    """Yield the path for a package: `output`, or one in a temporary folder."""
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "migrated.tl"
