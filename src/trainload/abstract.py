"""Freezing a job without weights: shapes of a model that fits on no machine here, held to a smaller job of the same code."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from trainload.autograd_trace.aot import derive
from trainload.autograd_trace.check import check_step
from trainload.autograd_trace.graphs import Recipe, UpdateGraph
from trainload.autograd_trace.update import capture_optimizer
from trainload.capture.abstract import capture_abstract
from trainload.capture.errors import CaptureError, JobError, StorageError
from trainload.capture.inputs import leaves_of
from trainload.capture.job import Job
from trainload.capture.replays import Check, replay_batches
from trainload.capture.synthesise import with_quantiles
from trainload.capture.trace import capture
from trainload.launch.build import derived_key
from trainload.packaging.derived import write_derived
from trainload.packaging.graph_digest import graphs_digest
from trainload.packaging.manifest import AbstractEntry
from trainload.packaging.read import Package
from trainload.packaging.write import write_package

_CPU = torch.device("cpu")


def freeze_abstract(job: Job, path: Path, reduced: Job | None, check: Check) -> Package:
    """Writes a package of a job whose model has no values.

    The reduced job is captured and compared with eager as every job is, its joint graph too. Then the abstract one is captured, and must
    have the same structure up to sizes and repeated layers. What that proves, and what it does not, is in docs/abstract.md.

    Args:
        job: its model's parameters and buffers may be on the meta device or fake; so may the batch's tensors.
        path: the package to write, a folder that does not exist.
        reduced: a job of the same code with smaller sizes, with values.
        check: how the reduced job is compared with eager.

    Raises:
        JobError: there is no reduced job; otherwise as `freeze`.
        CaptureError: a job cannot be captured, or the two differ in more than sizes and repetition; the message says where.
    """
    if reduced is None:
        raise JobError(
            "nothing could be proven of an abstract package",
            where="reduced",
            expected="a job of the same code with smaller sizes, which can be compared with eager",
            cure="Give one: freeze(job, path, abstract=True, reduced=small_job), or --reduced MODULE:FUNCTION.",
        )
    small = capture(reduced, check)
    leaves = leaves_of(reduced.batch)
    small_recipe, small_updates = capture_optimizer(replace(reduced, batch=leaves), small)
    steps = {graph: derive(small, graph, _CPU) for graph in small.graphs}
    example = {name: leaf.detach().cpu().contiguous() for name, leaf in leaves.items()}
    for batch in replay_batches(small.graphs["train"], example, check) if check is Check.THOROUGH else [example]:
        check_step(small, steps["train"], batch)
    program, proof = capture_abstract(job, small)
    if all(leaf.device.type != "meta" for leaf in leaves_of(job.batch, values=False).values()):
        program = with_quantiles(program, leaves_of(job.batch))
    recipe, updates = capture_optimizer(replace(job, batch=leaves_of(job.batch, values=False)), program)
    _check_updates(recipe, updates, small_recipe, small_updates)
    step = derive(program, "train", _CPU)
    entry = AbstractEntry(
        reduced_parameters=proof.reduced_parameters, reduced_program=graphs_digest(small), structure=proof.structure, check=check.value
    )
    assets = {name: Path(source) for name, source in job.assets.items()}
    package = write_package(path, program, updates, recipe, assets=assets, abstract=entry)
    try:
        write_derived(package, derived_key("train", _CPU), step)
    except StorageError:
        shutil.rmtree(path)
        raise
    return package


def _check_updates(recipe: Recipe, updates: tuple[UpdateGraph, ...], small: Recipe, small_updates: tuple[UpdateGraph, ...]) -> None:
    """Demands that both jobs have the same optimizer with updates of the same operators."""
    if (recipe.optimizer, _operators(updates)) != (small.optimizer, _operators(small_updates)):
        raise CaptureError(
            "the abstract job has another optimizer than the reduced one, so nothing is proven of it",
            where="Job.optimizer",
            expected=f"as in the reduced job: {small.optimizer}, {len(_operators(small_updates))} kinds of updates",
            got=f"{recipe.optimizer}, {len(_operators(updates))} kinds of updates",
            cure="Make both jobs of the same function.",
        )


def _operators(updates: tuple[UpdateGraph, ...]) -> set[tuple[str, ...]]:
    """For each update the operators that it calls, in order."""
    return {
        tuple(
            str(node.target) for exported in (update.first, update.following) for node in exported.graph.nodes if node.op == "call_function"
        )
        for update in updates
    }
