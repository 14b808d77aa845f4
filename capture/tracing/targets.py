"""The graphs to capture of a job: each graph in each mode, for each variant of the batch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainload.capture.job.declared_sizes import Shapes, declared_shapes
from trainload.capture.job.definition import Graph, Job
from trainload.capture.job.flat_function import StepFunction, TensorsFunction, Traced
from trainload.capture.job.inputs import leaves_of, rebuild
from trainload.capture.job.model_state import modes_kept, state_kept
from trainload.capture.parity.parity import replaying
from trainload.capture.program import MAIN, RESERVED, Mode, OutputRole, graph_name
from trainload.core.errors import JobError
from trainload.core.suggestions import did_you_mean

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class Target:
    """A graph to capture. `batch`: the example passed to its function, nested."""

    graph: str
    mode: Mode
    variant: str
    function: Traced
    batch: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the captured graph, as in `GraphCapture.name`."""
        return graph_name(self.graph, self.mode, self.variant)

    @property
    def training(self) -> bool:
        """True if it is traced in train mode, with gradients."""
        return self.mode is Mode.TRAIN


def graphs_of(job: Job) -> dict[str, Graph]:
    """Return the job's graphs by name, in order: `Job.graphs`, or a single graph with `Job.loss`.

    Raises:
        JobError: if they are inconsistent.
    """
    if not job.graphs:
        if job.optimizer is None:
            raise JobError(
                "the job has no optimizer",
                where="Job.optimizer",
                hint="Pass a function that takes the model and returns an optimizer.",
            )
        if job.loop is not None:
            raise JobError(
                "a loop requires graphs",
                where="Job.loop",
                hint='Specify them: Job(graphs={"name": Graph(loss=...)}).',
            )
        return {MAIN: Graph(loss=job.loss)}
    if job.loss is not None:
        raise JobError(
            "loss cannot be combined with graphs",
            where="Job.loss",
            hint="Pass it as the loss of one of the graphs.",
        )
    before: dict[str, Graph] = {}
    for name, graph in job.graphs.items():
        where = f"Job.graphs[{name!r}]"
        _check_name(name, where)
        if (graph.loss is None) == (graph.compute is None):
            raise JobError(
                "a graph needs either a loss or a compute function",
                where=where,
                expected="exactly one of loss and compute",
            )
        trained = [
            option
            for option in ("optimizer", "schedule", "clip_norm", "clip_value", "ema")
            if getattr(graph, option) is not None
        ]
        if graph.compute is not None and trained:
            raise JobError(
                "a graph without a loss cannot be trained",
                where=f"{where}.{trained[0]}",
                hint="Omit it.",
            )
        if graph.loss is not None and graph.optimizer is None and job.optimizer is None:
            raise JobError(
                "no optimizer is specified for this loss",
                where=f"{where}.optimizer",
                hint="Set the optimizer of the graph, or Job.optimizer.",
            )
        if graph.schedule is not None and graph.optimizer is None:
            raise JobError(
                "the graph has a schedule, but shares its optimizer with other graphs",
                where=f"{where}.schedule",
                hint="Give the graph its own optimizer.",
            )
        for entry, source in graph.feeds.items():
            if not entry.isidentifier() or any(
                entry in batch for batch in (job.batch, *job.variants.values())
            ):
                raise JobError(
                    "a fed input needs a valid identifier that is not already in the batch",
                    where=f"{where}.feeds",
                    got=repr(entry),
                )
            if source.partition(".")[0] not in before or not source.partition(".")[2]:
                raise JobError(
                    "a graph can only be fed by an output of an earlier graph",
                    where=f"{where}.feeds[{entry!r}]",
                    expected=", ".join(f"{other}.OUTPUT" for other in before)
                    or "an output of an earlier graph in Job.graphs",
                    got=repr(source),
                )
        before[name] = graph
    if all(graph.loss is None for graph in before.values()):
        raise JobError(
            "no graph has a loss", where="Job.graphs", hint="Specify one: Graph(loss=...)."
        )
    return before


