"""Operators that a graph may call, by name.

Everything else is rejected before torch sees the graph.
"""

from __future__ import annotations

import re
from collections.abc import Set

from trainload.core.errors import UnsafePackageError
from trainload.packaging.format.format_version import BUILT_IN_NAMESPACES

HIGHER_ORDER = frozenset(
    {"cond", "while_loop", "while_loop_stack_output", "map_impl", "scan", "associative_scan"}
    | {"wrap_with_set_grad_enabled", "wrap_with_autocast"}
    | {
        "trainload_backward",
        "trainload_checkpoint",
        "trainload_func_grad",
        "trainload_vmap",
        "trainload_autograd_grad",
    }
    | {"trainload_require_grad", "trainload_backward_by_use", "trainload_selective_checkpoint"}
)
"""Operators that take graphs as arguments."""

_ARITHMETIC = (
    "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv and_ or_ lshift rshift"
)
SIZE_FUNCTIONS = frozenset(
    {f"_operator.{name}" for name in _ARITHMETIC.split(" ")}
    | {
        "math.trunc",
        "torch.sym_not",
        "torch.sym_int",
        "torch.sym_float",
        "torch.sym_ite",
        "torch.sym_max",
        "torch.sym_min",
    }
)
"""Python functions that graphs may apply to symbolic sizes."""

_DENIED = frozenset(
    {
        "from_file",
        "_print",
        "set_",
        "set_data",
        "_backward",
        "retain_grad",
        "retains_grad",
        "requires_grad_",
        "record_stream",
    }
    | {
        "resize_",
        "resize_as_",
        "_resize_output",
        "_resize_output_",
        "_version",
        "output_nr",
        "is_set_to",
        "_foobar",
        "_rowwise_prune",
    }
    | {"_fw_primal", "_make_dual", "_unpack_dual", "_propagate_xla_data", "_nnpack_available"}
    | {"_debug_has_internal_overlap", "_has_compatible_shallow_copy_type"}
)
"""ATen operators that read files, print, change autograd state, storage or streams, or do not check
their arguments.
"""
_DENIED_PATTERN = re.compile(
    r"(_cufft_|_cslt_|_sparse_semi_structured|_test_|_nested_|_use_|.*_unsafe$|to_mkldnn).*"
)
_DUNDER = frozenset(
    f"__{i}{name}__" for i in ("", "i") for name in ("and", "or", "xor", "lshift", "rshift")
)

_TARGET = re.compile(
    r"torch\.ops\.([A-Za-z_][A-Za-z0-9_]{0,63})\.([A-Za-z_][A-Za-z0-9_]{0,127})\.([A-Za-z][A-Za-z0-9_]{0,63})"
)
_HIGHER_ORDER = re.compile(r"torch\.ops\.higher_order\.([a-z_]{1,64})")


def check_operator(target: str, where: str, namespaces: Set[str] = frozenset()) -> str | None:
    """Check that a graph may call an operator.

    Args:
        target: the operator as graphs spell it: "torch.ops.aten.add.Tensor".
        where: file and node, for errors.
        namespaces: trusted namespaces of other libraries.

    Returns:
        The operator's namespace; None for one of HIGHER_ORDER or SIZE_FUNCTIONS.

    Raises:
        UnsafePackageError: the operator is rejected; the message states the rule.
    """
    if target in SIZE_FUNCTIONS:
        return None
    match = _HIGHER_ORDER.fullmatch(target)
    if match is not None:
        if match[1] not in HIGHER_ORDER:
            raise UnsafePackageError(
                f"the higher-order operator {match[1]} is not allowed in a graph", where=where
            )
        return None
    match = _TARGET.fullmatch(target)
    if match is None:
        raise UnsafePackageError(
            "a graph calls something that is not an operator",
            where=where,
            expected="torch.ops.NAMESPACE.NAME.OVERLOAD",
            got=repr(target[:120]),
        )
    namespace, name, _ = match.groups()
    if namespace not in BUILT_IN_NAMESPACES and namespace not in namespaces:
        raise UnsafePackageError(
            f"a graph calls the operator {target} of another library",
            where=where,
            expected=f"operators of {', '.join(sorted(BUILT_IN_NAMESPACES | namespaces))}",
            got=namespace,
            hint=f"If you trust it, import the library and allow the namespace {namespace}.",
        )
    if name.startswith("__") and name not in _DUNDER:
        raise UnsafePackageError(f"the operator name {name} is not allowed", where=where)
    if namespace == "aten" and (name in _DENIED or _DENIED_PATTERN.fullmatch(name)):
        raise UnsafePackageError(
            f"the operator aten::{name} is denied: it does more than compute on tensors",
            where=where,
        )
    return namespace
