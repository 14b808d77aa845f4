"""Captures a job's model and loss as a program."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from trainload.capture.blame import capture_error, explained, no_gradient
from trainload.capture.errors import CaptureError, JobError
from trainload.capture.function import PredictFunction, StepFunction
from trainload.capture.job import Job
from trainload.capture.parity import check_parity
from trainload.capture.program import GraphCapture, InputSpec, Program, SizeLike
from trainload.capture.quiet import quiet_torch
from trainload.capture.state import buffer_specs, check_model, modes_kept, parameter_specs, state_kept, state_of

_PREFIX = "model."


def capture(job: Job) -> Program:
    """Captures the job's training, evaluation and prediction graphs and proves them equal to eager.

    Raises:
        JobError: the job's description does not hold together.
        CaptureError: the model cannot be captured, or what was captured differs from eager.
    """
    model = check_model(job.model)
    batch = _checked_batch(job)
    step = StepFunction(job)
    functions: dict[str, StepFunction | PredictFunction] = {"train": step, "eval": step}
    batches = {"train": batch, "eval": batch}
    if job.predict is not None:
        functions["predict"] = PredictFunction(job)
        batches["predict"] = _predict_batch(job, batch)
    graphs: dict[str, GraphCapture] = {}
    constants: dict[str, Tensor] = {}
    without_gradient: set[str] = set()
    with modes_kept(model):
        for name, function in functions.items():
            model.train(name == "train")
            with state_kept(model):
                exported = _export(name, function, batches[name], job.dynamic)
            _strip_prefix(exported)
            captured = GraphCapture(name, exported, _inputs(exported, batches[name]), function.signature.outputs)
            graphs[name] = captured
            constants |= _constants(name, exported)
            with state_kept(model):
                try:
                    without_gradient |= check_parity(captured, function, batches[name], constants)
                except CaptureError as error:
                    raise explained(error, function, batches[name]) from error
    if without_gradient:
        warnings.warn(
            f"{len(without_gradient)} parameters get no gradient from the loss and stay as they are: "
            f"{', '.join(sorted(without_gradient))}. "
            "See docs/capture.md#parameter-without-a-gradient.",
            stacklevel=2,
        )
    parameters = parameter_specs(model, without_gradient)
    if not any(p.trainable for p in parameters):
        raise no_gradient(job)
    buffers = buffer_specs(model)
    return Program(graphs, parameters, buffers, state_of(model, parameters, buffers), constants)


def _checked_batch(job: Job) -> dict[str, Tensor]:
    if not job.batch:
        raise JobError("the example batch is empty", where="Job.batch", cure="Give one real batch, input name -> tensor.")
    entries: Mapping[Any, Any] = job.batch  # unchecked so far
    for name, value in entries.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise JobError("not a usable input name", where="Job.batch", expected="an identifier", got=repr(name))
        if not isinstance(value, Tensor):
            raise JobError(
                "not a tensor",
                where=f"Job.batch[{name!r}]",
                expected="a tensor",
                got=type(value).__name__,
                cure="Numbers: torch.tensor(values); text: its tokens; lists of tensors: padded. See docs/capture.md#unsupported-input.",
            )
        if value.ndim == 0:
            raise JobError(
                "an input without a batch dim",
                where=f"Job.batch[{name!r}]",
                expected="one dim or more",
                got="0 dims",
                cure="Give it a leading batch dim, or make it a constant of the model.",
            )
    rows = {name: value.shape[0] for name, value in job.batch.items()}
    if len(set(rows.values())) != 1:
        raise JobError("inputs differ in their number of rows", where="Job.batch", expected="one leading size", got=str(rows))
    unknown = sorted(set(job.dynamic) - set(job.batch))
    if unknown:
        raise JobError("names inputs that the batch lacks", where="Job.dynamic", expected=f"some of {sorted(job.batch)}", got=str(unknown))
    size = next(iter(rows.values()))
    if size < 2 and not _static_batch(job.dynamic):
        raise JobError(
            "the example batch is too small for a dynamic batch dim, since torch treats sizes 0 and 1 as special",
            where="Job.batch",
            expected="2 rows or more",
            got=f"{size}",
            cure="Give more rows, or fix the size with dynamic={name: {0: Dim.STATIC}}.",
        )
    return {name: job.batch[name].detach().contiguous() for name in sorted(job.batch)}


def _batch_dim(dynamic: Mapping[str, Mapping[int, Any]]) -> Any:
    """The one Dim of all inputs' leading dims: what the job says for any of them."""
    said = [dims[0] for dims in dynamic.values() if 0 in dims]
    if any(dim in (Dim.STATIC, None) or isinstance(dim, int) for dim in said):
        return Dim.STATIC
    if len({str(dim) for dim in said}) > 1:
        raise JobError(
            "declares the batch dim in several ways",
            where="Job.dynamic",
            expected="one Dim for dim 0",
            got=", ".join(map(str, said)),
            cure="Every input has the same rows: declare dim 0 once.",
        )
    return said[0] if said else Dim("batch", min=1)


