"""Makes compiled operators demand of their indices what the interpreted ones demand.

Inductor takes an index below zero for one that counts from the end, in every operator. Some operators forbid it, and raise in eager mode; a
compiled graph would go on with another row. Before compilation their indices below zero are replaced by one that is beyond any size, which
the code that Inductor generates raises for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

from trainload.capture.operators import calls_in

aten = torch.ops.aten
_BEYOND = 2**31 - 1
"""An index that no dim has, in int32 and int64."""
_INDEX = 2
"""Where the index stands among the arguments of these operators."""
_FROM_ZERO = frozenset({aten.index_add.default, aten.index_copy.default, aten.index_select.default})
"""Operators that take no index below zero, and whose index Inductor does not check for it."""


def forbid_negative_indices(module: GraphModule) -> None:
    """Replace indices below zero of operators that take none by one that raises. In place; what an allowed index gives stays the same.

    Args:
        module: a flat graph that is about to be compiled. Every node has `meta["val"]`.
    """
    for node in list(calls_in(module)):
        if node.target not in _FROM_ZERO:
            continue
        index = node.args[_INDEX]
        assert isinstance(index, torch.fx.Node), "an operator's index is a tensor"
        value: Tensor = index.meta["val"]
        graph = node.graph
        with graph.inserting_before(node):
            below = graph.call_function(aten.lt.Scalar, (index, 0))
            allowed = graph.call_function(aten.where.ScalarSelf, (below, _BEYOND, index))
        below.meta["val"], allowed.meta["val"] = value.new_empty(value.shape, dtype=torch.bool), value
        node.update_arg(_INDEX, allowed)
