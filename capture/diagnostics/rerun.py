"""Runs a model once in eager mode and records what no graph can hold.

That is: numbers taken out of tensors, `.data`, Python state, clocks.

The records explain a rejection, or decide whether strict mode may be used; they reject nothing by
themselves.
"""

from __future__ import annotations

import contextlib
import dis
import io
import itertools
import random
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainload.capture.diagnostics.python_state import take_snapshot
from trainload.capture.job.flat_function import Traced
from trainload.capture.source.causes import (
    ASKS,
    BACKWARD,
    BRANCH,
    DATA,
    GLOBAL,
    INPUT_WRITE,
    MODULE,
    NUMBER,
    PARAMETER_WRITE,
    VALUES,
    Cause,
)
from trainload.capture.source.operator_registration import operator_name
from trainload.capture.source.source_place import is_users, place_here, place_in, place_of_frame
from trainload.core.finding import Place
from trainload.core.garbage import garbage_collection_disabled

_CONVERSIONS = {
    "__bool__": BRANCH,
    "is_nonzero": BRANCH,
    "equal": BRANCH,
    "allclose": BRANCH,
    "__contains__": BRANCH,
    "item": NUMBER,
    "__int__": NUMBER,
    "__float__": NUMBER,
    "__index__": NUMBER,
    "tolist": NUMBER,
    "numpy": VALUES,
    "__array__": VALUES,
    "__format__": VALUES,
    "data_ptr": VALUES,
}
_SOURCES = frozenset(
    {"random", "time", "datetime", "numpy.random.mtrand", "numpy.random._generator"}
)
"""Modules whose builtin functions or objects' methods return another value at every call."""
_COMPILER_QUERIES = frozenset(
    asks.__code__
    for asks in (
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        torch.compiler.is_exporting,
    )
)
_CHANGES = frozenset(
    {"append", "extend", "insert", "pop", "clear", "update", "add", "remove", "setdefault"}
)


@dataclass(frozen=True, slots=True)
class Deed:
    """An operation that a graph cannot hold.

    Attributes:
        cause: its kind.
        place: where it happened.
        detail: what was changed or called.
        sure: True if no capture can be right with it.
    """

    cause: Cause
    place: Place | None
    detail: str = ""
    sure: bool = False


@dataclass(slots=True)
class Watched:
    """Result of the run.

    Attributes:
        deeds: one for each place and cause, in order.
        answers: (place, name of the conversion) -> the numbers that tensors were converted to
            there, in order.
        operators: "library::operator" of the called custom operators -> place of the first call.
        error: exception of the model itself in eager mode.
        input: name of an input, to show how a size is declared.
    """

    deeds: list[Deed] = field(default_factory=list)
    answers: dict[tuple[Place, str], list[Any]] = field(default_factory=lambda: defaultdict(list))
    operators: dict[str, Place | None] = field(default_factory=dict)
    error: Exception | None = None
    input: str = "name"

    def add(self, deed: Deed) -> None:
        """Record a deed, once for each place."""
        if all(
            (d.cause, d.place, d.detail) != (deed.cause, deed.place, deed.detail)
            for d in self.deeds
        ):
            self.deeds.append(deed)


class _Conversions(TorchFunctionMode):
    """Mode that records every conversion of a tensor to a Python value."""

    def __init__(self, watched: Watched, inputs: list[Tensor]) -> None:
        super().__init__()
        self._watched = watched
        self._inputs = inputs

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        parameter = args[0] if args and isinstance(args[0], nn.Parameter) else None
        version = parameter._version if parameter is not None else 0
        versions = [tensor._version for tensor in self._inputs]
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if parameter is not None and parameter._version != version:
            self._watched.add(Deed(PARAMETER_WRITE, place_here(), name))
        if [tensor._version for tensor in self._inputs] != versions:
            self._watched.add(Deed(INPUT_WRITE, place_here(), name))
        if (
            name in ("__get__", "__set__")
            and getattr(getattr(func, "__self__", None), "__name__", "") == "data"
        ):
            self._watched.add(Deed(DATA, place_here(), ".data"))
        elif name in _CONVERSIONS:
            place = place_here()
            self._watched.add(Deed(_CONVERSIONS[name], place, name))
            if place is not None:
                self._watched.answers[place, name].append(result)
        elif type(func).__name__ in ("OpOverload", "OpOverloadPacket", "CustomOpDef"):
            self._watched.operators.setdefault(operator_name(str(func)), place_here())
        elif name == "register_hook":
            self._watched.add(Deed(BACKWARD, place_here(), "a hook on a tensor"))
        return result


class Answers(TorchFunctionMode):
    """Mode in which chosen conversions return eager mode's numbers.

    A capture passes them, so that the next obstacle shows.
    """

    def __init__(self, watched: Watched, places: set[Place]) -> None:
        super().__init__()
        self._answers = {
            key: iter(list(values)) for key, values in watched.answers.items() if key[0] in places
        }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _CONVERSIONS and _CONVERSIONS[name] is not VALUES:
            place = place_here()
            if place is not None and (place, name) in self._answers:
                with contextlib.suppress(StopIteration):
                    return next(self._answers[place, name])
        return func(*args, **(kwargs or {}))


