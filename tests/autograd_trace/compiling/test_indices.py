"""A compiled operator accepts the same indices as the interpreted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainload.autograd_trace.compiling.inductor import compile_graph, load_compiled
from trainload.autograd_trace.derivation.aot import fake_mode, trace_flat

ROWS, WIDTH = 6, 4
Take = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Type of an operator on values (ROWS, WIDTH), an index (3,) and a source (3, WIDTH)."""
OPERATORS: dict[str, Take] = {
    "index_add": lambda x, i, s: x.index_add(0, i, s),
    "index_copy": lambda x, i, s: x.index_copy(0, i, s),
    "index_select": lambda x, i, s: x.index_select(0, i) + s,
    "index_fill": lambda x, i, s: x.index_fill(0, i, 1.0),
    "index_reduce": lambda x, i, s: x.index_reduce(0, i, s, "amax"),
    "index": lambda x, i, s: x[i] + s,
    "index_put": lambda x, i, s: x.index_put((i,), s),
    "index_put, accumulated": lambda x, i, s: x.index_put((i,), s, accumulate=True),
    "gather": lambda x, i, s: x.gather(0, i[:, None].expand(3, WIDTH)) + s,
    "take": lambda x, i, s: x.take(i) + s[:, 0],
    "scatter": lambda x, i, s: x.scatter(0, i[:, None].expand(3, WIDTH), s),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i[:, None].expand(3, WIDTH), s),
    "scatter_reduce": lambda x, i, s: x.scatter_reduce(0, i[:, None].expand(3, WIDTH), s, "amax"),
    "embedding": lambda x, i, s: functional.embedding(i, x) + s,
    "embedding_bag": lambda x, i, s: functional.embedding_bag(i[None], x) + s[:1],
    "cross_entropy": lambda x, i, s: functional.cross_entropy(s, i),
    "multi_margin_loss": lambda x, i, s: functional.multi_margin_loss(s, i),
}
INDICES = ([0, 2, 3], [1, 0, -1], [1, 2, -7], [0, 1, 4], [0, 1, 6], [0, 1, 24])


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.matrix("index_select")
@pytest.mark.parametrize("name", OPERATORS)
def test_an_index_is_allowed_compiled_where_it_is_interpreted(name: str, tmp_path: Path) -> None:
    take = OPERATORS[name]
    x, source = torch.randn(ROWS, WIDTH), torch.randn(3, WIDTH)
    mode = fake_mode()
    fakes = [mode.from_tensor(value) for value in (x, torch.tensor(INDICES[0]), source)]
    compile_graph(trace_flat(lambda *given: [take(*given)], fakes), tmp_path / "graph.bin", {})
    compiled = load_compiled(tmp_path / "graph.bin")
    for numbers in INDICES:
        index = torch.tensor(numbers)
        try:
            expected = take(x, index, source)
        except (IndexError, RuntimeError):
            with pytest.raises((IndexError, RuntimeError)):
                compiled(x, index, source)
        else:
            torch.testing.assert_close(compiled(x, index, source)[0], expected)
