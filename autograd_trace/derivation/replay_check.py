"""Compare a job's graphs with eager mode on the batches in `Job.replays`."""

from __future__ import annotations

import itertools
from dataclasses import replace

from trainload.autograd_trace.derivation.torch_guards import dispatcher_of
from trainload.capture.job.definition import Job
from trainload.capture.job.inputs import leaves_of
from trainload.capture.job.model_state import modes_kept, state_kept
from trainload.capture.parity.parity import check_parity
from trainload.capture.program import Mode, Program, graph_name
from trainload.capture.tracing.targets import targets_of
from trainload.capture.watching.higher_order import differentiates
from trainload.core.errors import DataError, JobError
from trainload.core.work_steps import begin_step


def check_replays(job: Job, program: Program) -> None:
    """Replay each of `Job.replays` through eager mode and through every graph of the variant that
    accepts it.

    Args:
        job: the job.
        program: its captured graphs, with guards.

    Raises:
        JobError: no variant accepts one of the batches.
        CaptureError: a graph differs from eager mode.
    """
    eager_gradients = any(
        differentiates(graph.exported.graph_module) for graph in program.graphs.values()
    )
    model = job.model
    first_variant = next(
        name for n in itertools.count() if (name := f"first_{n}") not in job.variants
    )
    for number, batch in enumerate(job.replays):
        begin_step(f"comparing replay {number + 1} of {len(job.replays)} with eager PyTorch")
        twin = replace(
            job, batch=batch, variants={**job.variants, first_variant: job.batch}, replays=()
        )  # the other variants determine which inputs may be absent
        with modes_kept(model) as set_training:
            for target in [target for target in targets_of(twin) if not target.variant]:
                first = graph_name(target.graph, target.mode)
                try:
                    variant = dispatcher_of(program.graphs, program.variants, first).pick(
                        target.batch
                    )
                except DataError as error:
                    raise JobError(
                        error.problem,
                        where=f"Job.replays[{number}], graph {first}",
                        hint="Add it to Job.variants.",
                    ) from error
                captured = program.graphs[graph_name(target.graph, target.mode, variant)]
                leaves = {
                    name: leaf.detach().contiguous()
                    for name, leaf in leaves_of(target.batch).items()
                }
                target.function.differentiates = eager_gradients
                set_training(target.mode is Mode.TRAIN)
                with state_kept(model):
                    check_parity(captured, target.function, [leaves], program.constants)
