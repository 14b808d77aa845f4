"""Jobs and inputs of step graphs for tests of their rewriting."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tests.coverage.cases import case_named
from tests.laws.gpt import gpt_job
from tests.shares import cut
from torch import Tensor, nn
from torch.nn import functional

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import Shard

SCALARS = {Role.SEED: 5, Role.STEP: 3, Role.ROW: 0}


class Masked(nn.Module):
    """Attention with a mask from the data, and a loss that ignores some positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(12, 16), nn.Linear(16, 48), nn.Linear(16, 12)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.mix(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen[:, None, None, :] > 0
        )
        logits = self.out(x + mixed.transpose(1, 2).flatten(2))
        return functional.cross_entropy(
            logits.flatten(0, 1), tokens.flatten(), ignore_index=3, weight=torch.arange(1.0, 13.0)
        )


def masked() -> Job:
    torch.manual_seed(0)
    batch = {
        "tokens": torch.randint(0, 12, (3, 8)),
        "seen": (torch.arange(8) < torch.tensor([[8], [5], [3]])).float(),
    }
    return Job(Masked(), batch, adamw, loss=lambda m, b: m(b["tokens"], b["seen"]))


class Moving(nn.Module):
    """Operators that cut, join and move dims, between two layers that ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).relu()
        x = functional.pad(x, (0, 0, 1, 0))[:, :-1]  # positions move by one
        first, second = torch.split(x, [3, 5], 1)
        x = torch.cat([second.cumsum(1), first.flip(1)], 1)
        x = torch.stack([each.roll(1, 1) for each in x.chunk(2, 1)], 1).flatten(1, 2) + x.unbind(1)[
            -1
        ].unsqueeze(1)
        x = x - x.detach().amax(-1, keepdim=True) + x.softmax(-1) + x.select(1, 2).unsqueeze(1)
        result: Tensor = self.down(torch.cat([x, x * 2, x], 1))
        return result


class NormFirst(nn.Module):
    """A model that starts with a norm of the data, whose gradient nothing needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.out(self.norm(x))
        return result


def regression(model: Callable[[], nn.Module], positions: int) -> Job:
    """Return a job of a model that returns `positions` positions for eight."""
    torch.manual_seed(0)
    made = model()
    batch = {"x": torch.randn(3, 8, 16), "y": torch.randn(3, positions, 16)}
    return Job(made, batch, adamw, loss=lambda m, b: functional.mse_loss(m(b["x"]), b["y"]))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


OWN: dict[str, Callable[[], Job]] = {
    "gpt": gpt_job,
    "masked": masked,
    "moving": lambda: regression(Moving, 24),
    "norm first": lambda: regression(NormFirst, 8),
}
"""Jobs that are not in the coverage suite."""


def job_of(case: str) -> Job:
    return OWN[case]() if case in OWN else case_named(case).job()


def value(port: Port, job: Job, state: dict[str, Tensor], constants: Any, rank: int = 0) -> Tensor:
    """Return the full value of an input of a step graph."""
    match port.role:
        case Role.PARAMETER | Role.BUFFER:
            return state[port.name].clone()
        case Role.CONSTANT:
            found: Tensor = constants[port.name]
            return found
        case Role.BATCH:
            given: Tensor = job.batch[port.name]
            return given.contiguous()
        case Role.SCALE:
            return torch.tensor(0.25)
        case Role.TENSOR_RANK:
            return torch.tensor(rank)
        case _:
            return torch.tensor(SCALARS[port.role])


def captured_step(job: Job) -> tuple[Program, StepGraph]:
    """Return a job's program, and its step graph on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the models
        program = capture(job)
    return program, derive(program, "train", torch.device("cpu"))


FROZEN: dict[str, Source] = {}
"""Jobs with a package: reading one takes a tenth of the time of capturing the job."""


@functools.cache
def captured(case: str) -> tuple[Job, Program, StepGraph]:
    """Return a job with its program and its step graph, shared by the test files of a process.

    No test changes them.
    """
    job = job_of(case)
    if case in FROZEN:
        return job, FROZEN[case].package.program(), FROZEN[case].steps(["train"])["train"]
    return job, *captured_step(job)


def distances(
    job: Job,
    program: Program,
    steps: tuple[StepGraph, StepGraph],
    shards: Mapping[str, Shard],
    rank: int,
    world: int,
) -> dict[str, float]:
    """Return how far each output of a partitioned step graph is from that of the whole graph.

    `steps` are the whole graph and the partitioned one. Each distance is relative to the largest
    element of a rank's part of the whole output.
    """
    whole_step, part = steps
    state = dict(program.state)

    def share(port: Port, whole: Tensor) -> Tensor:
        return cut(whole, shards[port.name], rank, world) if port.name in shards else whole

    wanted = whole_step.module(
        *[value(port, job, state, program.constants, rank) for port in whole_step.inputs]
    )
    given = [(port, value(port, job, state, program.constants, rank)) for port in part.inputs]
    found = part.module(
        *[share(port, each) if port.role is Role.PARAMETER else each for port, each in given]
    )
    far: dict[str, float] = {}
    for port, own, whole in zip(whole_step.outputs, found, wanted, strict=True):
        expected = share(port, whole) if port.role is Role.GRADIENT else whole
        assert own.shape == expected.shape, port
        greatest = max(1e-3, expected.double().abs().max().item()) if expected.numel() else 1.0
        far[f"{port.role}/{port.name}"] = (
            (own.double() - expected.double()).abs().max().item() / greatest if own.numel() else 0.0
        )
    return far
