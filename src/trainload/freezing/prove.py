"""Capture a job and prove its graphs before anything is written; store derived graphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.coupling import are_rows_coupled
from trainload.autograd_trace.derivation.replay_check import check_replays
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.autograd_trace.derivation.step_module import is_plain
from trainload.autograd_trace.derivation.torch_guards import with_guards
from trainload.autograd_trace.graphs import Recipe, StepGraph, UpdateGraph
from trainload.autograd_trace.optimizer.capture_optimizer import capture_optimizer
from trainload.autograd_trace.optimizer.optimizer_groups import with_trained
from trainload.autograd_trace.optimizer.trainers import make_optimizers
from trainload.capture.job.definition import Job
from trainload.capture.job.leading_rows import arranged
from trainload.capture.job.synthesise import with_quantiles
from trainload.capture.parity.replays import Check, replay_batches
from trainload.capture.program import Program, Tracing
from trainload.capture.tracing.strict import tried_too
from trainload.capture.tracing.targets import example_of, targets_of
from trainload.capture.tracing.trace import capture
from trainload.core.errors import StorageError
from trainload.core.work_steps import begin_step
from trainload.packaging.derived import write_derived
from trainload.packaging.package import Package
from trainload.sharding.plans.device_step_graphs import derived_key

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Proven:
    """The proven parts of a package.

    `steps` has a step graph for the CPU for each graph that is not `is_plain`.
    """

    program: Program
    recipe: Recipe
    updates: tuple[UpdateGraph, ...]
    steps: Mapping[str, StepGraph]

    def training_steps(self) -> dict[str, StepGraph]:
        """Return the step graphs of training graphs, which are stored in the package."""
        return {
            name: step for name, step in self.steps.items() if self.program.graphs[name].training
        }


def keep_steps(package: Package, steps: Mapping[str, StepGraph]) -> None:
    """Store step graphs for the CPU, by graph, in a package that was just written.

    They only save time. If they cannot be stored (for example because the user's state folder is
    not writable), the package is complete without them, and a warning is issued.
    """
    begin_step("storing the joint graphs")
    try:
        for name, step in steps.items():
            write_derived(package, derived_key(name, _CPU), step)
    except StorageError as error:
        warnings.warn(
            f"{package.path}: the joint graphs could not be stored, so every plan derives them"
            f" again. {error}",
            stacklevel=3,
        )


def prove(job: Job, check: Check, strict: bool | None = None) -> Proven:
    """Capture a job's graphs and updates, derive its step graphs, and compare graphs with eager
    mode and joint graphs with autograd.

    Args:
        job: the job.
        check: extent of the comparison.
        strict: torch.export's mode, as for `capture`.

    Raises:
        JobError: the job's description is inconsistent.
        CaptureError: the job cannot be captured soundly.
    """
    job = arranged(job)
    optimizers = make_optimizers(job)  # before the capture, since a factory may change the model
    program = capture(job, check, strict)
    targets = targets_of(job)
    examples = {
        t.name: {name: leaf.cpu() for name, leaf in example_of(job, t)[0].items()} for t in targets
    }
    begin_step("finding the guards of the graphs")
    program = with_guards(with_quantiles(program, examples), targets, examples)
    check_replays(job, program)
    recipe, updates = capture_optimizer(job, program, optimizers)
    program = with_trained(program, recipe.groups)
    derived = [name for name, graph in program.graphs.items() if not is_plain(graph)]
    steps: dict[str, StepGraph] = {}
    for name in derived:
        with _raise_first_refusal(program.graphs[name].tracing):
            steps[name] = derive(program, name, _CPU)
    proven = Proven(program, recipe, updates, steps)
    for name, step in proven.training_steps().items():
        example = examples[name]
        for batch in (
            replay_batches(program.graphs[name], example, check)
            if check is Check.THOROUGH
            else [example]
        ):
            begin_step(f"comparing the joint graph of {name} with autograd")
            with _raise_first_refusal(program.graphs[name].tracing):
                check_step(program, name, step, batch)
    return replace(proven, program=_with_coupled(proven, examples))


def _with_coupled(proven: Proven, examples: Mapping[str, Mapping[str, Tensor]]) -> Program:
    """Return the program with `coupled` measured for each training graph."""
    begin_step("comparing halves of the batch with all of it")
    program = proven.program
    coupled = {
        n: are_rows_coupled(program, program.graphs[n], step, examples[n])
        for n, step in proven.training_steps().items()
    }
    return replace(
        program,
        graphs={
            n: replace(graph, coupled=coupled.get(n, False)) for n, graph in program.graphs.items()
        },
    )


@contextmanager
def _raise_first_refusal(tracing: Tracing | None) -> Iterator[None]:
    """Replace errors of a graph that was captured in strict mode as a fallback by the report of the
    non-strict mode.
    """
    try:
        yield
    except Exception as error:
        if tracing is None or tracing.refused is None:
            raise
        tried_too(tracing.refused, error)
        raise tracing.refused from tracing.refused.__cause__
