"""The user's own kernels.

Reports operators without a kernel for the device of the comparison, and Triton kernels outside of
operators.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from trainload.capture.operators import calls_in, is_overload
from trainload.capture.source.causes import OWN_KERNEL
from trainload.capture.source.operator_registration import operator_name
from trainload.capture.source.source_place import place_here, place_of_node
from trainload.core.errors import CaptureError, raised
from trainload.core.finding import Finding, Place

_BUILT_IN = frozenset({"aten", "prims", "trainload"})
_RAW_KERNEL_REWRITE = (
    '@torch.library.triton_op("my_library::{name}", mutates_args={{}})\n'
    "def {name}_op(x: torch.Tensor) -> torch.Tensor:\n"
    "    y = torch.empty_like(x)\n"
    "    torch.library.wrap_triton({name})[grid](x, y, ...)\n"
    "    return y\n"
    "{name}_op.register_autograd(lambda ctx, gradient: ...)  # its derivative\n"
    '{name}_op.register_kernel("cpu")(lambda x: ...)  # the same in torch\'s operators'
)


class _Failing(TorchFunctionMode):
    """Mode that records the first operator that raised.

    A Triton operator fails on CPU tensors with a message of the driver that does not name it.
    Operators that a backward calls do not reach a mode, but torch's message names an operator
    without a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.arguments: tuple[str, ...] = ()
        self.place: Place | None = None
        self.message = ""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            match = re.search(r"Could not run '(\w+)::(\w+)'", str(error))
            overload = getattr(
                getattr(getattr(torch.ops, match[1]), match[2]) if match is not None else func,
                "default",
                func,
            )
            if not self.name and is_overload(overload):
                self.name, self.place = operator_name(f"{overload} "), place_here()
                self.arguments = tuple(argument.name for argument in overload._schema.arguments)
                self.message = raised(error)
            raise


def without_kernel(function: nn.Module, batch: Mapping[str, Tensor]) -> CaptureError | None:
    """Return the error for an operator of the user that cannot run in eager mode, or None.

    Args:
        function: the failing function. Its model's buffers and gradients change.
        batch: the batch on which it fails.
    """
    mode = _Failing()
    with contextlib.suppress(Exception), mode:  # it is known to raise
        loss = next((value for value in function(dict(batch)) if value.requires_grad), None)
        if loss is not None:
            loss.backward()
    if not mode.name or mode.name.partition("::")[0] in _BUILT_IN:
        return None
    device = next(iter(batch.values())).device.type
    sentence = (
        f"the operator {mode.name} cannot run on {device.upper()} tensors, so the graph cannot be"
        " compared with eager mode"
    )
    code = (
        f'@torch.library.register_kernel("{mode.name}", "{device}")\n'
        f"def _({', '.join(mode.arguments)}):\n"
        "    return ...  # the same in torch's operators"
    )
    return _error(sentence, OWN_KERNEL.advice, code, mode.place, mode.message)


@contextlib.contextmanager
def no_raw_kernels() -> Iterator[None]:
    """Reject Triton kernels that are launched outside of an operator, inside the block."""
    triton = sys.modules.get("triton.runtime.jit")
    if triton is None:
        yield
        return
    interface: Any = triton.KernelInterface
    before = interface.__getitem__

    def refuse(kernel: Any, grid: Any) -> Any:
        raise _raw_kernel_error(
            getattr(kernel, "__name__", "")
            or getattr(getattr(kernel, "fn", None), "__name__", "kernel"),
            place_here(),
        )

    interface.__getitem__ = refuse
    try:
        yield
    finally:
        interface.__getitem__ = before


def check_no_wrapped_kernels(module: GraphModule) -> None:
    """Check that a graph launches no Triton kernel itself (`wrap_triton` outside of an operator).

    Raises:
        CaptureError: if it does.
    """
    for node in calls_in(module):
        if str(node.target).startswith("triton_kernel_wrapper"):
            error = _raw_kernel_error("kernel", None)
            error.where = place_of_node(node)
            raise error


def _raw_kernel_error(name: str, place: Place | None) -> CaptureError:
    kernel = "a Triton kernel" if name == "kernel" else f"the Triton kernel {name}"
    sentence = f"forward launches {kernel} directly, which a package cannot contain"
    return _error(
        sentence,
        "Wrap it in an operator with torch.library.triton_op, which a graph can call by name.",
        _RAW_KERNEL_REWRITE.format(name=name),
        place,
    )


def _error(
    sentence: str, advice: str, code: str, place: Place | None, message: str = ""
) -> CaptureError:
    finding = Finding(OWN_KERNEL.anchor, sentence, advice, code, place)
    return CaptureError(
        sentence,
        where="" if place is None else str(place),
        got=message,
        hint=advice,
        findings=[finding],
    )
