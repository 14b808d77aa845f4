"""A run on a range of nodes has a plan for each size that divides its global batch.

The range's maximum need not be one of these sizes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import trainload
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.planner.replan import largest_size, plans_of_sizes
from trainload.sharding.plans.plan import Plan

BATCH = 8


def planned(package: Package, least: int, most: int, **batch: Any) -> tuple[Plan, ...]:
    """Return the plans of `launch --nodes least:most --workers 1`."""
    sizes = range(least, most + 1)
    first = trainload.plan(
        package, trainload.Cluster(nodes=largest_size(package, sizes, 1, **batch)), None, **batch
    )
    return plans_of_sizes(package, first, sizes)


@pytest.mark.parametrize(
    ("least", "most", "sizes"),
    [(1, 3, [1, 2]), (2, 3, [2]), (1, 4, [1, 2, 4]), (1, 7, [1, 2, 4]), (4, 8, [4, 8])],
)
def test_sizes_that_do_not_divide_the_global_batch_are_left_out(
    tiny: Package, least: int, most: int, sizes: list[int]
) -> None:
    found = planned(tiny, least, most, global_batch=BATCH)
    assert [plan.cluster.nodes for plan in found] == sizes
    assert {plan.global_batch for plan in found} == {BATCH}


def test_microbatches_count_as_ranks_do(tiny: Package) -> None:
    assert largest_size(tiny, range(1, 9), 1, global_batch=BATCH, accumulate=2) == 4
    assert [
        plan.cluster.nodes for plan in planned(tiny, 1, 8, global_batch=BATCH, accumulate=2)
    ] == [1, 2, 4, 8]


def test_devices_of_a_node_count(tiny: Package) -> None:
    assert largest_size(tiny, range(1, 9), 4, global_batch=BATCH) == 2


def test_the_jobs_own_global_batch_is_taken_where_none_is_given(tiny: Package) -> None:
    recipe = tiny.recipe.model_copy(update={"global_batch": 6})
    changed = dataclasses.replace(
        tiny, manifest=tiny.manifest.model_copy(update={"recipe": recipe})
    )
    assert largest_size(changed, range(1, 6), 1) == 3


def test_a_range_of_which_nothing_fits_says_why_one_by_one(tiny: Package) -> None:
    with pytest.raises(PlanError) as caught:
        planned(tiny, 5, 6, global_batch=BATCH)
    assert caught.value.where == "5 to 6 nodes of 1 devices"
    assert (
        caught.value.got
        == "5: the global batch cannot be split evenly; 6: the global batch cannot be split evenly"
    )
    assert "launch with --set global_batch=N" in caught.value.hint
    assert "--global-batch" not in str(caught.value)
