"""Moves the rows of every input of a job to the leading dim, where all later stages expect them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.export import Dim

from trainload.capture.job.declared_sizes import declared_dims, is_hint
from trainload.capture.job.definition import Batch, Job, check_job
from trainload.capture.job.inputs import Placed, leaves_of, with_tensors
from trainload.core.errors import JobError
from trainload.core.suggestions import did_you_mean

_BATCH_DIM = "batch"
"""Name of the batch dim if no leading dim has another name."""


def arranged(job: Job) -> Job:
    """Return the job with the rows of every input in its leading dim.

    If they already are, it is the job itself.

    Tensors with rows in another dim, or that all rows share, become `Placed` in its batches, so
    that its functions receive them in their original form.

    Raises:
        JobError: if `Job.shared` or `Job.dynamic` name inputs that the batches lack, contradict one
            another, or leave no input with rows.
    """
    check_job(job)
    tensors = [
        leaves_of(batch, values=False)
        for batch in (job.batch, *job.variants.values(), *job.replays)
    ]
    examples: dict[str, Tensor] = {}
    for leaves in tensors:  # `Job.dynamic` refers to the dims of the variant with the most dims
        examples |= {
            name: leaf
            for name, leaf in leaves.items()
            if name not in examples or leaf.ndim > examples[name].ndim
        }
    shared = _shared_inputs(job, examples)
    declared = {
        name: declared_dims(name, job.dynamic[name], leaf)
        for name, leaf in examples.items()
        if name in job.dynamic
    }
    places = dict(_row_dims(declared))
    if not shared and not places:
        return job
    dynamic = dict(job.dynamic) | {
        name: _move_dim(declared[name], place) for name, place in places.items()
    }

    def placed(batch: Batch) -> dict[str, Any]:
        return with_tensors(
            batch,
            lambda name, leaf: _place(name, leaf, None if name in shared else places.get(name, 0)),
        )

    return replace(
        job,
        batch=placed(job.batch),
        variants={name: placed(batch) for name, batch in job.variants.items()},
        replays=tuple(placed(batch) for batch in job.replays),
        dynamic=dynamic,
        shared=(),
    )


def _shared_inputs(job: Job, examples: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that `Job.shared` lists, directly or through a container."""
    if isinstance(job.shared, str):
        raise JobError(
            "a single name instead of a list of names",
            where="Job.shared",
            expected="a list of names",
            got=repr(job.shared),
        )
    selected: set[str] = set()
    for entry in job.shared:
        names = {name for name in examples if name == entry or name.startswith(f"{entry}.")}
        if not names:
            raise JobError(
                "names inputs that are not in the batch",
                where="Job.shared",
                expected=f"some of {sorted(examples)}",
                got=repr(entry),
                hint=did_you_mean(str(entry), examples),
            )
        if sized := sorted(names & set(job.dynamic)):
            raise JobError(
                "the sizes of an input in Job.shared are fixed to those of the example",
                where=f"Job.dynamic[{sized[0]!r}]",
                hint="Remove it from Job.dynamic or from Job.shared.",
            )
        selected |= names
    if selected and selected >= set(examples):
        raise JobError(
            "every input is shared, so none has a batch dim",
            where="Job.shared",
            expected="at least one input that differs from row to row",
            got=", ".join(sorted(selected)),
        )
    return selected


def _row_dims(declared: Mapping[str, Mapping[int, Any]]) -> Iterator[tuple[str, int]]:
    """Yield (input, dim of its rows) for inputs whose batch dim is not the leading one."""
    dim_names = {
        name: {dim: spec.__name__ for dim, spec in dims.items() if _is_plain(spec)}
        for name, dims in declared.items()
    }
    leading = {dims[0] for dims in dim_names.values() if 0 in dims}
    rows = (
        next(iter(leading))
        if len(leading) == 1 and not any(_BATCH_DIM in dims.values() for dims in dim_names.values())
        else _BATCH_DIM
    )
    for name, dims in dim_names.items():
        places = [dim for dim, of in dims.items() if of == rows]
        if len(places) == 1 and places[0] > 0:
            yield name, places[0]


def _is_plain(spec: Any) -> bool:
    """Return True if it is a dim with a name of its own."""
    return isinstance(spec, Dim) and not is_hint(spec) and not hasattr(spec, "root")


def _move_dim(dims: Mapping[int, Any], place: int) -> dict[int, Any]:
    """Return declarations of an input's dims, renumbered after moving one dim to the front."""
    return {0 if dim == place else dim + (dim < place): spec for dim, spec in dims.items()}


def _place(name: str, leaf: Tensor, place: int | None) -> Tensor | Placed:
    if place is None:
        # not a copy: a later check finds memory shared with a parameter
        return Placed(leaf.detach(), None)
    if place == 0:
        return leaf
    if place >= leaf.ndim:
        raise JobError(
            "the input has no such dim",
            where=f"Job.dynamic[{name!r}]",
            expected=f"{place + 1} dims or more",
            got=f"{leaf.ndim}",
        )
    return Placed(leaf, place)
