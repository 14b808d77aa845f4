"""Calls in a round of the training loop, and their batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainload.autograd_trace.graphs import Recipe, TurnRecipe
from trainload.autograd_trace.optimizer.rounds import (
    TurnCall,
    calls_of,
    draws_before,
    draws_of,
    turns_before,
)

TURNS = st.builds(
    TurnRecipe,
    graph=st.sampled_from(["a", "b", "c"]),
    times=st.integers(1, 3),
    every=st.integers(1, 4),
    start=st.integers(0, 5),
    fresh=st.booleans(),
)


def recipe(*turns: TurnRecipe) -> Recipe:
    return Recipe(optimizer="SGD", groups=(), steps=9, global_batch=4, loop=turns)


@given(st.lists(TURNS, min_size=1, max_size=4), st.integers(0, 20))
def test_turns_before_a_round_are_those_that_the_rounds_before_it_called(
    turns: list[TurnRecipe], number: int
) -> None:
    made = recipe(*turns)
    called = [call for before in range(number) for call in calls_of(made, before)]
    for graph in {turn.graph for turn in turns}:
        assert turns_before(turns, graph, number) == sum(call.graph == graph for call in called)


@given(st.lists(TURNS, min_size=1, max_size=4), st.integers(0, 20))
def test_a_graphs_calls_are_counted_without_gaps(turns: list[TurnRecipe], rounds: int) -> None:
    made = recipe(*turns)
    called = [call for number in range(rounds) for call in calls_of(made, number)]
    for graph in {turn.graph for turn in turns}:
        counts = [call.count for call in called if call.graph == graph]
        assert counts == list(range(len(counts)))


@given(st.lists(TURNS, min_size=1, max_size=4), st.integers(0, 20))
def test_a_round_draws_what_its_turns_read(turns: list[TurnRecipe], number: int) -> None:
    made = recipe(*turns)
    read = {call.draw for call in calls_of(made, number)}
    shared = {0} if any(not turn.fresh for turn in turns) else set()
    assert read | shared == set(range(draws_of(made, number)))
    assert draws_before(made, number) == sum(draws_of(made, before) for before in range(number))


def test_fresh_turns_read_batches_of_their_own() -> None:
    made = recipe(
        TurnRecipe(graph="a", times=2, fresh=True),
        TurnRecipe(graph="b"),
        TurnRecipe(graph="b", every=2, start=1),
    )
    assert list(calls_of(made, 0)) == [
        TurnCall("a", 1, 0),
        TurnCall("a", 2, 1),
        TurnCall("b", 0, 0),
    ]
    assert list(calls_of(made, 1)) == [
        TurnCall("a", 1, 2),
        TurnCall("a", 2, 3),
        TurnCall("b", 0, 1),
        TurnCall("b", 0, 2),
    ]


@pytest.mark.parametrize("step", [0, 1, 10**9])
def test_a_recipe_without_a_loop_calls_its_graph_once_a_step(step: int) -> None:
    assert list(calls_of(recipe(), step)) == [TurnCall("train", 0, step)]
    assert draws_before(recipe(), step) == step
