"""Captures a job whose model has no values, and holds it to a smaller job of the same code that was proven."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from trainload.capture.errors import CaptureError
from trainload.capture.hollow import hollow
from trainload.capture.inputs import leaves_of, rebuild
from trainload.capture.job import Job
from trainload.capture.program import Program
from trainload.capture.structure import difference, parameter_count, pattern, structure_of, trainable_patterns
from trainload.capture.tensor_classes import has_values
from trainload.capture.trace import capture


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
    with hollow(job.model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".* parameters get no gradient from the loss")  # said of the reduced job
        program = capture(with_real_batch(job), None)
    trained = trainable_patterns(reduced)
    parameters = tuple(replace(p, trainable=p.trainable and trained.get(pattern(p.name), p.trainable)) for p in program.parameters)
    program = replace(program, parameters=parameters, state={})
    found = difference(program, reduced)
    if found is not None:
        raise CaptureError(
            "the abstract program differs from the reduced one in more than sizes and repetition, so nothing is proven of it",
            where=found.where,
            expected=f"as in the reduced job: {found.reduced}",
            got=found.abstract,
            cure="Make the reduced job of the same code and settings, so that it takes every branch that the abstract one takes: "
            "smaller sizes, fewer layers of each kind, the same ratios (heads to key-value heads) where code depends on them.",
        )
    return program, AbstractProof(parameter_count(reduced), structure_of(program))


def with_real_batch(job: Job) -> Job:
    """The job, zeros in place of the example's tensors that have no values."""
    leaves = leaves_of(job.batch, values=False)
    if all(has_values(leaf) for leaf in leaves.values()):
        return job
    made = {name: leaf if has_values(leaf) else torch.zeros(leaf.shape, dtype=leaf.dtype) for name, leaf in leaves.items()}
    return replace(job, batch=rebuild(job.batch, made))