class _Calls:
    """Profile function that records the user's functions and some of their calls.

    The calls are those of clocks, random generators, and containers that outlive the call.
    """

    def __init__(self, watched: Watched, attribute_names: dict[int, str]) -> None:
        self._watched = watched
        self._attribute_names = attribute_names
        self.codes: dict[CodeType, dict[str, Any]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and is_users(code.co_filename):
            self.codes[code] = frame.f_globals
        elif event == "call" and code is torch.manual_seed.__code__ and _by_user(frame):
            self._watched.add(Deed(GLOBAL, place_of_frame(frame), "torch.manual_seed"))
        elif event == "call" and code in _COMPILER_QUERIES and _by_user(frame):
            self._watched.add(Deed(ASKS, place_of_frame(frame), code.co_name))
        elif event == "c_call":
            while code.co_filename == random.__file__ and frame.f_back is not None:
                frame = frame.f_back
                code = frame.f_code
            if is_users(code.co_filename):
                self._record_builtin(frame, argument)

    def _record_builtin(self, frame: FrameType, called: Any) -> None:
        owner = getattr(called, "__self__", None)
        name = getattr(called, "__name__", "")
        place = place_in(frame.f_code, frame.f_lasti)
        modules = {
            str(m)
            for m in (
                getattr(called, "__module__", ""),
                type(owner).__module__,
                getattr(owner, "__module__", ""),
            )
        }
        if modules & _SOURCES:
            self._watched.add(Deed(GLOBAL, place, f"{min(modules & _SOURCES)}.{name}"))
        elif name in _CHANGES and isinstance(owner, list | dict | set):
            if id(owner) in self._attribute_names:
                self._watched.add(Deed(MODULE, place, self._attribute_names[id(owner)]))
            else:
                global_name = next(
                    (n for n, value in frame.f_globals.items() if value is owner), None
                )
                if global_name is not None:
                    self._watched.add(Deed(GLOBAL, place, global_name))


def _by_user(frame: FrameType) -> bool:
    """Return True if the caller is the user's code.

    torch's own checkpoint sets the seed, to draw the same numbers again.
    """
    return frame.f_back is not None and is_users(frame.f_back.f_code.co_filename)


def watch(function: Traced, batch: dict[str, Tensor]) -> Watched:
    """Run `function`, whose `model` is the user's, twice on copies of the batch.

    Its printed output is discarded.

    Returns:
        What no graph can hold, and the exception if there was one: the model's own code may raise
        anything.
    """
    model = function.get_submodule("model")
    watched = Watched(input=next(iter(batch)))
    copied = {name: value.clone() for name, value in batch.items()}
    attribute_names = {
        id(value): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, list | dict | set) and not name.startswith("_")
    }
    calls = _Calls(watched, attribute_names)
    profile = sys.getprofile()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            with _Conversions(watched, list(copied.values())), garbage_collection_disabled():
                sys.setprofile(calls)
                try:
                    function(copied)
                finally:
                    sys.setprofile(profile)
            before = take_snapshot(function)
            function({name: value.clone() for name, value in batch.items()})
        except Exception as error:  # noqa: BLE001  # returned in the result
            watched.error = error
            return watched
    after = take_snapshot(function)
    moving = sorted(before.changed_in(after))
    for holder in moving:
        if holder in after.attributes:
            watched.add(
                Deed(
                    MODULE,
                    _first_place(calls.codes, "STORE_ATTR", holder.name.rpartition(".")[2]),
                    holder.name,
                    sure=True,
                )
            )
    for code, names in calls.codes.items():
        for name, place in _places_of(code, "STORE_GLOBAL"):
            watched.add(Deed(GLOBAL, place, name))
        for place in _numpy_draws(code, names):
            watched.add(Deed(GLOBAL, place, "numpy.random"))
    for holder in moving:
        variable = re.split(r"[.\[]", holder.name)[0]
        if holder not in after.attributes and all(
            deed.detail != variable for deed in watched.deeds
        ):
            places = (
                _first_place(calls.codes, operation, variable)
                for operation in ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_FAST")
            )
            watched.add(Deed(GLOBAL, next(filter(None, places), None), holder.name, sure=True))
    return watched


def _places_of(code: CodeType, operation: str) -> Iterator[tuple[str, Place]]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == operation:
            yield str(instruction.argval), place_in(code, instruction.offset)


def _numpy_draws(code: CodeType, names: dict[str, Any]) -> Iterator[Place]:
    """Yield uses of numpy.random, whose functions are not builtins to the profiler."""
    for first, second in itertools.pairwise(dis.get_instructions(code)):
        if (
            first.opname == "LOAD_GLOBAL"
            and names.get(first.argval) is numpy
            and second.argval == "random"
        ):
            yield place_in(code, second.offset)


def _first_place(codes: Iterable[CodeType], operation: str, name: str) -> Place | None:
    return next(
        (
            place
            for code in codes
            for written, place in _places_of(code, operation)
            if written == name
        ),
        None,
    )
