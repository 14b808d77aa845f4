"""Captures a job's model and loss as a program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from trainload.capture.diagnostics.blame import (
    capture_error,
    explain_difference,
    no_gradient,
    of_hook,
)
from trainload.capture.job.declared_sizes import Shapes, warn_of_special_lengths
from trainload.capture.job.definition import Job
from trainload.capture.job.flat_function import Around, Traced, nothing_around
from trainload.capture.job.leading_rows import arranged
from trainload.capture.job.model_state import (
    buffer_specs,
    check_model,
    modes_kept,
    parameter_specs,
    state_kept,
    state_of,
)
from trainload.capture.job.shared_memory import check_same_memory
from trainload.capture.operators import graphs_in, is_overload
from trainload.capture.parity.parity import check_parity
from trainload.capture.parity.replays import Check, replay_batches
from trainload.capture.program import GraphCapture, InputSpec, Mode, Program, SizeLike, Tracing
from trainload.capture.source.quiet import ignore_torchs_warnings, quiet_torch
from trainload.capture.source.source_place import place_of_error
from trainload.capture.source.user_kernels import check_no_wrapped_kernels
from trainload.capture.tracing.lazy_graphs import generated_when_run
from trainload.capture.tracing.strict import could_help, export_strictly, tried_too
from trainload.capture.tracing.targets import Target, example_of, targets_of
from trainload.capture.watching.branches import branches_may_write
from trainload.capture.watching.higher_order import differentiates
from trainload.capture.watching.regions import make_regions
from trainload.capture.watching.watch import Watch
from trainload.core.errors import CaptureError, JobError, RequestError, raised
from trainload.core.garbage import garbage_collection_disabled
from trainload.core.work_steps import begin_step

_PREFIX = "model."


def capture(
    job: Job,
    check: Check | None = Check.USUAL,
    strict: bool | None = None,
) -> Program:
    """Capture the job's graphs and check that they equal eager mode.

    These are its training, evaluation, prediction and compute graphs.

    Args:
        job: the job to capture.
        check: how much is compared; None: nothing, and the model is not run, since the job's
            tensors have no values. See `abstract_job.py`.
        strict: True: use only torch.export's strict mode; False: only its non-strict mode; None:
            the non-strict mode, and if that cannot follow the model, the strict mode if it loses
            nothing. See `strict.py`.

    Raises:
        JobError: if the job is inconsistent.
        CaptureError: if the model cannot be captured, or if a captured graph differs from eager
            mode.
    """
    job, model = arranged(job), check_model(job.model)
    graphs: dict[str, GraphCapture] = {}
    constants: dict[str, Tensor] = {}
    unreached: dict[str, set[str]] = {}
    with modes_kept(model) as set_training, branches_may_write():
        targets = targets_of(job)
        for number, target in enumerate(targets, 1):
            begin_step(f"tracing graph {target.name} ({number} of {len(targets)})")
            batch, shapes = example_of(job, target)
            if target.training:
                warn_of_special_lengths({name: shapes[name] for name in batch}, batch)
            set_training(target.training)
            target.function.runs = check is not None
            proven = _capture_graph(target, batch, shapes, check, strict)
            graphs[target.name] = proven.captured
            constants |= proven.constants
            if target.training:
                unreached[target.name] = proven.without_gradient
            for other in targets:
                other.function.differentiates = other.function.differentiates or differentiates(
                    proven.captured.exported.graph_module
                )
        set_training(True)  # an overridden train() may change which parameters are trained
        _check_variants(graphs.values())
        without_gradient = set[str].intersection(*unreached.values())
        graphs |= {
            name: replace(graphs[name], reached=_reached_parameters(model, names))
            for name, names in unreached.items()
            if names - without_gradient
        }
        if without_gradient:
            warnings.warn(
                f"{len(without_gradient)} parameters get no gradient from the loss and are not"
                f" trained: {', '.join(sorted(without_gradient))}. See"
                " docs/guides/capture.md#parameter-without-a-gradient.",
                stacklevel=2,
            )
        parameters = parameter_specs(model, without_gradient)
        if not any(p.trainable for p in parameters):
            raise no_gradient(job)
        buffers = buffer_specs(model)
    return Program(
        graphs,
        parameters,
        buffers,
        state_of(model, parameters, buffers),
        constants,
        tuple(job.variants),
    )


@dataclass(frozen=True, slots=True)
class _ComparedGraph:
    """A graph that was compared with eager mode.

    Attributes:
        captured: the graph.
        constants: its constants by "graph/name".
        without_gradient: parameters that receive no gradient from its loss.
    """

    captured: GraphCapture
    constants: dict[str, Tensor]
    without_gradient: set[str]


def _reached_parameters(model: nn.Module, unreached: set[str]) -> tuple[str, ...]:
    return tuple(
        sorted(n for n, p in model.named_parameters() if p.requires_grad and n not in unreached)
    )


def _check_variants(graphs: Iterable[GraphCapture]) -> None:
    """Check that the variants of a graph return the same outputs, which a run adds up."""
    first: dict[tuple[str, Mode], GraphCapture] = {}
    for captured in graphs:
        other = first.setdefault((captured.graph, captured.mode), captured)
        if captured.outputs != other.outputs:
            raise JobError(
                "a variant returns different values from the first one",
                where=f"Job.variants[{captured.variant!r}]: graph {captured.graph}",
                expected=", ".join(f"{o.role} {o.name}" for o in other.outputs),
                got=", ".join(f"{o.role} {o.name}" for o in captured.outputs),
                hint="Return the same loss, weight, metrics and outputs for every batch.",
            )


def _capture_graph(
    target: Target,
    batch: dict[str, Tensor],
    shapes: Shapes,
    check: Check | None,
    strict: bool | None,
) -> _ComparedGraph:
    """Capture one graph and compare it with eager mode, unless `check` is None.

    Raises:
        JobError: if the function does not return what a job's function must.
        CaptureError: if the model cannot be captured, or if the captured graph differs.
    """
    if strict:
        with state_kept(target.function.model):
            exported = _export_strictly_as_requested(target, batch, shapes)
        return _compare_graph(
            target, batch, exported, check, Tracing(strict=True, why="it was asked for")
        )
    try:
        with state_kept(target.function.model):
            exported = export_graph(target, batch, shapes)
    except CaptureError as refused:
        strictly_captured = None
        if strict is None and check is not None and could_help(refused):
            strictly_captured = _try_strictly(target, batch, shapes, check, refused)
        if strictly_captured is None:
            raise
        return strictly_captured
    why = (
        "it was asked for"
        if strict is False
        else "it follows the model, and everything that forward does is watched"
    )
    return _compare_graph(target, batch, exported, check, Tracing(strict=False, why=why))


def _export_strictly_as_requested(
    target: Target, batch: dict[str, Tensor], shapes: Shapes
) -> ExportedProgram:
    """Export in strict mode because the caller requested it."""
    try:
        return export_strictly(target, batch, shapes)
    except RequestError:
        raise
    except Exception as error:  # as in export_graph
        raise CaptureError(
            f"torch.export's strict mode cannot capture the {target.name} graph",
            where=str(place_of_error(error) or f"graph {target.name}"),
            got=raised(error),
            hint=(
                "Omit strict: the non-strict mode accepts most models, and explains in more detail"
                " why it rejects one."
            ),
        ) from error


def _try_strictly(
    target: Target,
    batch: dict[str, Tensor],
    shapes: Shapes,
    check: Check,
    refused: CaptureError,
) -> _ComparedGraph | None:
    """Capture in strict mode after the non-strict mode rejected the model.

    Returns:
        The graph; None if strict mode cannot follow the model either, loses something, or differs
        from eager mode.
    """
    why = f"the non-strict mode does not follow the model: {refused.findings[0].sentence}"
    place = refused.findings[0].place
    tracing = Tracing(
        strict=True, why=why if place is None else f"{why} ({place})", refused=refused
    )
    try:
        with state_kept(target.function.model):
            exported = export_strictly(target, batch, shapes)
        return _compare_graph(target, batch, exported, check, tracing)
    except Exception as error:  # noqa: BLE001  # the first error remains valid, and the caller raises it
        tried_too(refused, error)
        return None


def _compare_graph(
    target: Target,
    batch: dict[str, Tensor],
    exported: ExportedProgram,
    check: Check | None,
    tracing: Tracing,
) -> _ComparedGraph:
    """Return the captured graph, compared with eager mode unless `check` is None."""
    name, function = target.name, target.function
    _strip_prefix(exported)
    _forget_strides(exported, function.model)
    captured = GraphCapture(
        name, exported, input_specs(exported, batch), function.signature.outputs, tracing=tracing
    )
    constants = _constants(name, exported)
    if check is None:
        return _ComparedGraph(captured, constants, set())
    begin_step(f"comparing graph {name} with eager PyTorch")
    with state_kept(function.model):
        try:
            missing = check_parity(
                captured, function, replay_batches(captured, batch, check), constants
            )
            return _ComparedGraph(captured, constants, missing)
        except CaptureError as error:
            compare = partial(check_parity, captured, function, [batch], constants)
            raise explain_difference(error, function, batch, compare) from error


def export_graph(
    target: Target, batch: dict[str, Tensor], shapes: Shapes, around: Around = nothing_around
) -> ExportedProgram:
    """Return the training IR of one graph, not yet compared with eager mode.

    Args:
        target: the graph to trace; its model is in the right mode.
        batch: leaves of its batch.
        shapes: their declared sizes.
        around: returns the context in which the function runs, for the traced leaves.

    Raises:
        JobError: if the function does not return what a job's function must.
        CaptureError: if torch.export cannot follow it, or rejects the declared sizes.
    """
    try:
        return _export(target, batch, shapes, around)
    except RequestError:
        raise
    except Exception as error:
        # a model's own code may raise anything; each becomes a report that names the place
        raise _report_error(target, error, batch, shapes) from error


def _report_error(
    target: Target, error: Exception, batch: dict[str, Tensor], shapes: Shapes
) -> CaptureError:
    def attempt(inside: AbstractContextManager[object]) -> ExportedProgram:
        return _export(target, batch, shapes, inside=inside)

    return capture_error(
        target.name,
        error,
        attempt,
        target.function,
        batch,
        training=target.training,
        runs=target.function.runs,
    )


def _export(
    target: Target,
    batch: dict[str, Tensor],
    shapes: Shapes,
    around: Around = nothing_around,
    inside: AbstractContextManager[object] | None = None,
) -> ExportedProgram:
    """Run torch.export's non-strict mode, which runs the model's Python, watched."""
    training, function = target.training, target.function
    with quiet_torch(), warnings.catch_warnings():
        ignore_torchs_warnings()
        # torch.export restores assigned tensors. One that is not a buffer and carries a value to
        # the next call fails the replay.
        warnings.filterwarnings(
            "ignore", message=r"The tensor attributes? .* assigned during export"
        )
        after = sorted(
            n for n, p in function.model.named_parameters() if p._post_accumulate_grad_hooks
        )
        if after and training:
            raise of_hook(
                f"the parameter {after[0]} has a hook that runs after its gradient is accumulated,"
                " when the step's graph has ended",
                "Change the gradient with parameter.register_hook, or in the optimizer.",
            )
        hooks = {
            n: list(backward_hooks.values())
            for n, p in function.model.named_parameters()
            if (backward_hooks := p._backward_hooks)
        }
        watch = Watch()
        with (
            torch.set_grad_enabled(training),
            inside or nullcontext(),
            _watch_forward(watch, function, hooks if training else {}, around),
            garbage_collection_disabled(),
            generated_when_run(),
        ):
            # Not with prefer_deferred_runtime_asserts_over_guards: the graph of a model that splits
            # the batch in halves would then assert `s // 2 != 1`, and fail on two and three rows,
            # which the model accepts.
            exported = torch.export.export(
                function, (batch,), dynamic_shapes=({n: shapes[n] for n in batch},), strict=False
            )
        caught = watch.raised.caught()
        if caught is not None:
            raise caught
        _drop_failed(exported)
        check_no_wrapped_kernels(exported.graph_module)
        check_same_memory(exported)
        make_regions(exported, training)
        return exported


def _drop_failed(exported: ExportedProgram) -> None:
    """Remove calls that raised during tracing and whose error the model caught.

    They have no value and no users.
    """
    for module in graphs_in(exported.graph_module):
        for node in reversed(module.graph.nodes):
            if (
                is_overload(node.target)
                and node.meta.get("val") is None
                and not node.users
                and node.target._schema.returns
            ):
                module.graph.erase_node(node)
        module.recompile()


@contextmanager
def _watch_forward(
    watch: Watch,
    function: Traced,
    hooks: dict[str, list[Callable[[Tensor], Tensor | None]]],
    around: Around,
) -> Iterator[None]:
    """Watch the function's forward inside the block."""

    @contextmanager
    def watched(batch: Mapping[str, Tensor]) -> Iterator[None]:
        with around(batch), watch.tracing(function.model, hooks):
            yield

    function.watched = watched
    try:
        yield
    finally:
        function.watched = nothing_around


