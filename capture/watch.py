"""Watches a model's Python while torch.export traces it, and marks in the graph what the tracer does not see.

Everything is caught where it must pass, whatever name the model calls it by: a mode over torch's functions (grad mode, autocast, hooks,
gradients), the class below `torch.autograd.Function`, and the context managers of autocast and of saved tensors, which checkpointing uses.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from trainload.capture import marks
from trainload.capture.blame import own_backward
from trainload.capture.ctc import ctc_loss
from trainload.capture.custom_function import call_function
from trainload.capture.errors import CaptureError
from trainload.capture.func_transforms import autograd_grad, transforms
from trainload.capture.kernels import no_raw_kernels
from trainload.capture.module_hooks import Change, module_hooks
from trainload.capture.place import place_here
from trainload.capture.selective import SELECTIVE, Answers
from trainload.capture.tensor_classes import refuse_arguments

_CHECKPOINT = "torch.utils.checkpoint"
_OPERATORS = "torch._higher_order_ops"
_FUNCTION_BASE: Any = torch.autograd.Function.__mro__[1]
"""Where every `apply` of an autograd function arrives, also through a name that was bound before."""


class Watch:
    """What one trace is watched with: `with watch.tracing(model): ...` around the model's forward, inside what is traced."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._answers: list[Answers] = []
        """Of the checkpoints that forward is in, outermost first."""
        self.quiet = False
        """Whether changes of the grad mode go unmarked: they are the watch's own."""

    @contextlib.contextmanager
    def tracing(self, model: nn.Module, parameters: dict[str, list[Callable[[Tensor], Tensor | None]]]) -> Iterator[None]:
        """Marks what happens inside.

        Args:
            model: as it is traced.
            parameters: name -> hooks that its gradient passes through.
        """
        with contextlib.ExitStack() as stack:
            mode = stack.enter_context(_Functions(self, model))
            stack.enter_context(_replaced(torch.autocast, "__enter__", self._autocast_enter(torch.autocast.__enter__)))
            stack.enter_context(_replaced(torch.autocast, "__exit__", self._autocast_exit(torch.autocast.__exit__)))
            hooks = torch.autograd.graph.saved_tensors_hooks
            stack.enter_context(_replaced(hooks, "__enter__", self._saved_enter(hooks.__enter__)))
            stack.enter_context(_replaced(hooks, "__exit__", self._saved_exit(hooks.__exit__)))
            stack.enter_context(_replaced(SELECTIVE, "__enter__", self._selective_enter(SELECTIVE.__enter__)))
            stack.enter_context(_replaced(_FUNCTION_BASE, "apply", classmethod(self._apply)))
            stack.enter_context(_replaced(torch, "compile", _outside(mode, torch.compile)))
            stack.enter_context(_replaced(torch.inference_mode, "__enter__", _inference_enter))
            stack.enter_context(_replaced(torch.inference_mode, "__exit__", _inference_exit))
            for function, value in transforms(self).items():
                stack.enter_context(_renamed(function, value))
            stack.enter_context(module_hooks(self, model))
            stack.enter_context(no_raw_kernels())
            for name, found in parameters.items():
                for hook in found:
                    self.hook(model.get_parameter(name), hook)
            with _buffers_written(model):
                yield

    def number(self) -> int:
        """A number for a region."""
        return next(self._numbers)

    def region(self, kind: str, text: str = "") -> int:
        """Begins a region and returns its number."""
        number = self.number()
        marks.BEGIN(kind, text, number)
        return number

    @contextlib.contextmanager
    def quietly(self, enabled: bool) -> Iterator[None]:
        """The grad mode, unmarked."""
        before, self.quiet = self.quiet, True
        try:
            with torch.set_grad_enabled(enabled):
                self.quiet = before
                yield
                self.quiet = True
        finally:
            self.quiet = before

    def tangent(self, x: Tensor, number: int) -> Tensor:
        """A stand-in for the gradient that arrives at x."""
        with self.quietly(False):
            result: Tensor = marks.TANGENT(x, number)
        return result

    def hook(self, x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        """Has x's gradient pass through `hook`."""
        number = self.number()
        tangent = self.tangent(x, number)
        marks.BEGIN("backward", "", number)
        changed = hook(tangent)
        marks.END(number)
        if changed is not None:
            marks.HOOK(x, changed, number)

    def _apply(self, cls: type, *args: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *operands = args
            differentiable = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in operands)
            with torch.set_grad_enabled(differentiable):  # a reentrant checkpoint passes no gradient unless an operand wants one
                number = self.region("checkpoint")
                try:
                    return function(*operands)
                finally:
                    marks.END(number)
        if cls.__module__.startswith(_OPERATORS):  # of a control-flow operator, whose bodies are compiled apart, on fake tensors
            return super(_FUNCTION_BASE, cls).apply(*args)  # type: ignore[misc]  # cls is a subclass
        return call_function(self, cls, args)

    def _autocast_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: Any) -> Any:
            dtype = str(context.fast_dtype).removeprefix("torch.")
            context.trainload_region = self.region("autocast", f"{context.device} {dtype} {bool(context._enabled)}")
            return original(context)

        return enter

    def _autocast_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(context: Any, *error: Any) -> Any:
            result = original(context, *error)
            marks.END(context.trainload_region)
            return result

        return leave

    def _saved_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: Any) -> Any:
            if type(context).__module__ == _CHECKPOINT:
                context.trainload_region = self.region("checkpoint")
                self._answers.append(Answers())
                return None  # nothing is saved while tracing
            if not isinstance(context, torch.autograd.graph.save_on_cpu):
                raise own_backward(
                    f"forward changes the tensors that are saved for backward ({type(context).__name__}), which a graph cannot say",
                    "Leave the context manager out; which tensors are kept is decided by the plan.",
                )
            return original(context)

        return enter

    def _saved_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(context: Any, *error: Any) -> Any:
            if type(context).__module__ == _CHECKPOINT:
                kept = self._answers.pop().text()
                if kept:
                    marks.KEEP(kept, context.trainload_region)
                return marks.END(context.trainload_region)
            return original(context, *error)

        return leave

    def _selective_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: Any) -> Any:
            if self._answers:  # else the user has it around something else than a checkpoint, where it keeps nothing
                self._answers[-1].listen(context)
            return original(context)

        return enter

    def passed(self, values: tuple[Any, ...], change: Change) -> tuple[Any, ...]:
        """The values, with their gradients passing through `change`."""
        places = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]
        if not places or not torch.is_grad_enabled():
            return values
        number = self.number()
        tangents = tuple(self.tangent(v, number) if i in places else None for i, v in enumerate(values))
        marks.BEGIN("backward", "", number)
        changed = change(tangents)
        marks.END(number)
        kept = [i for i in places if changed[i] is not None]
        connected = iter(marks.CONNECT([values[i] for i in kept], [values[i] for i in kept], [changed[i] for i in kept], number))
        return tuple(next(connected) if i in kept else v for i, v in enumerate(values))


