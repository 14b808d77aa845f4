"""Look up operators in the running torch: their schemas, registrations and Triton kernels.

Tested with torch 2.13.0. The private names are those of `torch._ops`, `torch._C.parse_schema`,
`torch._C._dispatch_dump`, and the registries of `torch._library` (who registered an operator).
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch._library import custom_ops, simple_registry
from torch._library.triton import get_triton_kernels_for_op
from torch._ops import HigherOrderOperator, OpOverload

from trainload.capture.operators import nodes_in
from trainload.capture.watching import higher_order  # noqa: F401 - registers operators of graphs


def running_schema(name: str) -> str | None:
    """Return the running torch's schema of an operator ("torch.ops.aten.add.Tensor"), or None."""
    overload = _overload(name)
    return None if overload is None else str(overload._schema)


def has_higher_order(name: str) -> bool:
    """Return True if there is a higher-order operator of this name ("cond") in torch or
    trainload.
    """
    return isinstance(getattr(torch.ops.higher_order, name, None), HigherOrderOperator)


def schema_still_fits(name: str, recorded: str) -> bool:
    """Return True if the running torch's operator accepts every call of the recorded schema."""
    overload = _overload(name)
    if overload is None:
        return False
    if str(overload._schema) == recorded:
        return True
    try:
        running: Any = overload._schema  # the stubs lack its methods
        return bool(running.is_backward_compatible_with(torch._C.parse_schema(recorded)))
    except (RuntimeError, UnicodeDecodeError):
        # not a schema; torch's message may be cut within a UTF-8 character
        return False


def registered_by(name: str) -> tuple[str, ...]:
    """Return the modules or Python files that registered an operator, as far as torch knows, the
    most certain first.

    In this order: the module of the function passed to `torch.library.custom_op` or `triton_op`;
    the file that created the `torch.library.Library` which defined the operator; the file that
    registered its fake kernel, which libraries of C++ operators do in Python.

    Args:
        name: "torch.ops.my_library.double.default".
    """
    overload = _overload(name)
    if overload is None:
        return ()
    qualified = name_of(overload).partition(".")[0]
    modules: list[str] = []
    definition = custom_ops.OPDEFS.get(qualified)
    if definition is not None:
        modules.append(str(definition._init_fn.__module__))
    places = re.findall(
        r"^debug: registered at (.+):\d+$", torch._C._dispatch_dump(name_of(overload)), re.MULTILINE
    )
    entry: Any = simple_registry.singleton.find(qualified)
    kernel = getattr(getattr(entry, "fake_impl", None), "kernel", None)
    places += [str(kernel.source).rpartition(":")[0]] if kernel is not None else []
    own = os.path.dirname(torch.__file__) + os.sep
    return (
        *modules,
        *(place for place in places if place.endswith(".py") and not place.startswith(own)),
    )


def triton_kernels(name: str) -> tuple[Any, ...]:
    """Return the Triton kernels that torch found in the source of a `triton_op`, otherwise ()."""
    overload = _overload(name)
    kernels = (
        [] if overload is None else get_triton_kernels_for_op(name_of(overload).partition(".")[0])
    )
    functions = []
    for kernel in kernels:
        while hasattr(kernel, "fn"):  # unwrap autotuners and triton.jit
            kernel = kernel.fn
        functions.append(kernel)
    return tuple(functions)


def name_of(overload: OpOverload) -> str:
    """Return torch's name of an operator: "aten::add.Tensor"."""
    name: str = overload.name()  # type: ignore[no-untyped-call]
    return name


def _overload(name: str) -> OpOverload | None:
    overload: Any = torch.ops
    for part in name.removeprefix("torch.ops.").split("."):
        overload = getattr(overload, part, None)
        if overload is None:
            return None
    if not isinstance(overload, OpOverload):
        return None
    return overload if torch._C._dispatch_has_kernel(name_of(overload)) else None


def operator_namespaces(module: torch.fx.GraphModule) -> frozenset[str]:
    """Return the namespaces of the operators that a graph and its bodies call."""
    return frozenset(
        node.target.namespace for node in nodes_in(module) if isinstance(node.target, OpOverload)
    )
