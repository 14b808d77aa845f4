"""Schedule of each rank of a pipeline: torch's schedules as tables, checked, with the messages that
belong to them.

A table is data. torch's classes make it; none of them runs in training. An action is in torch's
notation: stage, part, microbatch, as in "0F3".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributed import pipelining

from trainload.core.errors import PlanError
from trainload.sharding.pipeline.stages import Part
from trainload.sharding.plans.strategies import Schedule

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\((\d+[FBIW]\d+);(\d+[FBIW]\d+)\)OVERLAP_F_B")
_V_SHAPED = frozenset({"zbv", "dualpipev"})


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """Work of a rank on a microbatch at one of its stages."""

    stage: int
    part: Part
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.part.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that `str` wrote. Raise PlanError if the text is malformed."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise PlanError(
                "this is not an action of a pipeline",
                where="plan.pipeline.order",
                expected="such as 0F3, 0B3, 0I3 or 0W3",
                got=text,
            )
        return cls(int(match[1]), Part(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Message:
    """A message across a boundary for a microbatch: `up` from stage `boundary` to the next, or down
    to it.

    `source` and `target` are ranks of the pipeline.
    """

    boundary: int
    up: bool
    microbatch: int
    source: int
    target: int


Instruction = Action | Message
Order = tuple[tuple[str, ...], ...]


def stage_ranks(schedule: Schedule, ranks: int, per_rank: int) -> tuple[int, ...]:
    """Return the pipeline rank of stage 0, 1, ..."""
    if schedule in _V_SHAPED:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * per_rank


def make_order(schedule: Schedule, ranks: int, per_rank: int, microbatches: int) -> Order:
    """Return the actions of each rank of a pipeline, in order.

    Raises:
        PlanError: the schedule does not support this number of stages or microbatches.
    """
    if (schedule in _V_SHAPED) != (per_rank == 2) and schedule in _V_SHAPED:
        raise PlanError(
            f"the schedule {schedule} has two stages on each rank",
            where="pipeline",
            expected="2",
            got=str(per_rank),
        )
    homes = stage_ranks(schedule, ranks, per_rank)
    try:
        table = _table(schedule, homes, ranks, per_rank, microbatches)
    except (ValueError, AssertionError) as error:
        raise PlanError(
            f"the schedule {schedule} cannot be made",
            where="pipeline",
            expected="microbatches and stages that torch's schedule accepts",
            got=f"{ranks} ranks of {per_rank} stages, {microbatches} microbatches: {error}",
            hint=(
                "Choose another number of microbatches (--accumulate), or the schedule 1f1b with"
                " one stage on each rank."
            ),
        ) from error
    order = tuple(tuple(str(action) for action in table[rank]) for rank in range(ranks))
    instructions(order, homes, microbatches)
    return order


def _table(
    schedule: Schedule, homes: Sequence[int], ranks: int, per_rank: int, microbatches: int
) -> list[list[Action]]:
    makers: dict[Schedule, Callable[..., Any]] = {
        "gpipe": pipelining.ScheduleGPipe if per_rank == 1 else pipelining.ScheduleLoopedBFS,
        "1f1b": pipelining.Schedule1F1B if per_rank == 1 else pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
        "zbv": pipelining.ScheduleZBVZeroBubble,
        "dualpipev": pipelining.ScheduleDualPipeV,
    }
    # The classes only look at a stage's position.
    stages = [
        SimpleNamespace(
            num_stages=len(homes),
            group_size=ranks,
            group_rank=0,
            group=None,
            stage_index=stage,
            has_backward=True,
            is_first=stage == 0,
            is_last=stage == len(homes) - 1,
            stage_index_to_group_rank={},
            submod=None,
        )
        for stage, home in enumerate(homes)
        if home == 0
    ]
    single = makers[schedule] in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B)
    torch_schedule = makers[schedule](
        stages[0] if single else stages, n_microbatches=microbatches, loss_fn=lambda *_: None
    )
    return [_renumber(_parse_row(torch_schedule.pipeline_order[rank])) for rank in range(ranks)]


def _parse_row(row: Sequence[object]) -> list[Action]:
    actions: list[Action] = []
    for entry in row:
        text = str(entry)
        pair = _OVERLAPPED.fullmatch(text)
        actions += [
            Action.parse(t)
            for t in ((pair[1], pair[2]) if pair else (text,))
            if _ACTION.fullmatch(t)
        ]
    return actions


def _renumber(actions: Sequence[Action]) -> list[Action]:
    """Number forwards in order: before torch 2.15, its 1F1B table numbers those of the last rank
    from 1.
    """
    counts: dict[int, int] = {}
    renumbered: list[Action] = []
    for action in actions:
        if action.part is Part.FORWARD:
            number = counts.get(action.stage, 0)
            counts[action.stage] = number + 1
            renumbered.append(Action(action.stage, action.part, number))
        else:
            renumbered.append(action)
    return renumbered


def instructions(order: Order, homes: Sequence[int], microbatches: int) -> list[list[Instruction]]:
    """Return the actions and messages of each rank of a pipeline, in an order in which the ranks do
    not deadlock.

    A message comes after the action that makes it in its sender's list. In its receiver's list it
    comes at the position that the receiver has reached by then, so that any two ranks have their
    messages in the same order.

    Args:
        order: the actions of each rank.
        homes: stage -> its rank.
        microbatches: microbatches of one step.

    Raises:
        PlanError: a stage does not do all of its work exactly once, or the ranks would deadlock.
    """
    rows = [[Action.parse(text) for text in row] for row in order]
    _check_complete(rows, homes, microbatches)
    by_rank: list[list[Instruction]] = [[] for _ in rows]
    completed: set[Action] = set()
    at = [0] * len(rows)
    while any(at[rank] < len(row) for rank, row in enumerate(rows)):
        ready = [
            rank
            for rank, row in enumerate(rows)
            if at[rank] < len(row) and _is_ready(row[at[rank]], completed, len(homes))
        ]
        if not ready:
            rank = next(rank for rank, row in enumerate(rows) if at[rank] < len(row))
            raise PlanError(
                "the pipeline's ranks would deadlock",
                where=f"plan.pipeline.order, rank {rank}",
                expected="an order in which every action comes after what it needs",
                got=f"{rows[rank][at[rank]]} waits",
            )
        for rank in ready:
            action = rows[rank][at[rank]]
            by_rank[rank].append(action)
            at[rank] += 1
        for rank in ready:
            action = rows[rank][at[rank] - 1]
            completed.add(action)
            message = message_of(action, homes)
            if message is not None and message.source != message.target:
                by_rank[message.source].append(message)
                by_rank[message.target].append(message)
    return by_rank


def message_of(action: Action, homes: Sequence[int]) -> Message | None:
    """Return the message that an action makes for another stage, even one on the same rank, or
    None. `homes`: stage -> its rank.
    """
    stage = action.stage
    if action.part is Part.FORWARD and stage < len(homes) - 1:
        return Message(stage, True, action.microbatch, homes[stage], homes[stage + 1])
    if action.part in (Part.BACKWARD, Part.INPUT) and stage:
        return Message(stage - 1, False, action.microbatch, homes[stage], homes[stage - 1])
    return None


def _is_ready(action: Action, completed: set[Action], count: int) -> bool:
    stage, number = action.stage, action.microbatch
    if action.part is Part.FORWARD:
        return stage == 0 or Action(stage - 1, Part.FORWARD, number) in completed
    if action.part is Part.WEIGHT:
        return Action(stage, Part.INPUT, number) in completed
    if Action(stage, Part.FORWARD, number) not in completed:
        return False
    return stage == count - 1 or any(
        Action(stage + 1, part, number) in completed for part in (Part.BACKWARD, Part.INPUT)
    )


def _check_complete(
    rows: Sequence[Sequence[Action]], homes: Sequence[int], microbatches: int
) -> None:
    where: dict[Action, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if (
                action in where
                or action.stage >= len(homes)
                or homes[action.stage] != rank
                or action.microbatch >= microbatches
            ):
                raise PlanError(
                    "an action of the pipeline occurs twice, is on a rank without its stage, or is"
                    " for an unknown microbatch",
                    where=f"plan.pipeline.order, rank {rank}",
                    got=str(action),
                )
            where[action] = rank
    for stage in range(len(homes)):
        for number in range(microbatches):
            parts = {part for part in Part if Action(stage, part, number) in where}
            if parts not in (
                {Part.FORWARD, Part.BACKWARD},
                {Part.FORWARD, Part.INPUT, Part.WEIGHT},
            ):
                raise PlanError(
                    "a stage does not complete its work on a microbatch",
                    where=f"plan.pipeline.order: stage {stage}, microbatch {number}",
                    expected="F and B, or F, I and W",
                    got=", ".join(sorted(part.value for part in parts)) or "nothing",
                )
