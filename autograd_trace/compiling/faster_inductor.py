"""Make Inductor compile a graph in less time, to the same operations.

Tested with torch 2.13.0. Private names used: `torch._inductor.async_compile`,
`torch._inductor.codecache`, `torch._inductor.codegen.wrapper`,
`torch._inductor.dtype_propagation`, `torch._inductor.fx_utils`, `torch._inductor.loop_body`,
`torch._higher_order_ops.utils`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from trainload.autograd_trace.outlining.equality import CALL
from trainload.autograd_trace.outlining.signatures import describe
from trainload.capture.source.patched import replaced

_COMPILER_NICENESS = 5
"""Inductor defines the next kernels while the first ones are compiled, and should not wait."""
_MAX_NICENESS = 19
_KERNEL = "async_compile.cpp_pybinding("
"""Beginning of the definition of a kernel for a CPU, whose arguments are literals."""
_LONG = 200
"""Number of operations of a loop body above which duplicates are removed."""
_REPEATABLE = frozenset(
    {
        *("add", "and_", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or"),
        *("bitwise_right_shift", "bitwise_xor", "constant", "eq", "floordiv", "ge", "get_index"),
        *("gt", "index_expr", "le", "load", "logical_and", "logical_not", "logical_or", "lt"),
        *("mod", "mul", "ne", "neg", "or_", "remainder", "sub", "to_dtype", "truediv", "where"),
        "xor",
    }
)
"""Operations of a loop body whose results depend on their arguments alone."""
_STORES = frozenset({"store", "store_reduction"})


@contextlib.contextmanager
def kernels_started_early() -> Iterator[None]:
    """Start the C++ compiler for each CPU kernel when Inductor defines it.

    Otherwise Inductor starts it for all kernels at once when the whole graph's code is written. The
    end of the context waits for the compiler.
    """
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    defining = PythonWrapperCodegen.define_kernel
    kernels: dict[str, Any] = CppPythonBindingsCodeCache.cache
    before = set(kernels)

    with ThreadPoolExecutor(
        get_compile_threads(), thread_name_prefix="kernels", initializer=_lower_priority
    ) as pool:

        @functools.wraps(defining)
        def define_kernel(
            wrapper: PythonWrapperCodegen, name: str, body: str, *args: Any, **options: Any
        ) -> None:
            if body.startswith(_KERNEL):
                call = ast.parse(body.strip(), mode="eval").body
                assert isinstance(call, ast.Call)
                types, source = map(ast.literal_eval, call.args)
                # The code that Inductor writes asks for the same kernel later, and waits for it.
                CppPythonBindingsCodeCache.load_pybinding_async(
                    types, source, submit_fn=pool.submit
                )
            defining(wrapper, name, body, *args, **options)

        with replaced(PythonWrapperCodegen, "define_kernel", define_kernel):
            try:
                yield
            except BaseException:
                pool.shutdown(cancel_futures=True)
                for key in set(kernels) - before:
                    del kernels[key]  # it would wait for a compiler that was not started
                raise


def _lower_priority() -> None:
    """Lower the priority of this thread and of the processes that it starts."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + _COMPILER_NICENESS
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(niceness, _MAX_NICENESS))


@contextlib.contextmanager
def dtype_rules_made_once() -> Iterator[None]:
    """Make Inductor's table of result dtypes once.

    Its class returns one instance from every call, and makes the whole table again for each of a
    kernel's operations, an eighth of the time that Inductor takes.
    """
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Rules

    making: Any = Rules.__init__
    is_made = False

    def make_once(rules: Rules) -> None:
        nonlocal is_made
        if not is_made:
            making(rules)
            is_made = True

    with replaced(Rules, "__init__", make_once):
        yield


@contextlib.contextmanager
def duplicates_removed() -> Iterator[None]:
    """Remove the duplicates among the operations of a long loop body.

    Inductor computes a value with several users again for each of them until it has decided to
    store it, so a chain of `x ^ (x >> 16)` doubles with each link, in the body and in all that
    Inductor does with it. The generated code has each operation once in any case. Inductor decides
    whether to vectorise a loop by the shares of some kinds among its operations, where duplicates
    count too, so short bodies are left as they are. A long one may be vectorised otherwise.
    """
    from torch._inductor.loop_body import LoopBodyBlock

    recording: Any = LoopBodyBlock.__init__

    @functools.wraps(recording)
    def record(block: LoopBodyBlock, *arguments: Any) -> None:
        recording(block, *arguments)
        if len(block.graph.nodes) > _LONG:
            _remove_duplicates(block.graph)

    with replaced(LoopBodyBlock, "__init__", record):
        yield


def _remove_duplicates(graph: Graph) -> None:
    """Keep the first of the operations of a loop body with the same arguments."""
    known: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if node.target in _STORES:  # a buffer that was loaded may have another value now
            known = {key: value for key, value in known.items() if value.target != "load"}
        elif node.target in _REPEATABLE:
            key = (node.target, _identity(node.args), _identity(tuple(node.kwargs.items())))
            first = known.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _identity(value: Any) -> Hashable:
    """Return a key that equal arguments of an operation share."""
    if isinstance(value, tuple | list):
        return (type(value), *map(_identity, value))
    # equal numbers of different types, and 0.0 and -0.0, are different constants
    return (type(value), value.hex() if isinstance(value, float) else value)


@contextlib.contextmanager
def shapes_of_first_call() -> Iterator[None]:
    """Compute the fake results of a region at its first call, and repeat them at later ones.

    AOT autograd and Inductor otherwise run the region's operators on fake tensors for each call, a
    quarter of the time at 24 layers. Results of a region share no memory with its operands, so new
    tensors of the same shapes and strides stand for them.
    """
    from torch._higher_order_ops.utils import registered_hop_fake_fns

    functions: dict[Any, Any] = registered_hop_fake_fns
    computing = functions[CALL]
    known: dict[Hashable, list[Tensor]] = {}

    def fake_results(body: Any, identifier: str, *operands: Any) -> tuple[Tensor, ...]:
        tensors = [value for value in operands if isinstance(value, Tensor)]
        modes = {getattr(value, "fake_mode", None) for value in tensors}
        key = (identifier, *map(id, modes), describe(operands))
        results = known.get(key)
        if results is None or None in modes:
            results = list(computing(body, identifier, *operands))
            known[key] = results
        return tuple(
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
            for each in results
        )

    functions[CALL] = fake_results
    try:
        yield
    finally:
        functions[CALL] = computing


@contextlib.contextmanager
def results_kept_in_passes() -> Iterator[None]:
    """Keep the fake results of regions whose graphs no pass of Inductor has changed.

    After some of its passes Inductor computes the fake results of changed nodes again. To find the
    changed regions it compares their fake results with those before, and in torch 2.13 finds that
    a tensor differs from itself, so the results of all calls are computed again.
    """
    from torch._inductor import fx_utils

    comparing: Any = getattr(fx_utils, "_is_fake_tensor_same", None)
    if comparing is None:  # torch 2.11 does not look into regions
        yield
        return

    @functools.wraps(comparing)
    def is_same(new: Any, old: Any, *arguments: Any, **options: Any) -> bool:
        return new is old or bool(comparing(new, old, *arguments, **options))

    with replaced(fx_utils, "_is_fake_tensor_same", is_same):
        yield
