"""A run's data: its parts, each with the variant of the package's graphs that accepts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainload.capture.guard import Guard, fixed_value
from trainload.capture.guards.dispatch import Dispatcher
from trainload.capture.program import Mode, graph_of, variant_of
from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.credentials import resolve
from trainload.core.errors import DataError
from trainload.launching.data.batch_order import BatchOrder, cycle_counts
from trainload.launching.data.columns import DTYPES
from trainload.launching.data.data_files import Source, spelled
from trainload.launching.data.dataset import Dataset, check_schema, open_dataset, source_columns
from trainload.launching.data.mixture import Constant, Part, parts_of
from trainload.launching.data.sampler import Rows
from trainload.packaging.format.entries import data_specs, graph_guard
from trainload.packaging.package import Package


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A part of a run's data.

    Attributes:
        dataset: its rows.
        constants: constants of its batches, by dotted name.
        variant: variant that is selected by the sizes of its first row and its constants.
        name: name under which it is evaluated separately, if any.
    """

    dataset: Dataset
    constants: Mapping[str, Constant]
    variant: str
    name: str | None = None


class RunData:
    """The opened data of a run.

    Attributes:
        parts: parts in the order of the mixture; one part if there is no mixture.
        fingerprint: hash of all rows, constants and weights; for a single dataset without
            constants, the dataset's fingerprint.
    """

    def __init__(self, parts: tuple[OpenPart, ...], weights: tuple[float, ...]) -> None:
        self.parts = parts
        self._counts = cycle_counts(weights)
        alone = len(parts) == 1 and not parts[0].constants
        described = [
            [p.dataset.fingerprint, dict(p.constants), n]
            for p, n in zip(parts, self._counts, strict=True)
        ]
        self.fingerprint = (
            parts[0].dataset.fingerprint if alone else sha256_bytes(canonical_json(described))
        )

    def order(self, seed: int) -> BatchOrder:
        """Return the order of rows in the global batches of a run."""
        return BatchOrder(seed, tuple(part.dataset.size for part in self.parts), self._counts)

    def origin(
        self, part: int, rows: Rows | None, index: int | None, source: str
    ) -> tuple[int | None, str]:
        """Return the number of a batch's row in its dataset, None if it is unknown, and the name of
        the dataset.

        Args:
            part: number of the batch's part.
            rows: (n,) int64 numbers of the batch's rows; None if unknown.
            index: index of the row within the batch; None if unknown.
            source: path or URL of the run's data.
        """
        name = self.parts[part].name
        row = None if rows is None or index is None else int(rows[index])
        return row, source if name is None else f"{source}, part {name}"

    def batch(self, part: int, rows: Rows) -> dict[str, torch.Tensor]:
        """Return rows of a part; see `Dataset.batch`."""
        return self.parts[part].dataset.batch(rows)

    @property
    def rows(self) -> int:
        """Number of rows of all parts."""
        return sum(part.dataset.size for part in self.parts)


def run_dispatcher(package: Package) -> Dispatcher:
    """Return the dispatcher that picks a batch's variant: one all of whose graphs, except predict,
    accept the batch.
    """
    manifest = package.manifest
    guards: dict[str, list[Guard]] = {variant: [] for variant in ("", *manifest.variants)}
    for name, mode in manifest.modes().items():
        if mode is not Mode.PREDICT:
            guards[variant_of(name)].append(graph_guard(manifest.graphs[name]))
    graphs = sorted(
        {graph_of(name) for name, mode in manifest.modes().items() if mode is not Mode.PREDICT}
    )
    fed = {entry for feeds in package.recipe.feeds.values() for entry in feeds}
    return Dispatcher(", ".join(graphs), guards, ignored=package.batch_names, fed=fed)


def check_run_data(source: str | Path, package: Package, rows: int) -> int:
    """Check a run's data against a package by the files' metadata and first rows, before anything
    is started.

    Args:
        source: a dataset or a mixture.
        package: package that is run.
        rows: number of rows of each call of a graph.

    Returns:
        The number of rows of all parts.

    Raises:
        DataError: a dataset cannot be read, or fits no variant.
    """
    total = 0
    for part in resolved_parts(source):
        if not package.manifest.variants and not part.constants:
            # its errors name missing and superfluous columns
            check_schema(part.source, data_specs(package.manifest, ""))
        variant = _find_variant(part, package, rows)
        total += check_schema(part.source, data_specs(package.manifest, variant))
    return total


def open_run_data(source: str | Path, package: Package, rows: int, cache_dir: Path) -> RunData:
    """Open a run's data, converting it once per node.

    For arguments and errors see `check_run_data` and `open_dataset`.
    """
    opened: list[OpenPart] = []
    weights: list[float] = []
    for part in resolved_parts(source):
        variant = _find_variant(part, package, rows)
        dataset = open_dataset(part.source, data_specs(package.manifest, variant), cache_dir)
        opened.append(OpenPart(dataset, part.constants, variant, part.name))
        weights.append(dataset.size if part.weight is None else part.weight)
    return RunData(tuple(opened), tuple(weights))


def resolved_parts(source: str | Path) -> tuple[Part, ...]:
    """Return the parts of a run's data, with references in their paths resolved.

    Raises StorageError if one is not set here.
    """
    return tuple(
        replace(part, source=_resolve_source(part.source))
        for part in parts_of(resolve(str(source)))
    )


def _resolve_source(source: Source) -> Source:
    return (
        resolve(str(source))
        if isinstance(source, str | Path)
        else [resolve(str(each)) for each in source]
    )


def _find_variant(part: Part, package: Package, rows: int) -> str:
    """Return the variant that accepts a part, by its columns and the sizes of its first row."""
    columns = source_columns(part.source)
    strange = {name: dtype for name, (dtype, _) in columns.items() if dtype not in DTYPES}
    if strange:
        name, dtype = min(strange.items())
        raise DataError(
            f"column {name!r} has a dtype that inputs do not support",
            where=_place_of(part),
            expected=", ".join(DTYPES),
            got=dtype,
        )
    facts = {name: (DTYPES[dtype], (rows, *dims)) for name, (dtype, dims) in columns.items()}
    constants = {
        name: fixed_value(value) for name, value in part.constants.items() if value is not None
    }
    dispatcher = run_dispatcher(package)
    unknown = sorted({*facts, *constants} - dispatcher.names)
    if unknown:
        raise DataError(
            "the data has columns or constants that no graph takes:"
            f" {', '.join(map(repr, unknown))}",
            where=_place_of(part),
            expected=", ".join(sorted(dispatcher.names)),
            got=", ".join(sorted({*facts, *constants})),
            hint="Remove them from the columns and from the mixture's constants.",
        )
    try:
        return dispatcher.pick_facts(facts, constants)
    except DataError as error:
        raise DataError(error.problem, where=_place_of(part), hint=error.hint) from error


def _place_of(part: Part) -> str:
    data = spelled(part.source)
    return f"{part.where} ({data})" if part.where else data
