"""What step graphs are given in tests of their rewritings."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from tests.coverage.cases import case_named
from tests.laws.gpt import gpt_job
from tests.shares import cut
from torch import Tensor

from trainload.autograd_trace.aot import derive
from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.job import Job
from trainload.capture.program import Program
from trainload.capture.trace import capture
from trainload.sharding.plan import Shard
from trainload.sharding.source import Source

SCALARS = {Role.SEED: 5, Role.STEP: 3, Role.ROW: 0}


def job_of(case: str) -> Job:
    return gpt_job() if case == "gpt" else case_named(case).job()


def value(port: Port, job: Job, state: dict[str, Tensor], constants: Any, rank: int = 0) -> Tensor:
    """What a step graph is given, whole."""
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
    """A job's program, and its step graph on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the models
        program = capture(job)
    return program, derive(program, "train", torch.device("cpu"))


FROZEN: dict[str, Source] = {}
"""Jobs whose packages are there: reading one takes a tenth of the time of capturing the job."""


@functools.cache
def captured(case: str) -> tuple[Job, Program, StepGraph]:
    """A job with its program and its step graph, which the test files of one process share. Nobody changes them."""
    job = job_of(case)
    if case in FROZEN:
        return job, FROZEN[case].package.program(), FROZEN[case].steps(["train"])["train"]
    return job, *captured_step(job)


def distances(
    job: Job, program: Program, steps: tuple[StepGraph, StepGraph], shards: Mapping[str, Shard], rank: int, world: int
) -> dict[str, float]:
    """How far each output of a partitioned step graph, `steps[1]`, is from what one rank has of the whole graph's: relative to its greatest
    element.
    """
    whole_step, part = steps
    state = dict(program.state)

    def share(port: Port, whole: Tensor) -> Tensor:
        return cut(whole, shards[port.name], rank, world) if port.name in shards else whole

    wanted = whole_step.module(*[value(port, job, state, program.constants, rank) for port in whole_step.inputs])
    given = [(port, value(port, job, state, program.constants, rank)) for port in part.inputs]
    found = part.module(*[share(port, each) if port.role is Role.PARAMETER else each for port, each in given])
    far: dict[str, float] = {}
    for port, own, whole in zip(whole_step.outputs, found, wanted, strict=True):
        expected = share(port, whole) if port.role is Role.GRADIENT else whole
        assert own.shape == expected.shape, port
        greatest = max(1e-3, expected.double().abs().max().item()) if expected.numel() else 1.0
        far[f"{port.role}/{port.name}"] = (own.double() - expected.double()).abs().max().item() / greatest if own.numel() else 0.0
    return far
