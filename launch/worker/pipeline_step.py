"""Run a pipeline-parallel step on one rank: its actions in order, with sends and receives between
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainload.autograd_trace.derivation.named_groups import group_named
from trainload.autograd_trace.graphs import Role
from trainload.autograd_trace.optimizer.rounds import TurnCall
from trainload.launching.node.built_graphs import BuiltStages
from trainload.launching.worker.calls import CallContext, Calls, Microbatch
from trainload.sharding.pipeline.pipeline_axis import dtype_of, shape_of
from trainload.sharding.pipeline.stage_schedule import (
    Action,
    Instruction,
    Message,
    instructions,
    message_of,
)
from trainload.sharding.pipeline.stages import Part, Value
from trainload.sharding.plans.plan import PIPELINE, Plan


@dataclass(slots=True)
class _PendingSend:
    """Tensors that are being sent to another rank; they are kept alive until they have arrived."""

    work: list[dist.Work]
    values: list[Tensor]


class PipelineRunner:
    """Caller of the pipeline stages of one rank.

    Law: two ranks exchange messages in one order, that of `instructions`, regardless of their data.

    Args:
        plan: plan with a pipeline, whose process groups are bound.
        rank: this rank.
        device: device of this rank.
        calls: caller of graphs.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device, calls: Calls) -> None:
        assert plan.pipeline is not None
        self._pipeline, self._device, self._calls = plan.pipeline, device, calls
        self._index = plan.pipeline_index(rank)
        self._instructions = instructions(
            plan.pipeline.order, plan.pipeline.stage_ranks, plan.accumulate
        )[self._index]
        self._evaluation = _forward_only(plan.pipeline.stage_ranks)[self._index]

    def train(
        self, stages: BuiltStages, turn: TurnCall, microbatches: Sequence[Microbatch]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Run forward and backward of this rank's stages over all microbatches.

        Returns:
            The sum of the totals on the rank with the last stage, None on others; and the gradients
            of the buckets that got any.
        """
        return self._run(self._instructions, stages, turn, microbatches)

    def evaluate(
        self, stages: BuiltStages, turn: TurnCall, microbatch: Microbatch
    ) -> Tensor | None:
        """Run forward of this rank's stages; return the totals on the rank with the last stage,
        None on others.
        """
        totals, _ = self._run(self._evaluation, stages, turn, [microbatch])
        return totals

    def shared(self, totals: Tensor | None, count: int) -> Tensor:
        """Return, on all ranks of the pipeline, the totals (count,) that one of them has."""
        value = (
            torch.zeros(count, dtype=torch.float32, device=self._device)
            if totals is None
            else totals
        )
        summed: Tensor = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(value, "sum", PIPELINE)
        )
        return summed

    def _run(
        self,
        program: Sequence[Instruction],
        stages: BuiltStages,
        turn: TurnCall,
        microbatches: Sequence[Microbatch],
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        gradients: dict[str, Tensor] = {}
        totals: Tensor | None = None
        contexts: dict[tuple[int, int], CallContext] = {}
        arriving: dict[tuple[int, int], list[tuple[dist.Work, str, Tensor]]] = {}
        outgoing: dict[Message, dict[str, Tensor]] = {}
        leaving: list[_PendingSend] = []

        def context_of(stage: int, number: int) -> CallContext:
            return contexts.setdefault((stage, number), CallContext(turn, number, {}, gradients))

        for instruction in program:
            if isinstance(instruction, Action):
                stage, number = instruction.stage, instruction.microbatch
                context = context_of(stage, number)
                for work, name, value in arriving.pop((stage, number), ()):
                    work.wait()
                    context.between[name] = value
                graph = stages.parts.get((stage, instruction.part))
                if graph is not None:
                    outputs = self._calls.call(graph, microbatches[number], context)
                    if Role.TOTALS in outputs:
                        (own,) = outputs[Role.TOTALS]
                        totals = own if totals is None else totals + own
                message = message_of(instruction, self._pipeline.stage_ranks)
                if message is not None:
                    crossing = stages.crossing.at(message.boundary, up=message.up)
                    results = {value.name: context.between[value.name] for value in crossing}
                    if message.target == self._index:
                        context_of(message.boundary + int(message.up), number).between.update(
                            results
                        )
                    else:
                        outgoing[message] = results
                if instruction.part in (Part.BACKWARD, Part.WEIGHT):
                    del contexts[stage, number]
                else:
                    stages.forget(instruction.stage, instruction.part, context.between)
            elif instruction.source == self._index:
                leaving.append(self._send(instruction, outgoing.pop(instruction)))
                leaving = [
                    sent for sent in leaving if not all(work.is_completed() for work in sent.work)
                ]
            else:
                target = instruction.boundary + int(instruction.up)
                received = self._receive(instruction, stages, microbatches[instruction.microbatch])
                arriving.setdefault((target, instruction.microbatch), []).extend(received)
        for sent in leaving:
            for work in sent.work:
                work.wait()
        return totals, gradients

    def _send(self, message: Message, results: Mapping[str, Tensor]) -> _PendingSend:
        values = [value.contiguous() for value in results.values()]
        group = group_named(PIPELINE)
        works = [dist.isend(value, group=group, group_dst=message.target) for value in values]
        return _PendingSend([work for work in works if work is not None], values)

    def _receive(
        self, message: Message, stages: BuiltStages, microbatch: Microbatch
    ) -> list[tuple[dist.Work, str, Tensor]]:
        symbols = {
            symbol: microbatch.batch[name].shape[at]
            for symbol, (name, at) in stages.crossing.symbols.items()
        }
        group = group_named(PIPELINE)
        receives: list[tuple[dist.Work, str, Tensor]] = []
        for value in stages.crossing.at(message.boundary, up=message.up):
            buffer = self._buffer(value, symbols)
            work = dist.irecv(buffer, group=group, group_src=message.source)
            assert work is not None, "this rank is in the group"
            receives.append((work, value.name, buffer))
        return receives

    def _buffer(self, value: Value, symbols: dict[str, int]) -> Tensor:
        return torch.empty(shape_of(value, symbols), dtype=dtype_of(value), device=self._device)


def _forward_only(stage_ranks: Sequence[int]) -> list[list[Instruction]]:
    """Return the instructions of each rank for the forward of one microbatch."""
    by_rank: list[list[Instruction]] = [[] for _ in set(stage_ranks)]
    for stage, rank in enumerate(stage_ranks):
        by_rank[rank].append(Action(stage, Part.FORWARD, 0))
        if stage + 1 < len(stage_ranks) and stage_ranks[stage + 1] != rank:
            message = Message(stage, True, 0, rank, stage_ranks[stage + 1])
            by_rank[rank].append(message)
            by_rank[message.target].append(message)
    return by_rank
