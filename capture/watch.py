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
from trainload.capture.custom_function import call_function
from trainload.capture.errors import CaptureError

_CHECKPOINT = "torch.utils.checkpoint"
_FUNCTION_BASE: Any = torch.autograd.Function.__mro__[1]
"""Where every `apply` of an autograd function arrives, also through a name that was bound before."""


class Watch:
    """What one trace is watched with: `with watch.tracing(model): ...` around the model's forward, inside what is traced."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
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
            mode = stack.enter_context(_Functions(self))
            stack.enter_context(_replaced(torch.autocast, "__enter__", self._autocast_enter(torch.autocast.__enter__)))
            stack.enter_context(_replaced(torch.autocast, "__exit__", self._autocast_exit(torch.autocast.__exit__)))
            hooks = torch.autograd.graph.saved_tensors_hooks
            stack.enter_context(_replaced(hooks, "__enter__", self._saved_enter(hooks.__enter__)))
            stack.enter_context(_replaced(hooks, "__exit__", self._saved_exit(hooks.__exit__)))
            stack.enter_context(_replaced(_FUNCTION_BASE, "apply", classmethod(self._apply)))
            stack.enter_context(_replaced(torch, "compile", _outside(mode, torch.compile)))
            stack.enter_context(_replaced(torch.inference_mode, "__enter__", _inference_enter))
            stack.enter_context(_replaced(torch.inference_mode, "__exit__", _inference_exit))
            stack.enter_context(_renamed(torch.func.vjp, _vjp))
            stack.enter_context(_renamed(torch.func.jvp, _jvp))
            for function in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian, torch.func.linearize):
                stack.enter_context(_renamed(function, _refused_transform(function.__name__)))
            stack.enter_context(_renamed(torch.func.vmap, self._vmap))
            stack.enter_context(_renamed(torch.func.grad, self._func_grad))
            stack.enter_context(_renamed(torch.func.grad_and_value, self._func_grad_and_value))
            stack.enter_context(self._module_hooks(model))
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
                return marks.END(context.trainload_region)
            return original(context, *error)

        return leave

    def _func_grad(self, function: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
        both = self._func_grad_and_value(function, argnums, has_aux)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            gradients, value = both(*args, **kwargs)
            return (gradients, value[1]) if has_aux else gradients

        return wrapper

    def _func_grad_and_value(
        self, function: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
    ) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            number = self.region("func_grad")
            variables: list[Tensor] = []

            def variable(x: Tensor) -> Tensor:
                variables.append(marks.VARIABLE(x, number))
                return variables[-1]

            places = (argnums,) if isinstance(argnums, int) else tuple(argnums)
            given = [_mapped(a, variable) if i in places else a for i, a in enumerate(args)]
            result = function(*given, **kwargs)
            values: list[Tensor] = []
            _mapped(result, values.append)
            marks.END(number)
            found = iter(marks.FUNC_GRAD(variables, values, number))
            gradients = tuple(_mapped(given[i], lambda _: next(found)) for i in places)
            return gradients[0] if isinstance(argnums, int) else gradients, _mapped(result, lambda _: next(found))

        return wrapper

    def _vmap(
        self, function: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error", *, chunk_size: int | None = None
    ) -> Callable[..., Any]:
        """Traces the function once, on one slice; `chunk_size` is a matter of memory, which a graph leaves to its compiler."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            number = self.region("vmap", randomness)
            mapped: list[tuple[Tensor, int]] = []

            def row(x: Tensor, dim: int | None) -> Tensor:
                if dim is None:
                    return x
                mapped.append((x, dim % x.ndim))
                result: Tensor = marks.ROW(x, dim % x.ndim, number)
                return result

            given = _mapped_with(args, in_dims, row)
            rest = _mapped_with(kwargs, 0, row)  # as torch does: keyword arguments are mapped along dim 0
            result = function(*given, **rest)
            values: list[Tensor] = []
            dims: list[int] = []

            def collect(x: Tensor, dim: int | None) -> None:
                values.append(x)
                dims.append((dim or 0) % (x.ndim + 1))

            _mapped_with(result, out_dims, collect)
            marks.END(number)
            found = iter(marks.STACKED(values, dims, *mapped[0], number))
            return _mapped(result, lambda _: next(found))

        return wrapper

    @contextlib.contextmanager
    def _module_hooks(self, model: nn.Module) -> Iterator[None]:
        """Takes the backward hooks off the modules, and has forward hooks put them into the graph instead."""
        handles = []
        taken = []
        for name, module in model.named_modules():
            before, after = dict(module._backward_pre_hooks), dict(module._backward_hooks)
            if not before and not after:
                continue
            taken.append((module, before, after))
            if after and not module._is_full_backward_hook:
                raise own_backward(
                    f"module {name} has a backward hook of the old kind, which torch itself calls unreliable",
                    "Use register_full_backward_hook, or a tensor hook.",
                )
            module._backward_pre_hooks.clear()
            module._backward_hooks.clear()
            if after:
                handles.append(module.register_forward_pre_hook(self._input_hook(name, tuple(after.values()))))
            if before:
                handles.append(module.register_forward_hook(self._output_hook(tuple(before.values()))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, before, after in taken:
                module._backward_pre_hooks.update(before)
                module._backward_hooks.update(after)

    def _input_hook(self, name: str, hooks: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            def change(tangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
                for hook in hooks:
                    changed = hook(module, tangents, _Unavailable(name))
                    if changed is not None:
                        tangents = changed if isinstance(changed, tuple) else (changed,)
                return tangents

            return self._passed(inputs, change)

        return enter

    def _output_hook(self, hooks: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
        def leave(module: nn.Module, _: object, output: Any) -> Any:
            def change(tangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
                for hook in hooks:
                    changed = hook(module, tangents)
                    if changed is not None:
                        tangents = changed if isinstance(changed, tuple) else (changed,)
                return tangents

            passed = self._passed(output if isinstance(output, tuple) else (output,), change)
            return passed if isinstance(output, tuple) else passed[0]

        return leave

    def _passed(self, values: tuple[Any, ...], change: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]) -> tuple[Any, ...]:
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

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "_set_grad_enabled" and not self._watch.quiet:
            marks.GRAD_MODE(args[0])
        elif func is Tensor.register_hook:
            with self:
                self._watch.hook(*args, **kwargs)
            return _Handle()
        elif func is torch.autograd.grad:
            with self:
                return _autograd_grad(*args, **kwargs)
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


class _Unavailable:
    """Stands for a full backward hook's second gradients, which are not known where the first ones are captured."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> Any:
        raise own_backward(
            f"a full backward hook of module {self._name} reads the gradients of the module's outputs, which are not at hand "
            "where those of its inputs are captured",
            "Use register_full_backward_pre_hook to change the outputs' gradients, or an autograd function around the module.",
        )

    __getitem__ = __iter__ = __len__ = _refuse


def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...]:
    """torch.autograd.grad as one operator; an input that is not used has zeros as its gradient, not None."""
    if is_grads_batched:
        raise own_backward("forward calls torch.autograd.grad with is_grads_batched, which is not captured", "Use torch.func.vmap.")
    ends = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    starts = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    given: list[Tensor | None] = [None] * len(ends)
    if grad_outputs is not None:
        given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs)
    weights = [torch.ones_like(end) if weight is None else weight for end, weight in zip(ends, given, strict=True)]
    return tuple(marks.AUTOGRAD_GRAD(ends, starts, weights, create_graph))


def _inference_enter(context: Any) -> None:
    """Inference mode as no_grad: what differs is only what eager refuses."""
    context.trainload_mode = torch.no_grad() if context.mode else contextlib.nullcontext()
    context.trainload_mode.__enter__()


def _inference_exit(context: Any, *error: Any) -> None:
    context.trainload_mode.__exit__(*error)


def _variable(x: Tensor) -> Tensor:
    """X under another name, to differentiate by it alone."""
    return x.view_as(x).requires_grad_()


def _vjp(function: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    variables: list[Tensor] = []

    def made(x: Tensor) -> Tensor:
        variables.append(_variable(x))
        return variables[-1]

    result = function(*_mapped(primals, made))
    output, *rest = result if has_aux else (result,)
    ends: list[Tensor] = []
    _mapped(output, ends.append)

    def pull_back(cotangents: Any) -> Any:
        weights: list[Tensor] = []
        _mapped(cotangents, weights.append)
        found = iter(marks.AUTOGRAD_GRAD(ends, variables, weights, True))
        return _mapped(primals, lambda _: next(found))

    return (output, pull_back, *rest)


def _jvp(function: Callable[..., Any], primals: Any, tangents: Any, *, has_aux: bool = False) -> Any:
    """The derivative along `tangents`: that of the pull-back, which is linear in what is pulled back."""
    output, pull_back, *rest = _vjp(function, *primals, has_aux=has_aux)
    weights: list[Tensor] = []

    def weight(x: Tensor) -> Tensor:
        weights.append(_variable(torch.zeros_like(x)))
        return weights[-1]

    pulled: list[Tensor] = []
    _mapped(pull_back(_mapped(output, weight)), pulled.append)
    along: list[Tensor] = []
    _mapped(tangents, along.append)
    found = iter(marks.AUTOGRAD_GRAD(pulled, weights, along, True))
    return (output, _mapped(output, lambda _: next(found)), *rest)


def _refused_transform(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise own_backward(
            f"forward calls torch.func.{name}, which is not captured",
            "Write it with torch.func.grad, vjp or jvp, and torch.func.vmap over grad.",
        )

    return refuse


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A nest of dicts, lists and tuples with `function` applied to its tensors, in order."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(entry, function) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [_mapped(entry, function) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value


def _mapped_with(value: Any, dims: Any, function: Callable[[Tensor, int | None], Any]) -> Any:
    """As `_mapped`, with the number that `dims` has for each tensor: one for all below it, or a nest like the value's."""
    if isinstance(value, Tensor):
        return function(value, dims)
    if isinstance(value, dict):
        return {key: _mapped_with(entry, dims[key] if isinstance(dims, dict) else dims, function) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        each = dims if isinstance(dims, list | tuple) else [dims] * len(value)
        entries = [_mapped_with(entry, dim, function) for entry, dim in zip(value, each, strict=True)]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value


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
