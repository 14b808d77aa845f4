"""Freezing of a job without weights: a model too large for any machine here is checked against a
smaller job of the same code.
"""

from __future__ import annotations

from pathlib import Path

import torch

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.torch_guards import with_guards
from trainload.autograd_trace.graphs import Recipe, UpdateGraph
from trainload.autograd_trace.optimizer.capture_optimizer import capture_optimizer
from trainload.autograd_trace.optimizer.optimizer_groups import with_trained
from trainload.autograd_trace.optimizer.trainers import make_optimizers
from trainload.capture.job.inputs import leaves_of
from trainload.capture.job.leading_rows import arranged
from trainload.capture.job.synthesise import with_quantiles
from trainload.capture.parity.replays import Check
from trainload.capture.tracing.abstract_job import capture_abstract, with_real_batch
from trainload.capture.tracing.targets import example_of, targets_of
from trainload.core.errors import CaptureError, JobError
from trainload.freezing.initial_values import proven_values, values_like
from trainload.freezing.named_source import names_in_sources, weight_source
from trainload.freezing.prove import keep_steps, prove
from trainload.freezing.recorded_job import RecordedJob
from trainload.packaging.format.manifest_records import AbstractEntry
from trainload.packaging.graphs.graph_digest import graphs_digest
from trainload.packaging.libraries.op_libraries import Libraries
from trainload.packaging.package import Package
from trainload.packaging.write import Bundle, write_package

_CPU = torch.device("cpu")


def freeze_abstract(
    recorded: RecordedJob,
    path: Path,
    reduced: RecordedJob | None,
    check: Check,
    libraries: Libraries,
    *,
    bundle: Bundle | None = None,
    weights_from: str | None = None,
) -> Package:
    """Write a package of a job whose model has no values.

    The reduced job is captured and compared with eager mode like any other job, joint graph
    included. Then the abstract job is captured; it must have the same structure up to sizes and
    repeated layers. docs/guides/abstract.md says what this proves and what it does not.

    Args:
        recorded: the job. Parameters and buffers of its model, and tensors of its batch, may be
            fake or on the meta device.
        path: the package to write, a folder that does not exist.
        reduced: a job of the same code with smaller sizes, with values.
        check: check that compares the reduced job with eager mode.
        libraries: as for `freeze`.
        bundle: writes wheels of these libraries into the package.
        weights_from: the source of weights of launches that name none.

    Raises:
        JobError: there is no reduced job; otherwise as `freeze`.
        CaptureError: a job cannot be captured, or the two differ in more than sizes and repetition;
            the message says where.
    """
    if reduced is None:
        raise no_reduced_job()
    job = recorded.job
    names = names_in_sources(job)
    # the job itself cannot be run, so it is captured in this mode too
    small = prove(reduced.job, check, strict=False)
    optimizers = make_optimizers(job)
    program, proof = capture_abstract(job, small.program)
    real = arranged(with_real_batch(job))
    targets = targets_of(real)
    examples = {target.name: example_of(real, target)[0] for target in targets}
    program = with_guards(program, targets, examples)
    batches = [leaves_of(batch, values=False) for batch in (job.batch, *job.variants.values())]
    if all(leaf.device.type != "meta" for leaves in batches for leaf in leaves.values()):
        program = with_quantiles(program, examples)
    recipe, updates = capture_optimizer(real, program, optimizers)
    program = with_trained(program, recipe.groups)
    _check_updates(recipe, updates, small.recipe, small.updates)
    steps = {
        name: derive(program, name, _CPU)
        for name, graph in program.graphs.items()
        if graph.training
    }
    entry = AbstractEntry(
        reduced_parameters=proof.reduced_parameters,
        reduced_program=graphs_digest(small.program),
        structure=proof.structure,
        check=check.value,
    )
    package = write_package(
        path,
        program,
        updates,
        recipe,
        assets=job.assets,
        libraries=libraries,
        bundle=bundle,
        abstract=entry,
        initialization=values_like(recorded, proven_values(reduced)),
        weight_source=weight_source(names, program, weights_from),
    )
    keep_steps(package, steps)
    return package


def no_reduced_job() -> JobError:
    """Return the error of an abstract freeze without a reduced job."""
    return JobError(
        "an abstract package needs a reduced job to be proven against",
        where="reduced",
        expected=(
            "a job of the same code with smaller sizes, which can be compared with eager mode"
        ),
        hint=(
            "Pass one: freeze(job, path, abstract=True, reduced=small_job), or --reduced"
            " MODULE:FUNCTION."
        ),
    )


def _check_updates(
    recipe: Recipe,
    updates: tuple[UpdateGraph, ...],
    small: Recipe,
    small_updates: tuple[UpdateGraph, ...],
) -> None:
    """Check that both jobs have the same optimizer with updates of the same operators."""
    if (recipe.optimizer, _operators(updates)) != (small.optimizer, _operators(small_updates)):
        raise CaptureError(
            "the abstract job's optimizer differs from that of the reduced job, so nothing is"
            " proven about it",
            where="Job.optimizer",
            expected=(
                f"as in the reduced job: {small.optimizer}, {len(_operators(small_updates))} kinds"
                " of updates"
            ),
            got=f"{recipe.optimizer}, {len(_operators(updates))} kinds of updates",
            hint="Build both jobs with the same function.",
        )


def _operators(updates: tuple[UpdateGraph, ...]) -> set[tuple[str, ...]]:
    """Return the operators that each update calls, in order."""
    return {
        tuple(
            str(node.target)
            for exported in (update.first, update.following)
            for node in exported.graph.nodes
            if node.op == "call_function"
        )
        for update in updates
    }
