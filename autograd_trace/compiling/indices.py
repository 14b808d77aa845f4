"""Make compiled operators reject the indices that the interpreted ones reject.

Inductor lets a negative index count from the end in every operator. Some operators reject it in
eager mode; compiled, they would use another row. So before compilation, a negative index of these
operators is replaced by one that is out of range for any size, for which the code that Inductor
generates raises.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

from trainload.capture.operators import calls_in

aten = torch.ops.aten
_BEYOND = 2**31 - 1
"""An index that is out of range for any dim, as int32 or int64."""
_INDEX = 2
"""Position of the index among the arguments of these operators."""
_FROM_ZERO = frozenset({aten.index_add.default, aten.index_copy.default, aten.index_select.default})
"""Operators that reject a negative index in eager mode but not when Inductor compiles them."""


def forbid_negative_indices(module: GraphModule) -> None:
    """Replace negative indices of operators that reject them by an index that raises. In place;
    results of valid indices do not change.

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
        below.meta["val"], allowed.meta["val"] = (
            value.new_empty(value.shape, dtype=torch.bool),
            value,
        )
        node.update_arg(_INDEX, allowed)
