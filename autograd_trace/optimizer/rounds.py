"""Unroll a recipe's loop: which graph is called when, on which global batch. Everything follows
from the number of the round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainload.autograd_trace.graphs import Recipe, TurnRecipe


@dataclass(frozen=True, slots=True)
class TurnCall:
    """One call of a graph within a round.

    Attributes:
        graph: name of the graph.
        draw: index, from 0, of the global batch within the round that it reads.
        count: number of turns that the graph has had before, in all rounds.
    """

    graph: str
    draw: int
    count: int


def runs_before(turn: TurnRecipe, round_number: int) -> int:
    """Return the number of earlier rounds in which the turn was taken."""
    return max(0, -(-(round_number - turn.start) // turn.every))


def taken(turn: TurnRecipe, round_number: int) -> bool:
    """Return True if the turn is taken in a round."""
    return round_number >= turn.start and (round_number - turn.start) % turn.every == 0


def turns_before(turns: Sequence[TurnRecipe], graph: str, round_number: int) -> int:
    """Return the number of calls of a graph before a round."""
    return sum(
        turn.times * runs_before(turn, round_number) for turn in turns if turn.graph == graph
    )


def draws_before(recipe: Recipe, round_number: int) -> int:
    """Return the number of global batches that were read before a round."""
    own = sum(turn.times * runs_before(turn, round_number) for turn in recipe.turns if turn.fresh)
    return own + (round_number if _shares(recipe) else 0)


def draws_of(recipe: Recipe, round_number: int) -> int:
    """Return the number of global batches that a round reads."""
    return draws_before(recipe, round_number + 1) - draws_before(recipe, round_number)


def calls_of(recipe: Recipe, round_number: int) -> Iterator[TurnCall]:
    """Yield the calls of a round, in order.

    The round's own batch, if any turn shares it, is its first; fresh ones follow in order.
    """
    counts = {
        turn.graph: turns_before(recipe.turns, turn.graph, round_number) for turn in recipe.turns
    }
    draw = 1 if _shares(recipe) else 0
    for turn in recipe.turns:
        if not taken(turn, round_number):
            continue
        for _ in range(turn.times):
            yield TurnCall(turn.graph, draw if turn.fresh else 0, counts[turn.graph])
            counts[turn.graph] += 1
            draw += turn.fresh


def _shares(recipe: Recipe) -> bool:
    return any(not turn.fresh for turn in recipe.turns)
