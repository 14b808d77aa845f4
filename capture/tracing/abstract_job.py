"""Captures a job whose model has no values, and holds it to a smaller job of the same code that was proven."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from trainload.capture.job.definition import Batch, Job
from trainload.capture.job.hollow import hollow
from trainload.capture.job.inputs import leaves_of, rebuild
from trainload.capture.job.tensor_classes import has_values
from trainload.capture.program import GraphCapture, Program
from trainload.capture.tracing.structure import difference, parameter_count, pattern, structure_of, trainable_patterns
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, JobError


@dataclass(frozen=True, slots=True)
class AbstractProof:
    """What is known of an abstract program.

    Attributes:
        reduced_parameters: elements of the reduced job's parameters, which was compared with eager.
        structure: the sha256 that both programs have; see `structure.py`.
    """

    reduced_parameters: int
    structure: str


def capture_abstract(job: Job, reduced: Program) -> tuple[Program, AbstractProof]:
    """Captures a job without its values, and demands the structure of a program that was proven.

    Args:
        job: its model's parameters and buffers may be on the meta device or fake; so may the batch's tensors.
        reduced: captured, from the same code with smaller sizes.

    Returns:
        The program, with no `state`, and what is known of it. A parameter is trained where its like in `reduced` is.

    Raises:
        CaptureError: it cannot be captured, or differs from `reduced` in more than sizes and repetition.
    """
    if any(graph.feeds for graph in job.graphs.values()):
        raise JobError(
            "an abstract job's graphs cannot feed one another: what feeds them would have to be computed",
            where="Job.graphs",
            hint="Freeze it with weights.",
        )
    with hollow(job.model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".* parameters get no gradient from the loss")  # said of the reduced job
        program = capture(with_real_batch(job), None)
    trained = trainable_patterns(reduced)
    parameters = tuple(replace(p, trainable=p.trainable and trained.get(pattern(p.name), p.trainable)) for p in program.parameters)
    graphs = {name: _as_in(reduced.graphs.get(name), graph, program) for name, graph in program.graphs.items()}
    program = replace(program, graphs=graphs, parameters=parameters, state={})
    found = difference(program, reduced)
    if found is not None:
        raise CaptureError(
            "the abstract program differs from the reduced one in more than sizes and repetition, so nothing is proven of it",
            where=found.where,
            expected=f"as in the reduced job: {found.reduced}",
            got=found.abstract,
            hint="Make the reduced job of the same code and settings, so that it takes every branch that the abstract one takes: "
            "smaller sizes, fewer layers of each kind, the same ratios (heads to key-value heads) where code depends on them.",
        )
    return program, AbstractProof(parameter_count(reduced), structure_of(program))


def _as_in(reduced: GraphCapture | None, graph: GraphCapture, program: Program) -> GraphCapture:
    """The graph with what was found of its like in the reduced job by running it."""
    return replace(graph, reached=_reached(reduced, program), coupled=reduced is not None and reduced.coupled)


def _reached(reduced: GraphCapture | None, program: Program) -> tuple[str, ...] | None:
    """The parameters that a graph gives a gradient: those whose like gets one in the reduced job."""
    if reduced is None or reduced.reached is None:
        return None
    patterns = {pattern(name) for name in reduced.reached}
    return tuple(sorted(p.name for p in program.parameters if p.alias_of is None and p.trainable and pattern(p.name) in patterns))


def with_real_batch(job: Job) -> Job:
    """The job, zeros in place of the examples' tensors that have no values."""
    return replace(job, batch=_real(job.batch), variants={name: _real(batch) for name, batch in job.variants.items()})


def _real(batch: Batch) -> Batch:
    leaves = leaves_of(batch, values=False)
    if all(has_values(leaf) for leaf in leaves.values()):
        return batch
    made = {name: leaf if has_values(leaf) else torch.zeros(leaf.shape, dtype=leaf.dtype) for name, leaf in leaves.items()}
    return rebuild(batch, made)