def targets_of(job: Job) -> tuple[Target, ...]:
    """Return the graphs to capture of a job, in order.

    A loss is captured twice, for training and for evaluation.

    To get examples for graphs that other graphs feed, the feeding functions are run once, in eval
    mode.

    Raises:
        JobError: if the job is inconsistent, or a function has state of its own.
    """
    graphs = graphs_of(job)
    for variant in job.variants:
        _check_name(variant, f"Job.variants[{variant!r}]")
    targets: list[Target] = []
    for variant, batch in {"": job.batch, **job.variants}.items():
        outputs: dict[str, Tensor] = {}
        needed = {source for graph in graphs.values() for source in graph.feeds.values()}
        for name, graph in graphs.items():
            where = f"Job.graphs[{name!r}]" if job.graphs else "Job"
            example = _select_entries(job, batch, graph.inputs, f"{where}.inputs") | {
                e: outputs[source] for e, source in graph.feeds.items()
            }
            function: Traced
            if graph.compute is not None:
                function = TensorsFunction(
                    job.model, example, graph.compute, OutputRole.OUTPUT, f"{where}.compute"
                )
                targets.append(Target(name, Mode.COMPUTE, variant, function, example))
            else:
                function = StepFunction(job.model, example, graph.loss, f"{where}.loss")
                targets += [
                    Target(name, mode, variant, function, example)
                    for mode in (Mode.TRAIN, Mode.EVAL)
                ]
            if any(source.startswith(f"{name}.") for source in needed):
                outputs |= {
                    f"{name}.{output}": value for output, value in _outputs(function, example)
                }
                lacking = sorted(
                    source
                    for source in needed
                    if source.startswith(f"{name}.") and source not in outputs
                )
                if lacking:
                    raise JobError(
                        "a graph is fed by an unknown output",
                        where="Job.graphs",
                        expected=str(sorted(outputs)),
                        got=lacking[0],
                        hint=did_you_mean(lacking[0], outputs),
                    )
        if job.predict is not None:
            example = _select_entries(job, batch, job.predict_inputs, "Job.predict_inputs")
            function = TensorsFunction(
                job.model, example, job.predict, OutputRole.PREDICTION, "Job.predict"
            )
            targets.append(Target(MAIN, Mode.PREDICT, variant, function, example))
    return tuple(targets)


def example_of(job: Job, target: Target) -> tuple[dict[str, Tensor], Shapes]:
    """Return the leaves of a target's example, and the declared sizes.

    These are the sizes of all inputs that the job has in this variant.

    Raises:
        JobError: if `Job.dynamic` does not fit the example.
    """
    batches = [job.batch, *job.variants.values()]
    variant = job.variants[target.variant] if target.variant else job.batch
    whole = leaves_of({**variant, **target.batch})
    ndims: dict[str, int] = {}
    for batch in batches:
        for name, leaf in leaves_of(batch).items():
            ndims[name] = max(leaf.ndim, ndims.get(name, 0))
    declared = {
        name: dims for name, dims in job.dynamic.items() if name in whole or name not in ndims
    }
    for name in [
        name
        for name in declared
        if isinstance(declared[name], Mapping) and name in ndims and ndims[name] > whole[name].ndim
    ]:
        declared[name] = {
            dim: spec
            for dim, spec in declared[name].items()
            if dim < whole[name].ndim or dim >= ndims[name]
        }
    shapes = declared_shapes(declared, whole)
    return {name: whole[name].detach().contiguous() for name in target.function.inputs}, shapes


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name) or name in RESERVED:
        raise JobError(
            "invalid name",
            where=where,
            expected=(
                "up to 32 lowercase letters, digits and underscores, and none of"
                f" {', '.join(sorted(RESERVED))}"
            ),
            got=repr(name),
        )


def _select_entries(
    job: Job, batch: Mapping[str, Any], names: Collection[str] | None, where: str
) -> dict[str, Any]:
    """Return the entries of one of the job's batches that a function reads.

    Entries that only other variants have are left out.
    """
    if names is None:
        return dict(batch)
    entries_of_job = set(job.batch).union(*job.variants.values())
    unknown = sorted(set(names) - entries_of_job)
    if unknown:
        raise JobError(
            "names inputs that are not in the batch",
            where=where,
            expected=f"some of {sorted(entries_of_job)}",
            got=str(unknown),
            hint=did_you_mean(str(unknown[0]), entries_of_job),
        )
    return {name: value for name, value in batch.items() if name in set(names)}


def _outputs(function: Traced, batch: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of a function's outputs for other graphs, on an example."""
    with (
        modes_kept(function.model) as set_training,
        state_kept(function.model),
        replaying(False, 0),
        torch.no_grad(),
    ):
        set_training(False)
        values = function.run(rebuild(batch, leaves_of(batch)))
    for spec, value in zip(function.signature.outputs, values, strict=True):
        if spec.role is OutputRole.OUTPUT:
            yield spec.name, value.detach().clone()
