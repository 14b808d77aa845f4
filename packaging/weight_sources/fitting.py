"""Which tensor of a source a package's parameter or buffer is read from."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainload.core.errors import WeightsError
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.tensors.safetensors_file import DTYPES, TensorSpec
from trainload.packaging.tensors.weight_shards import stored_tensors
from trainload.packaging.weight_sources.weight_source import WeightSource

T = TypeVar("T", bound=Hashable)
_COMPARED = 4096
"""Elements at each end of tied tensors that are compared."""
_SHOWN = 20
"""Maximum number of lines of a table."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """A tensor that does not fit.

    `kind` is "missing", "shape", "dtype", "tied" or "unexpected".
    """

    kind: str
    name: str
    details: str


def fitted(
    manifest: Manifest,
    source: WeightSource,
    *,
    partial: bool = False,
    computed: Collection[str] = (),
) -> dict[str, str]:
    """Return parameter or buffer -> its name in a source.

    Names are those of `Manifest.weight_source`. Aliases of a tied parameter may be in the source
    instead of it. If the package's names have a prefix there, such as "model.", only tensors with
    the prefix count; it may also be the package that has one. A dtype may differ if the
    conversion is exact, such as bfloat16 to float32. A non-persistent buffer that the source lacks
    keeps the package's value, stored or computed.

    Args:
        manifest: manifest of the package.
        source: tensors for it.
        partial: True if other tensors may be missing too, and the source may have more tensors.
            Those that are missing keep the package's values.
        computed: non-persistent buffers that the package computes, for one without values.

    Raises:
        WeightsError: tensors are missing, unexpected or different; with a table of them.
    """
    found: dict[str, str] = {}
    problems: list[_Problem] = []
    state, others = stored_tensors(manifest)
    optional = {spec.name for spec in others}
    has_values = manifest.abstract is None
    names = _names(manifest)
    removed, prefix = _prefixes(names, source)
    names = {own: [name.removeprefix(removed) for name in each] for own, each in names.items()}
    for spec in (*state, *others):
        given = [prefix + name for name in names[spec.name] if prefix + name in source.tensors]
        misfits = [problem for name in given for problem in _misfits(spec, source.tensors[name])]
        kept = spec.name in optional and (has_values or spec.name in computed)
        if kept and (misfits or not given):
            continue
        if not given:
            if not (has_values and partial):
                problems.append(_Problem("missing", spec.name, _shown(spec)))
            continue
        problems += misfits or _differences(spec, given, source)
        found[spec.name] = given[0]
    if not partial:
        known = {prefix + name for each in names.values() for name in each}
        problems += [
            _Problem("unexpected", name, _shown(source.tensors[name]))
            for name in source.tensors
            if name.startswith(prefix) and name not in known
        ]
    if problems or not found:
        raise _refusal(problems, source.where, has_values=has_values)
    return found


def _misfits(spec: TensorSpec, given: TensorSpec) -> list[_Problem]:
    """Return why a tensor cannot be that of a package."""
    if given.shape == spec.shape and is_exact(given.dtype, spec.dtype):
        return []
    kind = "shape" if given.shape != spec.shape else "dtype"
    return [_Problem(kind, spec.name, f"{_shown(spec)}, found {_shown(given)}")]


def _differences(spec: TensorSpec, given: list[str], source: WeightSource) -> list[_Problem]:
    """Return a problem if tensors of a source that are one parameter of the package differ.

    The first and the last elements are compared.
    """
    count = math.prod(spec.shape)
    ends = [(0, min(count, _COMPARED)), (max(0, count - _COMPARED), count)]
    for other in given[1:]:
        if any(
            not torch.equal(source.slice(given[0], *end), source.slice(other, *end)) for end in ends
        ):
            details = f"{given[0]} and {other} differ, and are one parameter of the package"
            return [_Problem("tied", spec.name, details)]
    return []


def is_exact(given: str, wanted: str) -> bool:
    """Return True if every value of one dtype is a value of another."""
    if given == wanted:
        return True
    if given not in DTYPES or wanted not in DTYPES:
        return False
    a, b = DTYPES[given], DTYPES[wanted]
    if a.is_floating_point and b.is_floating_point:
        have, want = torch.finfo(a), torch.finfo(b)
        is_larger = have.max <= want.max and have.smallest_normal >= want.smallest_normal
        return is_larger and have.eps >= want.eps
    is_whole = not any(each.is_floating_point or each.is_complex for each in (a, b))
    if is_whole and torch.bool not in (a, b):
        low, high = torch.iinfo(a), torch.iinfo(b)
        return high.min <= low.min and low.max <= high.max
    return False


def _names(manifest: Manifest) -> dict[str, list[str]]:
    """Return parameter or buffer -> its names in sources: its own, and those of its aliases."""
    there = {} if manifest.weight_source is None else manifest.weight_source.names
    names = {
        entry.name: [there.get(entry.name, entry.name)]
        for entry in manifest.parameters
        if entry.alias_of is None
    }
    for entry in manifest.parameters:
        if entry.alias_of is not None:
            names[entry.alias_of].append(there.get(entry.name, entry.name))
    return names | {entry.name: [there.get(entry.name, entry.name)] for entry in manifest.buffers}


def _prefixes(names: Mapping[str, list[str]], source: WeightSource) -> tuple[str, str]:
    """Return a prefix that the package's names have and a source's lack, and one that precedes
    them there, such as "model.": so most of them are there. A prefix is "" if with another one as
    many are there.

    A prefix is only removed if more than half of the names are there without it, and more than with
    it.

    Raises:
        WeightsError: several fit as well as each other, as of a model and its mean.
    """
    wanted = [name for each in names.values() for name in each]
    shared = Counter(name[:start] for name in wanted for start in _starts(name)[1:])
    removable = [prefix for prefix, count in shared.items() if 2 * count > len(wanted)]
    chosen, found = "", _found_after(set(wanted), source)
    for removed in sorted(removable, key=len):
        without = _found_after({name.removeprefix(removed) for name in wanted}, source)
        most = max(without.values(), default=0)
        if 2 * most > len(wanted) and most > max(found.values(), default=0):
            chosen, found = removed, without
    return chosen, _only_best(found, source)


def _found_after(wanted: Collection[str], source: WeightSource) -> Counter[str]:
    """Return prefix -> number of names that are in a source with it."""
    return Counter(
        given[:start]
        for given in source.tensors
        for start in _starts(given)
        if given[start:] in wanted
    )


def _only_best(found: Mapping[str, int], source: WeightSource) -> str:
    best = [prefix for prefix, count in found.items() if count == max(found.values())]
    if "" in best or not best:
        return ""
    if len(best) > 1:
        raise WeightsError(
            "the source has several models that may be meant",
            where=source.where,
            got=", ".join(sorted(best)),
            hint="Write the weights of one of them to a safetensors file, and pass that.",
        )
    return best[0]


def _starts(name: str) -> list[int]:
    """Return where the parts of a dotted name begin."""
    return [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]


def _refusal(problems: Iterable[_Problem], where: str, *, has_values: bool) -> WeightsError:
    """Return the error with a table in which names that differ only in numbers are one line."""
    order = ("missing", "shape", "dtype", "tied", "unexpected")
    named = [(each.name, (each.kind, each.details)) for each in problems]
    rows = sorted(
        ((kind, names, details) for names, (kind, details) in grouped(named)),
        key=lambda row: order.index(row[0]),
    )
    width = max((len(name) for _, name, _ in rows), default=0)
    kinds = {kind for kind, _, _ in rows}
    hints = []
    if "missing" in kinds:
        hints.append(
            "--partial-weights (partial_weights=True) keeps the package's values of those that are"
            " missing."
            if has_values
            else "The package has no values of its own, so none may be missing."
        )
    if "unexpected" in kinds:
        hints.append(
            "--partial-weights (partial_weights=True) leaves out those that are unexpected."
        )
    if "dtype" in kinds:
        hints.append("Dtypes may differ if the conversion is exact, as from bfloat16 to float32.")
    return WeightsError(
        "the weights do not fit the package" if rows else "no tensor is one of the package",
        where=where,
        hint=" ".join(hints),
        table=first_lines(
            [f"{kind:<10}  {name:<{width}}  {details}" for kind, name, details in rows]
        ),
    )


def grouped(named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Join tensors with equal details whose names differ only in numbers.

    Returns:
        (name, or pattern with the number of tensors; details), in the order of the first of each.
    """
    groups: dict[tuple[str, T], list[str]] = {}
    for name, details in named:
        groups.setdefault((re.sub(r"\d+", "*", name), details), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)} tensors)", details)
        for (pattern, details), names in groups.items()
    ]


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return the first lines of a table, and the number of the others."""
    more = [f"and {len(lines) - _SHOWN} more lines"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype} ({', '.join(map(str, spec.shape))})"