def _static_batch(dynamic: Mapping[str, Mapping[int, Any]]) -> bool:
    return _batch_dim(dynamic) is Dim.STATIC


def _predict_batch(job: Job, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    names = sorted(batch if job.predict_inputs is None else job.predict_inputs)
    unknown = sorted(set(names) - set(batch))
    if unknown:
        raise JobError(
            "names inputs that the batch lacks", where="Job.predict_inputs", expected=f"some of {sorted(batch)}", got=str(unknown)
        )
    return {name: batch[name] for name in names}


def _export(name: str, function: nn.Module, batch: dict[str, Tensor], dynamic: Mapping[str, Mapping[int, Any]]) -> ExportedProgram:
    rows = _batch_dim(dynamic)
    shapes = {n: {**dynamic.get(n, {}), 0: rows} for n in batch}

    def attempt(inside: AbstractContextManager[object]) -> ExportedProgram:
        with quiet_torch(), warnings.catch_warnings():
            # torch deprecates names of its own here; the user can do nothing about it.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            # Assigned tensors are put back by torch.export; one that carries a value to the next call fails the parity replay.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during export")
            with torch.set_grad_enabled(name == "train"), inside:
                return torch.export.export(function, (batch,), dynamic_shapes=(shapes,), strict=False)

    try:
        return attempt(nullcontext())
    except JobError:
        raise
    except Exception as error:  # a model's own code may raise anything; all of it becomes a page that names the place
        raise capture_error(name, error, attempt, function, batch) from error


def _strip_prefix(exported: ExportedProgram) -> None:
    """Gives parameters and buffers the names that they have in the user's module."""
    for spec in exported.graph_signature.input_specs:
        if spec.target is not None:
            spec.target = spec.target.removeprefix(_PREFIX)
    for output in exported.graph_signature.output_specs:
        if output.target is not None:
            output.target = output.target.removeprefix(_PREFIX)
    for store in (exported.state_dict, exported.constants):
        for key in list(store):
            store[key.removeprefix(_PREFIX)] = store.pop(key)


def _inputs(exported: ExportedProgram, batch: Mapping[str, Tensor]) -> tuple[InputSpec, ...]:
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    values = [
        node.meta["val"]
        for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]
    symbols: dict[str, str] = {}
    specs = []
    for (name, tensor), value in zip(batch.items(), values, strict=True):
        shape: list[SizeLike] = []
        for dim, size in enumerate(value.shape):
            if isinstance(size, int):
                shape.append(size)
            else:
                text = str(size)
                shape.append(symbols.setdefault(text, "batch" if dim == 0 else f"{name}_{dim}"))
        specs.append(InputSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(shape)))
    return tuple(specs)


def _constants(name: str, exported: ExportedProgram) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            value = exported.constants[spec.target]
            if not isinstance(value, Tensor) or value.requires_grad:
                raise CaptureError(
                    "a trained tensor stands outside the model, so its gradient would be lost",
                    where=spec.target,
                    cure="Make it an nn.Parameter of Job.model, or freeze it with requires_grad_(False).",
                )
            found[f"{name}/{spec.target}"] = value.detach().cpu().clone()
        elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT):
            raise CaptureError(
                "an input of this kind is not supported",
                where=str(spec.target),
                expected="a tensor",
                got=str(spec.kind),
                cure="Pass tensors only; keep other objects as attributes of the model that forward does not hand on.",
            )
    return found
