"""Orders of a pipeline's actions: torch's schedules, and impossible orders."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from trainload.core.errors import PlanError
from trainload.sharding.pipeline.stage_schedule import (
    Action,
    Message,
    instructions,
    make_order,
    stage_ranks,
)
from trainload.sharding.pipeline.stages import Part
from trainload.sharding.plans.strategies import SCHEDULES, Schedule

RANKS = 4
PER_RANK: dict[Schedule, tuple[int, ...]] = {
    "gpipe": (1, 2),
    "1f1b": (1, 2, 3),
    "zero-bubble": (1, 2),
    "zbv": (2,),
    "dualpipev": (2,),
}
ALL = [(name, per_rank) for name, counts in PER_RANK.items() for per_rank in counts]
TWO = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))


def test_every_schedule_is_tried() -> None:
    assert set(PER_RANK) == set(SCHEDULES)


@pytest.mark.parametrize(("schedule", "per_rank"), ALL)
@pytest.mark.parametrize("microbatches", [8, 16])
def test_every_stage_does_its_work_on_every_microbatch(
    schedule: Schedule, per_rank: int, microbatches: int
) -> None:
    order = make_order(schedule, RANKS, per_rank, microbatches)
    done = Counter(action for row in order for action in row)
    assert set(done.values()) == {1}
    for stage, number in itertools.product(range(RANKS * per_rank), range(microbatches)):
        parts = {part.value for part in Part if f"{stage}{part.value}{number}" in done}
        assert parts in ({"F", "B"}, {"F", "I", "W"})


@pytest.mark.parametrize(("schedule", "per_rank"), ALL)
def test_any_two_ranks_have_their_messages_in_one_order(schedule: Schedule, per_rank: int) -> None:
    made = instructions(
        make_order(schedule, RANKS, per_rank, 8), stage_ranks(schedule, RANKS, per_rank), 8
    )
    for one, other in itertools.combinations(range(RANKS), 2):
        between = [
            [
                m
                for m in made[rank]
                if isinstance(m, Message) and {m.source, m.target} == {one, other}
            ]
            for rank in (one, other)
        ]
        assert between[0] == between[1]


@pytest.mark.parametrize(("schedule", "per_rank"), ALL)
def test_a_message_comes_after_its_making_and_before_its_use(
    schedule: Schedule, per_rank: int
) -> None:
    homes = stage_ranks(schedule, RANKS, per_rank)
    made = instructions(make_order(schedule, RANKS, per_rank, 8), homes, 8)
    messages = {m for row in made for m in row if isinstance(m, Message)}
    crossings = sum(a != b for a, b in itertools.pairwise(homes))
    assert len(messages) == 2 * 8 * crossings
    for message in messages:
        maker, user = (
            (message.boundary, message.boundary + 1)
            if message.up
            else (message.boundary + 1, message.boundary)
        )
        parts = (Part.FORWARD,) if message.up else (Part.BACKWARD, Part.INPUT)
        sent, received = made[message.source].index(message), made[message.target].index(message)
        assert any(
            Action(maker, part, message.microbatch) in made[message.source][:sent] for part in parts
        )
        assert any(
            Action(user, part, message.microbatch) in made[message.target][received:]
            for part in parts
        )


def test_1f1b_holds_as_many_microbatches_as_ranks_follow() -> None:
    order = make_order("1f1b", RANKS, 1, 16)
    for rank, row in enumerate(order):
        held = list(itertools.accumulate(1 if "F" in action else -1 for action in row))
        assert max(held) <= RANKS - rank + (rank < RANKS - 1)


def test_a_schedule_shaped_like_a_v_has_the_first_and_the_last_stage_on_one_rank() -> None:
    assert stage_ranks("zbv", RANKS, 2) == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize(
    ("schedule", "per_rank", "microbatches", "reason"),
    [
        ("zbv", 1, 8, "has two stages on each rank"),
        ("1f1b", 2, 9, "cannot be made"),
        ("1f1b", 1, 2, "cannot be made"),
        ("dualpipev", 2, 4, "cannot be made"),
    ],
)
def test_what_torch_refuses_is_refused(
    schedule: Schedule, per_rank: int, microbatches: int, reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        make_order(schedule, RANKS, per_rank, microbatches)


@pytest.mark.parametrize(
    ("order", "line"),
    [
        (
            (("0F0", "0F1", "0B0"), TWO[1]),
            (
                "plan.pipeline.order: stage 0, microbatch 1: a stage does not complete its work on"
                " a microbatch"
            ),
        ),
        (
            (TWO[0], (*TWO[1], "1B1")),
            "plan.pipeline.order, rank 1: an action of the pipeline occurs twice",
        ),
        (
            (TWO[1], TWO[0]),
            (
                "plan.pipeline.order, rank 0: an action of the pipeline occurs twice, is on a rank"
                " without its stage"
            ),
        ),
        (
            (("0B0", "0F0", "0F1", "0B1"), TWO[1]),
            "plan.pipeline.order, rank 0: the pipeline's ranks would deadlock",
        ),
        (
            (("0F1", "0B1", "0F0", "0B0"), TWO[1]),
            "plan.pipeline.order, rank 0: the pipeline's ranks would deadlock",
        ),
        (
            (("0F0", "0F1", "0B0", "0X1"), TWO[1]),
            "plan.pipeline.order: this is not an action of a pipeline",
        ),
        (
            (("0F0", "0F1", "0F2", "0B0", "0B1"), TWO[1]),
            "plan.pipeline.order, rank 0: an action of the pipeline occurs twice",
        ),
    ],
)
def test_an_order_that_cannot_be_is_refused(order: tuple[tuple[str, ...], ...], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        instructions(order, (0, 1), 2)
    assert str(caught.value).startswith(line)


def test_an_order_that_can_be_is_taken() -> None:
    assert [len(row) for row in instructions(TWO, (0, 1), 2)] == [8, 8]
