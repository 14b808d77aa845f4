"""torch.export's strict mode, for models that the non-strict mode cannot follow.

It is used only if it loses nothing.

The non-strict mode runs the model's Python on fake tensors, watched by `watch.py`. The strict mode
interprets the bytecode instead: it follows `float(x.shape[0])` and numpy, which produce plain
values when they are run, but the watch does not reach into it, so it drops or changes what the
watch would mark. So the model first runs once in eager mode, watched: if it would leave a mark in
the graph, or uses anything outside of tensors, the strict mode is rejected.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from trainload.capture.diagnostics.rerun import watch
from trainload.capture.job.declared_sizes import Shapes, is_hint, spelled
from trainload.capture.job.flat_function import Traced
from trainload.capture.job.model_state import state_kept
from trainload.capture.operators import calls_in, is_higher_order
from trainload.capture.source.causes import BREAK, CONSTRAINT, SPECIALISED, VALUES
from trainload.capture.source.quiet import ignore_torchs_warnings, quiet_torch
from trainload.capture.source.source_place import place_here
from trainload.capture.source.user_kernels import check_no_wrapped_kernels
from trainload.capture.tracing.targets import Target
from trainload.capture.watching import marks
from trainload.capture.watching.saved_tensors import CHECKPOINT_MODULE
from trainload.capture.watching.watch import Watch
from trainload.core.errors import CaptureError, raised
from trainload.core.finding import Place

_FOLLOWED_CAUSES = frozenset(cause.anchor for cause in (SPECIALISED, CONSTRAINT, VALUES, BREAK))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_VALUE_READS = frozenset({"item", "_local_scalar_dense"})
_HINT = "Omit strict: the non-strict mode keeps it."


def could_help(page: CaptureError) -> bool:
    """Return True if strict mode may follow everything that non-strict mode rejects.

    It never follows a branch on values.
    """
    return bool(page.findings) and all(
        finding.cause in _FOLLOWED_CAUSES for finding in page.findings
    )


def tried_too(page: Exception, error: Exception) -> None:
    """Add a note to the non-strict mode's error on why strict mode failed too.

    The error itself remains valid.
    """
    page.add_note(f"torch.export's strict mode was tried too: {raised(error)}")


def export_strictly(target: Target, batch: dict[str, Tensor], shapes: Shapes) -> ExportedProgram:
    """Return the training IR of one graph from torch.export's strict mode.

    It is not yet compared with eager mode.

    Args:
        target: the graph to capture; its model is in the right mode, and can be run.
        batch: leaves of its batch.
        shapes: their declared sizes.

    Raises:
        CaptureError: if the model does something that strict mode drops or changes, or if the graph
            contains something that a package cannot hold; the message names it.
        Exception: any exception of torch if it cannot follow the model.
    """
    _check_nothing_dropped(target, batch)
    with quiet_torch(), warnings.catch_warnings(), torch.set_grad_enabled(target.training):
        ignore_torchs_warnings()
        # torch only warns when strict tracing would write to a module's Python state
        warnings.filterwarnings("error", message=r"While compiling, we found certain side effects")
        exported = torch.export.export(
            target.function,
            (batch,),
            dynamic_shapes=({name: shapes[name] for name in batch},),
            strict=True,
        )
    check_no_wrapped_kernels(exported.graph_module)
    _check_graph(exported, target)
    _check_sizes(exported, batch, shapes)
    return exported


# Checks before the export: constructs that the strict mode would drop


def _check_nothing_dropped(target: Target, batch: dict[str, Tensor]) -> None:
    function, model = target.function, target.function.model
    for name, module in model.named_modules():
        if any(getattr(module, hooks) for hooks in _HOOKS):
            raise _dropped_error(f"module {name or type(module).__name__} has a hook", None)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise _dropped_error(f"the parameter {name} has a hook", None)
    with state_kept(model), torch.set_grad_enabled(target.training):
        watched = watch(function, batch)
    if watched.error is not None:
        raise _dropped_error(
            f"the model fails in eager mode ({type(watched.error).__name__})", None
        )
    with state_kept(model), torch.set_grad_enabled(target.training):
        _check_no_marks(function, batch)
    for deed in watched.deeds:
        if deed.cause is not VALUES:
            raise _dropped_error(
                f"{deed.cause.sentence} ({deed.detail})" if deed.detail else deed.cause.sentence,
                deed.place,
            )


def _check_no_marks(function: Traced, batch: dict[str, Tensor]) -> None:
    """Run the model under the watch of a trace, and raise if it sets a mark.

    Each mark represents something that strict mode does not see.
    """
    recorder = _Marks()
    copied = {name: value.clone() for name, value in batch.items()}
    with contextlib.redirect_stdout(io.StringIO()), quiet_torch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with recorder, _watch_for_marks(function, recorder):
                function(copied)
        except CaptureError:
            if not recorder.errors:
                raise
    if recorder.errors:  # the model's own code may have caught the exception
        raise recorder.errors[0]


@contextmanager
def _watch_for_marks(function: Traced, recorder: _Marks) -> Iterator[None]:
    def watched(_: object) -> Any:
        return _audited(function.model, recorder)

    before, function.watched = function.watched, watched
    try:
        yield
    finally:
        function.watched = before


@contextmanager
def _audited(model: nn.Module, recorder: _Marks) -> Iterator[None]:
    with _Audit(recorder).tracing(model, {}):
        buffers = [
            (module, name, value)
            for module in model.modules()
            for name, value in module._buffers.items()
            if value is not None
        ]
        yield
        changed = next(
            (name for module, name, value in buffers if module._buffers.get(name) is not value),
            None,
        )
        if changed is not None:
            recorder.errors.append(
                _dropped_error(f"forward assigns a new tensor to the buffer {changed}", None)
            )


class _Marks(TorchFunctionMode):
    """Mode that records every mark that a watch sets."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[CaptureError] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "namespace", "") == marks.NAMESPACE:
            self.errors.append(_dropped_error(_mark_in_words(func, args), place_here()))
            raise self.errors[-1]
        return func(*args, **(kwargs or {}))


