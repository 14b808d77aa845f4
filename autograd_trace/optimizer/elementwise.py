"""Decide whether an update works element by element, so that it may run on any slice of a parameter
that a rank holds.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from trainload.autograd_trace.graphs import UpdateGraph
from trainload.capture.operators import Overload, calls_in, is_overload

_HOP = torch.ops.higher_order
_ATEN = torch.ops.aten
_COPIES: set[Any] = {
    _ATEN.clone.default,
    _ATEN.detach.default,
    _ATEN.detach_.default,
    _ATEN.lift_fresh_copy.default,
    _ATEN.alias.default,
    _ATEN.copy_.default,
    _ATEN.to.dtype,
    _ATEN._to_copy.default,
    _ATEN.scalar_tensor.default,
    _ATEN.zeros.default,
    _ATEN.ones.default,
    _ATEN.full.default,
    _ATEN.empty_like.default,
    _ATEN.zeros_like.default,
    _ATEN.ones_like.default,
    _ATEN.full_like.default,
    _ATEN.fill_.Scalar,
    _ATEN.zero_.default,
    _ATEN.type_as.default,
    _ATEN.to.device,
    _ATEN.where.ScalarOther,
    _ATEN.where.ScalarSelf,
    _ATEN.where.Scalar,
    _ATEN._assert_tensor_metadata.default,
}
"""Operators that do not mix elements and that torch does not tag as pointwise."""
_OF_0_DIM: set[Any] = {
    _ATEN.reshape.default,
    _ATEN.view.default,
    _ATEN.expand.default,
    _ATEN.squeeze.default,
}
"""Operators that do not mix elements if their input is a 0-dim tensor."""


def is_elementwise(update: UpdateGraph) -> bool:
    """Return True if every operator of the update's graphs works element by element, according to
    torch's tags.
    """
    return _works_by_element(update.first) and _works_by_element(update.following)


def _works_by_element(exported: ExportedProgram) -> bool:
    for node in calls_in(exported.graph_module):
        if node.target in (_HOP.wrap_with_set_grad_enabled, operator.getitem):
            continue
        if not is_overload(node.target):
            if not isinstance(node.meta.get("val"), Tensor):
                continue
            return False
        if node.target in _OF_0_DIM and node.all_input_nodes[0].meta["val"].ndim == 0:
            continue
        base = _functional_form(node.target)
        if (
            torch.Tag.pointwise not in node.target.tags
            and torch.Tag.pointwise not in base.tags
            and node.target not in _COPIES
        ):
            return False
    return True


def _functional_form(target: Overload) -> Overload:
    """Return the functional form of an in-place overload, such as `aten.add.Tensor` of
    `aten.add_.Tensor`, or the overload itself.
    """
    packet_name = target.overloadpacket.__name__.removesuffix("_")
    packet = getattr(torch.ops.aten, packet_name, target.overloadpacket)
    overload = target._overloadname
    return getattr(packet, overload) if overload in packet.overloads() else target
