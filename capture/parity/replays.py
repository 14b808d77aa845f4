"""The batches on which a captured graph is compared with eager mode."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind

from trainload.capture.program import GraphCapture

_VARIED_BATCHES = 6
_MIN_SIZE = 2


class Check(StrEnum):
    """Extent of the comparison.

    USUAL: the example batch, and one with another number of rows. THOROUGH: also further batches,
    with sizes drawn from those that the graph accepts in every dynamic dim, and the example's
    entries in other positions; each with its own seed.
    """

    USUAL = "usual"
    THOROUGH = "thorough"


def replay_batches(
    captured: GraphCapture, batch: Mapping[str, Tensor], check: Check
) -> list[dict[str, Tensor]]:
    """Return the batches: leaf name -> tensor of the example's dtype.

    The last of the usual ones is the example itself.

    There are two even if the size is fixed: state outside of buffers shows at the second.
    """
    rows = next(iter(batch.values())).shape[0]
    sizes = [rows, rows]
    if not isinstance(captured.inputs[0].shape[0], int):
        ranges = captured.exported.range_constraints.values()
        most = min(
            (int(r.upper) for r in ranges if r.upper.is_Integer and r.lower <= rows <= r.upper),
            default=rows + 1,
        )
        sizes = [rows + 1 if rows < most else max(rows - 1, _MIN_SIZE), rows]
    batches = [
        {n: t[torch.arange(size, device=t.device) % t.shape[0]] for n, t in batch.items()}
        for size in sizes
    ]
    if check is Check.THOROUGH:
        generator = torch.Generator().manual_seed(0)
        batches = [
            _vary_batch(captured, batch, generator) for _ in range(_VARIED_BATCHES)
        ] + batches
    return batches


def _vary_batch(
    captured: GraphCapture, batch: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Return a batch with drawn sizes.

    It has rows of the example in any order, other dims cut or repeated from a drawn offset on.
    """
    shapes = _symbolic_shapes(captured)
    chosen: dict[Any, int] = {}
    for name, shape in shapes.items():
        for size, example in zip(shape, batch[name].shape, strict=True):
            if not isinstance(size, int) and size.is_Symbol and size not in chosen:
                span = captured.exported.range_constraints.get(size)
                least, most = _MIN_SIZE, 2 * example + 3
                if span is not None:
                    least = max(least, int(span.lower))
                    most = min(most, int(span.upper)) if span.upper.is_Integer else most
                chosen[size] = int(
                    torch.randint(least, max(most, least) + 1, (), generator=generator)
                )
    varied = {}
    for name, tensor in batch.items():
        value = tensor
        for dim, size in enumerate(shapes[name]):
            if isinstance(size, int) or not size.free_symbols <= chosen.keys():
                continue
            length, present = int(size.subs(chosen)), value.shape[dim]
            if dim == 0:
                index = torch.randint(0, present, (length,), generator=generator)
            else:
                index = (
                    torch.arange(length) + int(torch.randint(0, present, (), generator=generator))
                ) % present
            value = value.index_select(dim, index.to(value.device))
        varied[name] = value
    return varied


def _symbolic_shapes(captured: GraphCapture) -> dict[str, list[Any]]:
    """Return input -> each dim's size: an int, or a symbolic expression."""
    placeholders = [n for n in captured.exported.graph.nodes if n.op == "placeholder"]
    specs = captured.exported.graph_signature.input_specs
    values = [
        n.meta["val"]
        for n, s in zip(placeholders, specs, strict=True)
        if s.kind is InputKind.USER_INPUT
    ]
    return {
        spec.name: [s if isinstance(s, int) else _plain_size(s.node.expr) for s in value.shape]
        for spec, value in zip(captured.inputs, values, strict=True)
    }


def _plain_size(expression: Any) -> Any:
    return int(expression) if expression.is_Integer else expression
