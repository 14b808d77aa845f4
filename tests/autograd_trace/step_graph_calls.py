"""Capture of a job's program, and calls of its step graphs."""

from __future__ import annotations

import warnings

import torch
from tests.capture.jobs import Batch
from torch import Tensor

from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture

CPU = torch.device("cpu")


def program_of(given: Job) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(given)


def run(
    graph: StepGraph,
    program: Program,
    batch: Batch,
    *,
    row: int = 0,
    scale: float = 1.0,
    name: str = "train",
) -> dict[str, Tensor]:
    scalars = {
        Role.SEED: torch.tensor(3),
        Role.STEP: torch.tensor(0),
        Role.ROW: torch.tensor(row),
        Role.SCALE: torch.tensor(scale),
    }
    arguments = [
        (
            scalars[p.role]
            if p.role in scalars
            else (
                batch[p.name]
                if p.role is Role.BATCH
                else (
                    program.constants[p.name if p.name in program.constants else f"{name}/{p.name}"]
                    if p.role is Role.CONSTANT
                    else program.state[p.name]
                )
            )
        )
        for p in graph.inputs
    ]
    with torch.no_grad():
        results = graph.module(*arguments)
    return {f"{p.role.value}/{p.name}": r for p, r in zip(graph.outputs, results, strict=True)}
