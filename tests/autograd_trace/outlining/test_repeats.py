"""Repeated stretches of a sequence are found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainload.autograd_trace.outlining.repeats import Repeat, find_repeats

ITEMS = st.lists(st.integers(0, 3), max_size=60)


def test_a_sequence_without_repetition_has_none() -> None:
    assert find_repeats(range(50), 2) == []


def test_three_occurrences_between_other_items_are_found() -> None:
    assert find_repeats([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8], 3) == [Repeat(1, 3, 6)]


def test_a_part_of_another_occurrence_leaves_slack() -> None:
    (repeat,) = find_repeats([1, 2, 3, 1, 2, 3, 1, 9], 3)
    assert (repeat.count, repeat.slack) == (2, 1)


def test_two_kinds_of_layers_are_two_repeats() -> None:
    found = find_repeats([1, 2, 3] * 4 + [7] + [4, 5, 6, 7] * 3, 3)
    assert [(each.start, each.period, each.count) for each in found] == [(0, 3, 4), (12, 4, 3)]


def test_the_repeat_that_saves_most_is_taken() -> None:
    (repeat,) = find_repeats([1, 1, 2, 1, 1, 2, 1, 1, 2], 1)
    assert (repeat.period, repeat.count) == (3, 3)


@given(before=ITEMS, layer=st.lists(st.integers(4, 9), min_size=3, max_size=12), after=ITEMS)
def test_layers_are_found_wherever_they_are(
    before: list[int], layer: list[int], after: list[int]
) -> None:
    items = [*before, *(layer * 5), *after]
    found = find_repeats(items, 2)
    assert sum(repeat.saved for repeat in found) >= 4 * len(layer)


@given(items=ITEMS)
def test_occurrences_are_equal_and_disjoint(items: list[int]) -> None:
    end = 0
    for repeat in find_repeats(items, 2):
        assert repeat.start >= end
        end = repeat.start + repeat.count * repeat.period
        layer = items[repeat.start : repeat.start + repeat.period]
        assert items[repeat.start : end] == layer * repeat.count
        assert repeat.count >= 2
