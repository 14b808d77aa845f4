"""Group parameters into buckets."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from trainload.capture.operators import bodies_of
from trainload.capture.program import GraphCapture, ParameterSpec
from trainload.sharding.plans.plan import Bucket, Slot

ALIGNMENT = 16
"""Parameters begin at multiples of this number of elements, so that kernels may load whole
vectors.
"""


_Kind = tuple[str, tuple[str, ...], bool, tuple[int, ...]]


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype, in torch's notation ("float32")."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    return torch_dtype.itemsize


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def make_buckets(
    parameters: Sequence[ParameterSpec],
    groups_of: Mapping[str, Sequence[str]],
    order: Sequence[str],
    world_size: int,
    bucket_bytes: int,
    whole: Collection[str] = (),
    divided: Collection[str] = (),
    stages: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[Bucket, ...]:
    """Fill buckets with parameters in the order of their first use.

    There is one open bucket for each combination of dtype, set of groups, division by the tensor
    axis, and stages.

    Laws: every parameter is in one slot; slots begin at multiples of ALIGNMENT; a bucket's length
    is the smallest sufficient multiple of ALIGNMENT * world_size elements; without its last slot it
    holds less than `bucket_bytes`.

    Args:
        parameters: the parameters; aliases are skipped.
        groups_of: parameter -> its optimizer groups; a missing parameter is frozen.
        order: parameter names in the order of first use; missing parameters come last.
        world_size: divisor of every bucket's length.
        bucket_bytes: a bucket is closed when it holds this much or more.
        whole: groups whose update needs whole parameters.
        divided: parameters of which each rank of the tensor axis has a share; `parameters` has the
            shapes of shares.
        stages: parameter -> the pipeline stages that use it; None without a pipeline.
    """
    position = {name: i for i, name in enumerate(order)}
    owners = sorted(
        (p for p in parameters if p.alias_of is None),
        key=lambda p: position.get(p.name, len(position)),
    )
    open_slots: dict[_Kind, list[Slot]] = {}
    closed: list[tuple[_Kind, list[Slot]]] = []
    for parameter in owners:
        kind = (
            parameter.dtype,
            tuple(groups_of.get(parameter.name, ())),
            parameter.name in divided,
            (stages or {}).get(parameter.name, ()),
        )
        if kind not in open_slots:
            open_slots[kind] = []
            closed.append((kind, open_slots[kind]))
        slots = open_slots[kind]
        offset = _round_up(slots[-1].offset + slots[-1].length, ALIGNMENT) if slots else 0
        length = math.prod(parameter.shape)
        slots.append(
            Slot(parameter=parameter.name, offset=offset, length=length, shape=parameter.shape)
        )
        if (offset + length) * item_bytes(parameter.dtype) >= bucket_bytes:
            del open_slots[kind]
    return tuple(
        Bucket(
            name=f"bucket{number:03d}",
            dtype=dtype,
            groups=groups,
            length=_round_up(slots[-1].offset + slots[-1].length, ALIGNMENT * world_size),
            slots=tuple(slots),
            whole=tuple(group for group in groups if group in whole),
            divided=is_divided,
            stages=used_by,
        )
        for number, ((dtype, groups, is_divided, used_by), slots) in enumerate(closed)
    )


def parameter_order(capture: GraphCapture) -> list[str]:
    """Return the names of a captured graph's parameters in the order of their first use."""
    names: dict[Node, str] = {}
    placeholders = [n for n in capture.exported.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, capture.exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.PARAMETER and spec.target is not None:
            names[node] = spec.target
    order: dict[str, None] = {}
    _walk(capture.exported.graph_module, names, order)
    return list(order)


def _walk(module: GraphModule, names: Mapping[Node, str], order: dict[str, None]) -> None:
    for node in module.graph.nodes:
        bodies = bodies_of(module, node)
        for body in bodies.values():
            inner = [n for n in body.graph.nodes if n.op == "placeholder"]
            operands = [s for s in node.args if isinstance(s, Node) and s not in bodies]
            _walk(
                body,
                {i: names[o] for i, o in zip(inner, operands, strict=False) if o in names},
                order,
            )
        for source in node.all_input_nodes:
            if source in names and node.op == "call_function":
                order.setdefault(names[source])