class _Audit(Watch):
    """A watch that names called autograd functions, and rejects all hooks on saved tensors."""

    def __init__(self, recorder: _Marks) -> None:
        super().__init__()
        self._recorder = recorder

    def _apply(self, cls: type, *args: Any, **kwargs: Any) -> Any:
        self._recorder.errors.append(
            _dropped_error(f"forward calls the autograd function {cls.__name__}", place_here())
        )
        raise self._recorder.errors[-1]

    def _saved_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        marked = super()._saved_enter(original)

        def enter(context: Any) -> Any:
            if type(context).__module__ != CHECKPOINT_MODULE:
                self._recorder.errors.append(
                    _dropped_error(
                        "forward changes the tensors that are saved for backward"
                        f" ({type(context).__name__})",
                        place_here(),
                    )
                )
                raise self._recorder.errors[-1]
            return marked(context)

        return enter


def _mark_in_words(mark: Any, args: tuple[Any, ...]) -> str:
    if mark is marks.GRAD_MODE:
        return "forward changes the grad mode"
    if mark is marks.BEGIN:
        return f"forward contains a region ({str(args[0]).replace('_', ' ')})"
    return "forward uses autograd directly"


def _dropped_error(what: str, place: Place | None) -> CaptureError:
    return CaptureError(
        f"torch.export's strict mode would lose part of the model: {what}",
        where="" if place is None else str(place),
        hint=_HINT,
    )


# Checks of the exported graph


def _check_graph(exported: ExportedProgram, target: Target) -> None:
    """Check that a strict graph contains nothing unwatched, and no state that the model lacks."""
    for node in calls_in(exported.graph_module):
        if is_higher_order(node.target):
            raise _unsound_error(
                f"its graph contains the operator {node.target}, whose bodies were not checked"
            )
        if getattr(node.target, "_opname", "") in _VALUE_READS:
            raise _unsound_error("its graph reads a number from a tensor")
    model = target.function.model
    names = {
        name
        for name, _ in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
    for spec in exported.graph_signature.input_specs:
        if (
            spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            and str(spec.target).removeprefix("model.") not in names
        ):
            raise _unsound_error(
                f"its graph has the parameter or buffer {spec.target}, which is not in the model"
            )
    if len(exported.graph_signature.user_outputs) != len(target.function.signature.outputs):
        raise _unsound_error("its graph returns a different number of values from the model")


def _check_sizes(exported: ExportedProgram, batch: dict[str, Tensor], shapes: Shapes) -> None:
    """Check that the graph accepts all declared sizes.

    Strict mode keeps conditions on them that non-strict mode rejects.

    Conditions on sizes that are left to torch become the graph's guard, as in non-strict mode.
    """
    values = {
        node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"
    }
    declared: dict[str, str] = {}
    environment: Any = None
    for (name, tensor), node in zip(
        batch.items(), exported.graph_signature.user_inputs, strict=True
    ):
        value: Any = values[str(node)]
        environment = value.fake_mode.shape_env
        for dim in range(tensor.ndim):
            spec = shapes[name].get(dim, Dim.STATIC)
            if spec is Dim.STATIC or (dim > 0 and is_hint(spec)):
                continue
            size, declaration = (
                str(value.shape[dim]),
                "the batch dim" if is_hint(spec) else spelled(spec),
            )
            if size.isdigit() and not is_hint(spec):
                raise _unsound_error(
                    f"{name}[{dim}] is {size} in its graph, but is declared as {declaration}"
                )
            if declared.setdefault(size, declaration) != declaration:
                raise _unsound_error(
                    f"its graph uses one size for both {declared[size]} and {declaration}"
                )
    # Conditions are matched by symbol: strict mode names inputs `L['flat_args'][0]` in them.
    symbols = {word for size in declared for word in _identifiers(size)}
    for guard in environment.guards:
        condition = str(environment.replace(guard.expr))  # "True" if it unified two symbols
        if symbols & _identifiers(condition):
            raise _unsound_error(f"it requires {condition} of a declared size")


def _identifiers(text: str) -> set[str]:
    return set(
        "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()
    )


def _unsound_error(what: str) -> CaptureError:
    return CaptureError(
        f"torch.export's strict mode cannot be used for this model: {what}", hint=_HINT
    )