def _forget_strides(exported: ExportedProgram, model: nn.Module) -> None:
    """Make a graph accept contiguous tensors where the model's own are not contiguous.

    A package stores tensors contiguously.

    A view that only the model's strides allow becomes `reshape`, which is a view whenever one is
    possible.
    """
    if all(tensor.is_contiguous() for tensor in (*model.parameters(), *model.buffers())):
        return
    for module in graphs_in(exported.graph_module):
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        module.recompile()


def _strip_prefix(exported: ExportedProgram) -> None:
    """Give parameters and buffers the names that they have in the user's module."""
    for spec in exported.graph_signature.input_specs:
        if spec.target is not None:
            spec.target = spec.target.removeprefix(_PREFIX)
    for output in exported.graph_signature.output_specs:
        if output.target is not None:
            output.target = output.target.removeprefix(_PREFIX)
    for store in (exported.state_dict, exported.constants):
        for key in list(store):
            store[key.removeprefix(_PREFIX)] = store.pop(key)


def input_specs(exported: ExportedProgram, batch: Mapping[str, Tensor]) -> tuple[InputSpec, ...]:
    """Return the specs of a graph's inputs, in order. `batch`: its example."""
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
            text = str(size)
            # may be a SymInt of a constant expression, if torch specialized a dim that was left to
            # it
            if text.isdigit():
                shape.append(int(text))
            else:
                shape.append(symbols.setdefault(text, "batch" if dim == 0 else f"{name}_{dim}"))
        specs.append(InputSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(shape)))
    return tuple(specs)


def _constants(name: str, exported: ExportedProgram) -> dict[str, Tensor]:
    constants: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            value = exported.constants[spec.target]
            if not isinstance(value, Tensor) or value.requires_grad:
                raise CaptureError(
                    "a tensor that requires a gradient is not part of the model, so its gradient"
                    " would be lost",
                    where=spec.target,
                    hint=(
                        "Make it an nn.Parameter of Job.model, or freeze it with"
                        " requires_grad_(False)."
                    ),
                )
            constants[f"{name}/{spec.target}"] = value.detach().cpu().clone()
        elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT):
            raise CaptureError(
                "an input of this kind is not supported",
                where=str(spec.target),
                expected="a tensor",
                got=str(spec.kind),
                hint=(
                    "Pass only tensors; keep other objects as attributes of the model that forward"
                    " does not pass to operators."
                ),
            )
    return constants
