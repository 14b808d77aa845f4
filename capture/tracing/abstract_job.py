"""Captures a job whose model has no values.

It is compared with a smaller job of the same code that has been proven.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from trainload.capture.job.definition import Batch, Job
from trainload.capture.job.hollow import hollow
from trainload.capture.job.inputs import leaves_of, rebuild
from trainload.capture.job.tensor_classes import has_values
from trainload.capture.program import GraphCapture, Program
from trainload.capture.tracing.structure import (
    difference,
    parameter_count,
    pattern,
    structure_of,
    trainable_patterns,
)
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, JobError


@dataclass(frozen=True, slots=True)
class AbstractProof:
    """Evidence for an abstract program.

    Attributes:
        reduced_parameters: number of parameter elements of the reduced job, which was compared with
            eager mode.
        structure: sha256 of the structure of both programs; see `structure.py`.
    """

    reduced_parameters: int
    structure: str


def capture_abstract(job: Job, reduced: Program) -> tuple[Program, AbstractProof]:
    """Capture a job without its values, and check that it has the structure of a proven program.

    Args:
        job: its model's parameters and buffers may be on the meta device or fake; so may the
            batch's tensors.
        reduced: program captured from the same code with smaller sizes.

    Returns:
        The program, with no `state`, and the evidence for it. A parameter is trained if its
        counterpart in `reduced` is.

    Raises:
        JobError: if one graph of the job feeds another.
        CaptureError: if it cannot be captured, or differs from `reduced` in more than sizes and
            repetition.
    """
    if any(graph.feeds for graph in job.graphs.values()):
        raise JobError(
            "the graphs of an abstract job cannot feed one another, because the inputs would have"
            " to be computed",
            where="Job.graphs",
            hint="Freeze the job with weights.",
        )
    with hollow(job.model), warnings.catch_warnings():
        # the reduced job warned already
        warnings.filterwarnings("ignore", message=r".* parameters get no gradient from the loss")
        program = capture(with_real_batch(job), None)
    trained = trainable_patterns(reduced)
    parameters = tuple(
        replace(p, trainable=p.trainable and trained.get(pattern(p.name), p.trainable))
        for p in program.parameters
    )
    graphs = {
        name: _with_measured_properties(reduced.graphs.get(name), graph, program)
        for name, graph in program.graphs.items()
    }
    program = replace(program, graphs=graphs, parameters=parameters, state={})
    mismatch = difference(program, reduced)
    if mismatch is not None:
        raise CaptureError(
            "the abstract program differs from the reduced one in more than sizes and repetition,"
            " so nothing is proven about it",
            where=mismatch.where,
            expected=f"as in the reduced job: {mismatch.reduced}",
            got=mismatch.abstract,
            hint=(
                "Build the reduced job from the same code and settings, so that it takes every"
                " branch that the abstract one takes: smaller sizes, fewer layers of each kind, the"
                " same ratios (heads to key-value heads) where code depends on them."
            ),
        )
    return program, AbstractProof(parameter_count(reduced), structure_of(program))


def _with_measured_properties(
    reduced: GraphCapture | None, graph: GraphCapture, program: Program
) -> GraphCapture:
    """Return the graph with the properties measured on its counterpart in the reduced job."""
    return replace(
        graph,
        reached=_reached_parameters(reduced, program),
        coupled=reduced is not None and reduced.coupled,
    )


def _reached_parameters(reduced: GraphCapture | None, program: Program) -> tuple[str, ...] | None:
    """Return the parameters whose counterpart receives a gradient in the reduced job."""
    if reduced is None or reduced.reached is None:
        return None
    patterns = {pattern(name) for name in reduced.reached}
    return tuple(
        sorted(
            p.name
            for p in program.parameters
            if p.alias_of is None and p.trainable and pattern(p.name) in patterns
        )
    )


def with_real_batch(job: Job) -> Job:
    """Return the job with zeros in place of the example tensors that have no values."""
    return replace(
        job,
        batch=_with_zeros(job.batch),
        variants={name: _with_zeros(batch) for name, batch in job.variants.items()},
    )


def _with_zeros(batch: Batch) -> Batch:
    leaves = leaves_of(batch, values=False)
    if all(has_values(leaf) for leaf in leaves.values()):
        return batch
    real_leaves = {
        name: leaf if has_values(leaf) else torch.zeros(leaf.shape, dtype=leaf.dtype)
        for name, leaf in leaves.items()
    }
    return rebuild(batch, real_leaves)
