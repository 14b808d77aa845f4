"""Make Inductor compile a graph in less time, to the same code.

Tested with torch 2.13.0. Private names used: `torch._inductor.codecache`,
`torch._inductor.codegen.wrapper`, `torch._inductor.dtype_propagation`,
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
from torch.fx import Proxy

from trainload.autograd_trace.outlining.equality import CALL
from trainload.autograd_trace.outlining.signatures import describe

_COMPILER_NICENESS = 5
"""Inductor defines the next kernels while the first ones are compiled, and should not wait."""
_KERNEL = "async_compile.cpp_pybinding("
"""Beginning of the definition of a kernel for a CPU, whose arguments are literals."""


@contextlib.contextmanager
def kernels_started_early() -> Iterator[None]:
    """Start the C++ compiler for each CPU kernel when Inductor defines it.

    Otherwise Inductor starts it for all kernels at once when the whole graph's code is written. The
    end of the context waits for the compiler.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    defining = PythonWrapperCodegen.define_kernel

    with ThreadPoolExecutor(
        len(os.sched_getaffinity(0)), thread_name_prefix="kernels", initializer=_lower_priority
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

        with _replaced(PythonWrapperCodegen, define_kernel=define_kernel):
            try:
                yield
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _lower_priority() -> None:
    """Lower the priority of this thread and of the processes that it starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _COMPILER_NICENESS)


@contextlib.contextmanager
def dtype_rules_made_once() -> Iterator[None]:
    """Make Inductor's table of result dtypes once.

    Its class returns one instance from every call, and makes the whole table again for each of a
    kernel's operations, an eighth of the time that Inductor takes.
    """
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Rules

    Rules()

    def keep(_: Rules) -> None:
        """Keep the table."""

    with _replaced(Rules, __init__=keep):
        yield


@contextlib.contextmanager
def operations_recorded_once() -> Iterator[None]:
    """Record each operation of a loop's body once.

    A value with several users is computed again for each of them until Inductor has decided to
    store it, so a chain of `x ^ (x >> 16)` doubles with each link, in the body and in all that
    Inductor does with it. The generated code has each operation once in any case.
    """
    from torch._inductor.loop_body import CaptureIndexing

    recording: Any = CaptureIndexing._default
    loading: Any = CaptureIndexing.load
    storing: Any = CaptureIndexing.store

    def known(capture: CaptureIndexing) -> dict[Hashable, Any]:
        """Return the values of the body: operation and arguments -> proxy."""
        values: dict[Hashable, Any] = capture.__dict__.setdefault("trainload_values", {})
        return values

    @functools.wraps(recording)
    def record(
        capture: CaptureIndexing, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            key = (
                name,
                tuple(map(_identity, args)),
                tuple((k, _identity(v)) for k, v in kwargs.items()),
            )
            value = known(capture).get(key)
        except TypeError:
            return recording(capture, name, args, kwargs)
        if value is None:
            value = recording(capture, name, args, kwargs)
            known(capture)[key] = value
        return value

    @functools.wraps(loading)
    def load(capture: CaptureIndexing, name: str, index: Any) -> Any:
        key = ("load", name, index)
        value = known(capture).get(key)
        if value is None:
            value = known(capture)[key] = loading(capture, name, index)
        return value

    @functools.wraps(storing)
    def store(capture: CaptureIndexing, *args: Any, **kwargs: Any) -> Any:
        known(capture).clear()  # it may write to a buffer that was loaded
        return storing(capture, *args, **kwargs)

    with _replaced(CaptureIndexing, _default=record, load=load, store=store):
        yield


def _identity(value: Any) -> Hashable:
    """Return a key that equal arguments of an operation share."""
    if isinstance(value, Proxy):
        return value.node  # which lives as long as the body
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
def _replaced(owner: Any, **functions: Any) -> Iterator[None]:
    """Replace functions of a class within the context."""
    before = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)
