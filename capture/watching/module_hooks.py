"""Traces the backward hooks of modules into the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from trainload.capture.diagnostics.blame import own_backward
from trainload.capture.watching.recorder import Recorder


@contextlib.contextmanager
def module_hooks(watch: Recorder, model: nn.Module) -> Iterator[None]:
    """Trace the modules' backward hooks into the graph.

    Inside the block they are removed, and forward hooks record them.
    """
    handles = []
    removed = []
    for name, module in model.named_modules():
        before, after = dict(module._backward_pre_hooks), dict(module._backward_hooks)
        if not before and not after:
            continue
        removed.append((module, before, after))
        if after and not module._is_full_backward_hook:
            raise own_backward(
                f"module {name} has a legacy backward hook (register_backward_hook), which torch"
                " documents as unreliable",
                "Use register_full_backward_hook, or a tensor hook.",
            )
        module._backward_pre_hooks.clear()
        module._backward_hooks.clear()
        if after:
            handles.append(
                module.register_forward_pre_hook(_input_hook(watch, name, tuple(after.values())))
            )
        if before:
            handles.append(
                module.register_forward_hook(_output_hook(watch, tuple(before.values())))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, before, after in removed:
            module._backward_pre_hooks.update(before)
            module._backward_hooks.update(after)


def _input_hook(
    watch: Recorder, name: str, hooks: tuple[Callable[..., Any], ...]
) -> Callable[..., Any]:
    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        def change(tangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            for hook in hooks:
                changed = hook(module, tangents, _Unavailable(name))
                if changed is not None:
                    tangents = changed if isinstance(changed, tuple) else (changed,)
            return tangents

        return watch.passed(inputs, change)

    return enter


def _output_hook(watch: Recorder, hooks: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    def leave(module: nn.Module, _: object, output: Any) -> Any:
        def change(tangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            for hook in hooks:
                changed = hook(module, tangents)
                if changed is not None:
                    tangents = changed if isinstance(changed, tuple) else (changed,)
            return tangents

        passed = watch.passed(output if isinstance(output, tuple) else (output,), change)
        return passed if isinstance(output, tuple) else passed[0]

    return leave


class _Unavailable:
    """Placeholder for the `grad_output` of a full backward hook.

    It is unknown where the input gradients are captured.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> Any:
        raise own_backward(
            f"a full backward hook of module {self._name} reads the gradients of the module's"
            " outputs, which are not available where the gradients of its inputs are captured",
            "Use register_full_backward_pre_hook to change the outputs' gradients, or an autograd"
            " function around the module.",
        )

    __getitem__ = __iter__ = __len__ = _refuse