@contextlib.contextmanager
def _buffers_written(model: nn.Module) -> Iterator[None]:
    """Writes what forward assigned to a buffer's name into the buffer."""
    before = [(module, name, value) for module in model.modules() for name, value in module._buffers.items() if value is not None]
    yield
    for module, name, value in before:
        now = module._buffers.get(name)
        if now is None or now is value:
            continue
        if now.shape != value.shape or now.dtype != value.dtype:
            raise CaptureError(
                f"forward assigns another kind of tensor to the buffer {name}",
                where=f"buffer {name} of {type(module).__name__}",
                expected=f"shape {tuple(value.shape)}, {value.dtype}",
                got=f"shape {tuple(now.shape)}, {now.dtype}",
                cure="Give the buffer its final shape and dtype in the constructor.",
            )
        with torch.no_grad():
            value.copy_(now)
        module._buffers[name] = value


class _Functions(TorchFunctionMode):
    """Sees every function of torch that the model calls."""

    def __init__(self, watch: Watch, model: nn.Module) -> None:
        super().__init__()
        self._watch = watch
        self._model = model

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        refuse_arguments(func, (*args, *kwargs.values()), self._model, place_here)
        if name == "_set_grad_enabled" and not self._watch.quiet:
            marks.GRAD_MODE(args[0])
        elif func is Tensor.register_hook:
            with self:
                self._watch.hook(*args, **kwargs)
            return _Handle()
        elif func is torch.autograd.grad:
            with self:
                return autograd_grad(*args, **kwargs)
        elif func in (torch.ctc_loss, nn.functional.ctc_loss):
            return ctc_loss(*args, **kwargs)
        elif name == "requires_grad_" and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
            if not args[0].requires_grad:
                marks.REQUIRE_GRAD(args[0])
        elif func == Tensor.requires_grad.__set__ and args[1] and not args[0].requires_grad:  # type: ignore[attr-defined]  # a descriptor
            marks.REQUIRE_GRAD(args[0])
        elif name in _REFUSED:
            raise own_backward(f"forward calls {name}, which a graph cannot say", _REFUSED[name])
        return func(*args, **kwargs)


_REFUSED = {
    "register_post_accumulate_grad_hook": "Change the gradient with tensor.register_hook, or in the optimizer.",
    "backward": "Return the loss; for a gradient within it call torch.autograd.grad(..., create_graph=True).",
}


class _Handle:
    """What register_hook returns while tracing: the hook is in the graph already."""

    def remove(self) -> None:
        raise own_backward("forward removes a hook that it registered, which a graph cannot say", "Register it only where it is to act.")


def _inference_enter(context: Any) -> None:
    """Inference mode as no_grad: what differs is only what eager refuses."""
    context.trainload_mode = torch.no_grad() if context.mode else contextlib.nullcontext()
    context.trainload_mode.__enter__()


def _inference_exit(context: Any, *error: Any) -> None:
    context.trainload_mode.__exit__(*error)


def _outside(mode: Any, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for control-flow operators: their bodies are compiled and run outside of the mode, which the compiler would trace."""

    def compile_(*options: Any, **named: Any) -> Any:
        compiled = compiler(*options, **named)

        def run(*args: Any, **kwargs: Any) -> Any:
            mode.__exit__(None, None, None)
            try:
                return compiled(*args, **kwargs)
            finally:
                mode.__enter__()

        return run

    return compile_


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """An attribute that is another one inside."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def _renamed(function: object, value: object) -> Iterator[None]:
    """A function of torch that is another one inside, under every name by which a module holds it; torch's own inner modules keep it."""
    places = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path in ("torch", "torch.func") or path.partition(".")[0] != "torch"
        for name, held in list(getattr(module, "__dict__", {}).items())
        if held is function and not name.startswith("__")
    ]
    with contextlib.ExitStack() as stack:
        for module, name in places:
            stack.enter_context(_replaced(module, name, value))
        yield
