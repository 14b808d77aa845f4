"""Groups parameters into buckets."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from trainload.capture.program import ParameterSpec
from trainload.sharding.plan import Bucket, Slot

ALIGNMENT = 16
"""Parameters begin at multiples of this many elements, so that kernels may load whole vectors."""


_Kind = tuple[str, tuple[str, ...], bool]


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype, as torch spells it ("float32")."""
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


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
) -> tuple[Bucket, ...]:
    """Fills buckets with parameters in the order of their first use, one open bucket for each dtype, set of groups, and whether
    they are divided.

    Laws: every parameter is in one slot; slots begin at multiples of ALIGNMENT; a bucket is as long as a multiple of ALIGNMENT * world_size
    elements, the smallest that holds it; but for its last slot it holds less than `bucket_bytes`.

    Args:
        parameters: those that own storage; aliases are left out.
        groups_of: parameter -> its optimizer groups; a parameter that is missing is frozen.
        order: parameter names in the order of first use; parameters that it lacks come last.
        world_size: every bucket's length is a multiple of it.
        bucket_bytes: a bucket is closed when it holds this much or more.
        whole: groups whose update takes whole parameters.
        divided: parameters of which each rank of the tensor axis has a share; `parameters` has the shapes of shares.
    """
    position = {name: i for i, name in enumerate(order)}
    owners = sorted((p for p in parameters if p.alias_of is None), key=lambda p: position.get(p.name, len(position)))
    open_slots: dict[_Kind, list[Slot]] = {}
    closed: list[tuple[_Kind, list[Slot]]] = []
    for parameter in owners:
        kind = (parameter.dtype, tuple(groups_of.get(parameter.name, ())), parameter.name in divided)
        if kind not in open_slots:
            open_slots[kind] = []
            closed.append((kind, open_slots[kind]))
        slots = open_slots[kind]
        offset = _round_up(slots[-1].offset + slots[-1].length, ALIGNMENT) if slots else 0
        length = math.prod(parameter.shape)
        slots.append(Slot(parameter=parameter.name, offset=offset, length=length, shape=parameter.shape))
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
        )
        for number, ((dtype, groups, is_divided), slots) in enumerate(closed)
    )
