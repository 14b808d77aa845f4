"""Watches a model's Python during a trace, and marks what torch.export does not see.

Calls are intercepted at points that they cannot bypass, whatever name the model uses: a mode over
torch's functions (grad mode, autocast, hooks, gradients), the class below
`torch.autograd.Function`, and the context managers of autocast and of saved tensors, which
checkpointing uses.

In torch.export's non-strict mode fake tensors carry autograd's graph, so `requires_grad` can be
queried while tracing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from trainload.capture.diagnostics.blame import own_backward, own_generator, unfollowed
from trainload.capture.job.tensor_classes import check_traceable_arguments
from trainload.capture.source.caught import Raised
from trainload.capture.source.patched import OPERATORS, renamed, replaced
from trainload.capture.source.source_place import place_here
from trainload.capture.source.user_kernels import no_raw_kernels
from trainload.capture.substitutes.cumulative_batch_norm import BATCH_NORM, counted_average
from trainload.capture.substitutes.gamma import dirichlet_rsample
from trainload.capture.substitutes.lengths import lengths
from trainload.capture.substitutes.shape_functions import (
    SUBSTITUTES,
    decoder_forward,
    encoder_forward,
    module_to,
)
from trainload.capture.watching import marks
from trainload.capture.watching.applied import FUNCTION_BASE, applied
from trainload.capture.watching.bodies import bodies
from trainload.capture.watching.branches import traced_by
from trainload.capture.watching.custom_function import call_function
from trainload.capture.watching.func_transforms import autograd_grad, transforms
from trainload.capture.watching.module_hooks import module_hooks
from trainload.capture.watching.recorder import Recorder
from trainload.capture.watching.saved_tensors import CHECKPOINT_MODULE, is_own
from trainload.capture.watching.selective import SELECTIVE, Answers
from trainload.core.errors import CaptureError


class Watch(Recorder):
    """Watches one trace.

    Use `with watch.tracing(model, hooks): ...` around the model's forward, inside the traced
    function.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: list[Answers] = []
        """Decisions of the enclosing checkpoints, outermost first."""
        self.raised = Raised()
        self.leaving = False
        """True while a context restores the grad mode."""

    @contextlib.contextmanager
    def tracing(
        self, model: nn.Module, parameters: dict[str, list[Callable[[Tensor], Tensor | None]]]
    ) -> Iterator[None]:
        """Mark in the graph what happens inside the block.

        Args:
            model: the model as it is traced.
            parameters: name -> hooks that the parameter's gradient passes through.
        """
        with contextlib.ExitStack() as stack:
            mode = stack.enter_context(_Functions(self, model))
            stack.enter_context(applied(model, self._apply))
            stack.enter_context(traced_by(self, model))
            for owner, name, value in self._replacements(mode):
                stack.enter_context(replaced(owner, name, value))
            stack.enter_context(renamed(transforms(self)))
            stack.enter_context(module_hooks(self, model))
            stack.enter_context(no_raw_kernels())
            stack.enter_context(lengths())
            stack.enter_context(self.raised.by_sizes())
            for name, hooks in parameters.items():
                for hook in hooks:
                    self.hook(model.get_parameter(name), hook)
            with _buffers_written(model):
                yield

    def _replacements(self, mode: TorchFunctionMode) -> list[tuple[Any, str, object]]:
        """Return replacements of torch's attributes: (owner, name, replacement).

        mode: the mode of this watch.
        """
        saved, distributions = torch.autograd.graph.saved_tensors_hooks, torch.distributions
        return [
            (torch.autocast, "__enter__", self._autocast_enter(torch.autocast.__enter__)),
            (torch.autocast, "__exit__", self._autocast_exit(torch.autocast.__exit__)),
            (saved, "__enter__", self._saved_enter(saved.__enter__)),
            (saved, "__exit__", self._saved_exit(saved.__exit__)),
            (SELECTIVE, "__enter__", self._selective_enter(SELECTIVE.__enter__)),
            *(
                (k, "__exit__", self._mode_exit(k.__exit__))
                for k in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
            ),
            (torch.inference_mode, "__enter__", _inference_enter),
            (torch.inference_mode, "__exit__", _inference_exit),
            (BATCH_NORM, "forward", counted_average(BATCH_NORM.forward)),
            (nn.TransformerEncoder, "forward", encoder_forward(nn.TransformerEncoder.forward)),
            (nn.TransformerDecoder, "forward", decoder_forward(nn.TransformerDecoder.forward)),
            (nn.Module, "to", module_to(nn.Module.to)),
            (distributions.Dirichlet, "rsample", dirichlet_rsample),
            # checks depend on values; eager mode makes them
            (distributions.Distribution, "_validate_args", False),
            (torch, "compile", _compile_outside(mode, torch.compile)),
        ]

    def hook(self, x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> int:
        """Pass the gradient of x through `hook` and return the number of its region."""
        number = self.number()
        tangent = self.tangent(x, number)
        marks.BEGIN("backward", "", number)
        changed = hook(tangent)
        marks.END(number)
        if changed is not None:
            marks.HOOK(x, changed, number)
        return number

    def _apply(self, cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *operands = args
            differentiable = torch.is_grad_enabled() and any(
                isinstance(a, Tensor) and a.requires_grad for a in operands
            )
            # a reentrant checkpoint passes no gradient unless an operand requires one
            with torch.set_grad_enabled(differentiable):
                number = self.region("checkpoint")
                try:
                    return function(*operands)
                finally:
                    marks.END(number)
        # torch's own functions: those of control-flow operators, whose bodies are compiled
        # separately on fake tensors (the backward of a while_loop is a while_loop again, so tracing
        # it would never end), and those of checkpoints, which keep their inputs.
        if cls.__module__.startswith(OPERATORS) or cls.__module__ == CHECKPOINT_MODULE:
            return super(FUNCTION_BASE, cls).apply(*args, **kwargs)  # type: ignore[misc]  # cls is a subclass
        return call_function(self, cls, args, kwargs)

    def _mode_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `__exit__` of a grad mode, which alone shows that a change restores an earlier
        mode.
        """

        def leave(context: Any, *error: Any) -> Any:
            self.leaving = True
            try:
                return original(context, *error)
            finally:
                self.leaving = False

        return leave

    def _autocast_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: Any) -> Any:
            dtype = str(context.fast_dtype).removeprefix("torch.")
            context.trainload_region = self.region(
                "autocast", f"{context.device} {dtype} {bool(context._enabled)}"
            )
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
            if type(context).__module__ == CHECKPOINT_MODULE:
                context.trainload_region = self.region("checkpoint")
                self._answers.append(Answers())
                return None  # nothing is saved while tracing
            # how tensors are kept does not matter to a graph: see saved_tensors.py
            return None if is_own(context) else original(context)

        return enter

    def _saved_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(context: Any, *error: Any) -> Any:
            if type(context).__module__ == CHECKPOINT_MODULE:
                decisions = self._answers.pop().text()
                if decisions:
                    marks.KEEP(decisions, context.trainload_region)
                return marks.END(context.trainload_region)
            return None if is_own(context) else original(context, *error)

        return leave

    def _selective_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: Any) -> Any:
            # otherwise it is used outside of a checkpoint, where it keeps nothing
            if self._answers:
                self._answers[-1].listen(context)
            return original(context)

        return enter


@contextlib.contextmanager
def _buffers_written(model: nn.Module) -> Iterator[None]:
    """Copy the values that forward assigned to a buffer's name into the buffer."""
    before = [
        (module, name, value)
        for module in model.modules()
        for name, value in module._buffers.items()
        if value is not None
    ]
    yield
    for module, name, value in before:
        now = module._buffers.get(name)
        if now is None or now is value:
            continue
        if now.shape != value.shape or now.dtype != value.dtype:
            raise CaptureError(
                f"forward assigns a tensor of another shape or dtype to the buffer {name}",
                where=f"buffer {name} of {type(module).__name__}",
                expected=f"shape {tuple(value.shape)}, {value.dtype}",
                got=f"shape {tuple(now.shape)}, {now.dtype}",
                hint="Give the buffer its final shape and dtype in the constructor.",
            )
        with torch.no_grad():
            value.copy_(now)
        module._buffers[name] = value


class _Functions(TorchFunctionMode):
    """Mode that intercepts every function of torch that the model calls."""

    def __init__(self, watch: Watch, model: nn.Module) -> None:
        super().__init__()
        self._watch = watch
        self._model = model

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with self._watch.raised.noted():
            return self._intercept(func, args, kwargs or {})

    def _intercept(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        check_traceable_arguments(func, (*args, *kwargs.values()), self._model, place_here)
        _check_gradient_stays_on(func, args, kwargs)
        if name == "_set_grad_enabled" and not self._watch.quiet:
            marks.GRAD_MODE(args[0], self._watch.leaving)
        elif func is Tensor.register_hook:
            with self:
                return _Handle(self._watch.hook(*args, **kwargs))
        elif func is torch.autograd.grad:
            with self:
                return autograd_grad(*args, **kwargs)
        elif func in SUBSTITUTES:
            return SUBSTITUTES[func](*args, **kwargs)
        elif (
            name == "requires_grad_"
            and not self._watch.quiet
            and (args[1:] or (kwargs.get("requires_grad", True),))[0]
        ):
            if not args[0].requires_grad:
                marks.REQUIRE_GRAD(args[0])
        elif func == Tensor.requires_grad.__set__ and args[1] and not args[0].requires_grad:  # type: ignore[attr-defined]  # a descriptor
            marks.REQUIRE_GRAD(args[0])
        elif isinstance(kwargs.get("generator"), torch.Generator):
            raise own_generator()
        elif name in _REFUSED:
            raise own_backward(
                f"forward calls {name}, which a graph cannot represent", _REFUSED[name]
            )
        return func(*args, **kwargs)


def _check_gradient_stays_on(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise if forward sets `requires_grad` of a parameter to False.

    The graph would still compute its gradient.
    """
    name = getattr(func, "__name__", "")
    if name == "requires_grad_" or func == Tensor.requires_grad.__set__:  # type: ignore[attr-defined]  # a descriptor
        enabled = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if isinstance(args[0], nn.Parameter) and args[0].requires_grad and not enabled:
            raise unfollowed(
                "forward disables the gradient of a parameter",
                "Use parameter.detach() where no gradient is wanted.",
            )


_REFUSED = {
    "register_post_accumulate_grad_hook": (
        "Change the gradient with tensor.register_hook, or in the optimizer."
    ),
    "backward": (
        "Return the loss; for a gradient within it call torch.autograd.grad(...,"
        " create_graph=True)."
    ),
}


class _Handle:
    """Return value of register_hook while tracing: the hook is already in the graph."""

    def __init__(self, number: int) -> None:
        self._number = number

    def remove(self) -> None:
        marks.UNHOOK(self._number)

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _inference_enter(context: Any) -> None:
    """Enter inference mode as no_grad; it differs only in operations that eager mode rejects."""
    context.trainload_mode = torch.no_grad() if context.mode else contextlib.nullcontext()
    context.trainload_mode.__enter__()


def _inference_exit(context: Any, *error: Any) -> None:
    context.trainload_mode.__exit__(*error)


def _compile_outside(mode: Any, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch.compile for control-flow operators.

    Their bodies are compiled and run outside of the mode, which the compiler would trace. torch's
    cache is reset before each call, since torch evaluates the guards of cached code on symbolic
    sizes, which specializes them.
    """

    def compile_(*options: Any, **settings: Any) -> Any:
        compiled = compiler(*options, **settings)

        def run(*args: Any, **kwargs: Any) -> Any:
            torch.compiler.reset()
            mode.__exit__(None, None, None)
            try:
                with bodies():
                    return compiled(*args, **kwargs)
            finally:
                mode.__enter__()

        return run

    return compile_
