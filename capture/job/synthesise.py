"""Statistics of an example batch, and batches generated from them.

With these a graph can run where there is no data.

The rows themselves are not stored: they may be private, and would make the package larger. Instead
a few evenly spaced values of each input are. They are the example's own, so a generated batch holds
no token outside of the vocabulary, and the -100 that a loss ignores about as often as the example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export.graph_signature import InputKind

from trainload.capture.program import GraphCapture, InputSpec, Program
from trainload.core.errors import DataError

QUANTILES = 17
"""Number of stored values of an input: smallest, greatest and those at each sixteenth between."""
_DATA_HINT = "Specify a data set to compare on: --data, or data=."


def with_quantiles(program: Program, examples: Mapping[str, Mapping[str, Tensor]]) -> Program:
    """Return the program with the quantiles of each graph's example batch in its inputs."""
    graphs = {
        name: dataclasses.replace(
            graph,
            inputs=tuple(
                dataclasses.replace(i, quantiles=quantiles_of(examples[name][i.name]))
                for i in graph.inputs
            ),
        )
        for name, graph in program.graphs.items()
    }
    return dataclasses.replace(program, graphs=graphs)


def quantiles_of(values: Tensor) -> tuple[int | float, ...]:
    """Return QUANTILES entries of `values` (any shape), ascending, evenly spaced in rank.

    () if none is a finite real number.

    bool counts as 0 and 1.
    """
    if values.is_complex():
        return ()
    flat = values.detach().flatten().cpu()
    if flat.is_floating_point():
        flat = flat.double()
        flat = flat[flat.isfinite()]
    elif flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    if not flat.numel():
        return ()
    ordered = np.sort(flat.numpy())
    return tuple(
        value.item()
        for value in ordered[np.linspace(0, len(ordered) - 1, QUANTILES).round().astype(np.int64)]
    )


def synthesise(capture: GraphCapture, seed: int, more_rows: int = 0) -> dict[str, Tensor]:
    """Return a batch with the example's sizes, and with values between its quantiles.

    Args:
        capture: the graph; the hints of its sizes are the example's sizes.
        seed: seed of the values.
        more_rows: rows beyond the example's; fewer rows than the example's if the graph does not
            accept more; ignored if their number is fixed.

    Raises:
        DataError: if an integer input has no quantiles.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = _shapes(capture, more_rows)
    return {
        spec.name: _draw_values(spec, shape, generator)
        for spec, shape in zip(capture.inputs, shapes, strict=True)
    }


def rows_of(capture: GraphCapture, more_rows: int = 0) -> int:
    """Return the number of rows of a batch from `synthesise`."""
    return _shapes(capture, more_rows)[0][0]


def _shapes(capture: GraphCapture, more_rows: int) -> list[list[int]]:
    placeholders = [node for node in capture.exported.graph.nodes if node.op == "placeholder"]
    values = [
        node.meta["val"]
        for node, spec in zip(
            placeholders, capture.exported.graph_signature.input_specs, strict=True
        )
        if spec.kind is InputKind.USER_INPUT
    ]
    sizes = [size for value in values for size in value.shape if isinstance(size, torch.SymInt)]
    hints = {size.node.expr: size.node.hint for size in sizes}
    rows = (
        values[0].shape[0].node.expr.free_symbols
        if isinstance(values[0].shape[0], torch.SymInt)
        else set()
    )
    chosen: dict[Any, int] = {}
    for symbol in {symbol for size in sizes for symbol in size.node.expr.free_symbols}:
        span = capture.exported.range_constraints[symbol]
        value = max(hints.get(symbol) or 2, int(span.lower))
        if symbol in rows and more_rows:
            value = (
                value + more_rows
                if value + more_rows <= span.upper
                else max(value - more_rows, int(span.lower))
            )
        chosen[symbol] = value
    return [
        [
            size if isinstance(size, int) else int(size.node.expr.subs(chosen))
            for size in value.shape
        ]
        for value in values
    ]


def _draw_values(spec: InputSpec, shape: list[int], generator: torch.Generator) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if not spec.quantiles:
        if dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not dtype.is_floating_point:
            raise DataError(
                "the package does not record the range of values of an input",
                where=f"input {spec.name}",
                hint=_DATA_HINT,
            )
        return torch.randn(shape, generator=generator).to(dtype)
    quantiles = np.asarray(spec.quantiles)
    rank = torch.rand(shape, generator=generator, dtype=torch.float64).numpy() * (
        len(quantiles) - 1
    )
    # a mask of 0.0 and 1.0 has no values in between
    whole = all(float(value).is_integer() for value in spec.quantiles)
    numbers = (
        quantiles[rank.round().astype(np.int64)]
        if whole
        else np.interp(rank, np.arange(len(quantiles)), quantiles)
    )
    return torch.from_numpy(np.asarray(numbers)).to(dtype)
