"""Invariants of buckets."""

from __future__ import annotations

import pytest

from trainload.capture.program import ParameterSpec
from trainload.sharding.plans.buckets import ALIGNMENT, item_bytes, make_buckets
from trainload.sharding.plans.plan import Bucket

SHAPES = [(3, 5), (7,), (), (64, 2), (1,), (33,), (0, 4), (129,)]
PARAMETERS = [
    ParameterSpec(f"p{i}", "bfloat16" if i == 4 else "float32", shape, i != 5)
    for i, shape in enumerate(SHAPES)
]
GROUPS = {f"p{i}": ("a",) if i % 2 else ("b",) for i in range(len(SHAPES)) if i != 5}


def buckets(world: int = 3, size: int = 256, order: tuple[str, ...] = ()) -> tuple[Bucket, ...]:
    alias = ParameterSpec("alias", "float32", (3, 5), True, alias_of="p0")
    return make_buckets([*PARAMETERS, alias], GROUPS, order, world, size)


@pytest.mark.parametrize("world", [1, 2, 3, 8, 1000])
def test_the_length_divides_by_the_world_size(world: int) -> None:
    assert all(b.length % world == 0 for b in buckets(world))


@pytest.mark.parametrize("world", [1, 2, 3, 8, 1000])
def test_no_bucket_is_longer_than_alignment_asks(world: int) -> None:
    for bucket in buckets(world):
        last = bucket.slots[-1]
        assert 0 <= bucket.length - (last.offset + last.length) < ALIGNMENT * world


@pytest.mark.parametrize("size", [1, 256, 10**9])
def test_every_owner_is_in_one_slot(size: int) -> None:
    assert sorted(s.parameter for b in buckets(size=size) for s in b.slots) == sorted(
        p.name for p in PARAMETERS
    )


@pytest.mark.parametrize("size", [1, 256, 10**9])
def test_slots_are_in_order_aligned_and_apart(size: int) -> None:
    for bucket in buckets(size=size):
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            assert slot.offset % ALIGNMENT == 0
            end = slot.offset + slot.length
        assert end <= bucket.length


def test_a_bucket_has_one_dtype_and_one_group() -> None:
    dtypes = {p.name: p.dtype for p in PARAMETERS}
    for bucket in buckets(size=10**9):
        assert {(dtypes[s.parameter], GROUPS.get(s.parameter, ())) for s in bucket.slots} == {
            (bucket.dtype, bucket.groups)
        }


def test_a_parameter_without_a_group_is_frozen() -> None:
    assert [b.groups for b in buckets() for s in b.slots if s.parameter == "p5"] == [()]


def test_all_but_the_last_slot_hold_less_than_the_bucket_size() -> None:
    for bucket in buckets(size=256):
        assert sum(s.length for s in bucket.slots[:-1]) * item_bytes(bucket.dtype) < 256


def test_parameters_come_in_the_order_of_their_first_use() -> None:
    placed = [s.parameter for b in buckets(size=10**9, order=("p7", "p3", "p1")) for s in b.slots]
    assert placed.index("p7") < placed.index("p3") < placed.index("p1")


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8_e4m3fn", 1)]
)
def test_an_element_has_its_dtypes_bytes(dtype: str, size: int) -> None:
    assert item_bytes(dtype) == size
