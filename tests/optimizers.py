"""Capture of a job's optimizer in one call."""

from __future__ import annotations

from trainload.autograd_trace.graphs import Recipe, UpdateGraph
from trainload.autograd_trace.optimizer.capture_optimizer import capture_optimizer
from trainload.autograd_trace.optimizer.trainers import make_optimizers
from trainload.capture.job.definition import Job
from trainload.capture.program import Program


def optimizer_of(job: Job, program: Program) -> tuple[Recipe, tuple[UpdateGraph, ...]]:
    """Return the recipe and the update graphs of a job whose program was captured."""
    return capture_optimizer(job, program, make_optimizers(job))
