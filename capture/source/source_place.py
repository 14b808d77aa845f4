"""Finds the user's lines and columns from tracebacks, live frames and bytecode."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

import numpy
import torch
from torch.fx import Node

from trainload.core.finding import Place

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LIBRARIES = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(numpy.__file__).parent) + os.sep,
    str(Path(__file__).parents[2]) + os.sep,  # trainload, as it was imported
)


@functools.cache
def is_users(file: str) -> bool:
    """Return True if a source file is the user's or a model library's.

    Python, torch, numpy, triton and trainload are neither.
    """
    if file.startswith(("<", *_LIBRARIES)) or os.path.join("site-packages", "triton", "") in file:
        return False
    return "site-packages" in Path(file).parts or not file.startswith(_STANDARD_LIBRARY)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, the last one first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def place_of_error(error: BaseException) -> Place | None:
    """Return the innermost expression of the user's code in an exception's traceback.

    Exceptions that led to it are searched too.
    """
    for exception in chain(error):
        place = None
        trace = exception.__traceback__
        while trace is not None:
            if is_users(trace.tb_frame.f_code.co_filename):
                place = place_in(trace.tb_frame.f_code, trace.tb_lasti)
            trace = trace.tb_next
        if place is not None:
            return place
    return None


def place_of_frame(frame: FrameType | None) -> Place | None:
    """Return the innermost expression of the user's code being evaluated in `frame` or outwards."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return place_in(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None


def place_here() -> Place | None:
    """Return the innermost expression of the user's code under evaluation in the caller."""
    return place_of_frame(inspect.currentframe())


def place_of_node(node: Node | None) -> str:
    """Return the user's file and line of a graph's node, as recorded by torch.

    The node's name if there is none.
    """
    trace = str(node.meta.get("stack_trace") or "") if node is not None else ""
    frames = [
        line.strip()
        for line in trace.splitlines()
        if line.strip().startswith("File ") and '"<' not in line
    ]
    return frames[-1] if frames else f"node {node}"


def place_of_function(function: object) -> Place | None:
    """Return the first line of a function; None if it has no source."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return (
        Place(
            _relative_path(code.co_filename),
            code.co_firstlineno,
            code.co_name,
            linecache.getline(code.co_filename, code.co_firstlineno).strip(),
        )
        if isinstance(code, CodeType)
        else None
    )


def place_in(code: CodeType, instruction: int) -> Place:
    """Return the expression of the instruction at this offset of the bytecode."""
    line, last, column, end = next(
        islice(code.co_positions(), instruction // 2, None), (None, None, None, None)
    )
    if line is None:
        return Place(code.co_filename, code.co_firstlineno, code.co_name)
    return place_at(code.co_filename, code.co_name, (line, column or 0, last or line, end or 0))


def place_at(file: str, function: str, span: tuple[int, int, int, int]) -> Place:
    """Return the expression at a position.

    span: line, column, last line, last column; columns count UTF-8 bytes, as Python does.
    """
    linecache.checkcache(file)
    line, column, last, end = span
    text = linecache.getline(file, line).rstrip("\n")
    start = len(text.encode()[:column].decode(errors="ignore"))
    stop = len(text.encode()[:end].decode(errors="ignore")) if last == line else len(text)
    source = text.strip()
    indent = len(text) - len(text.lstrip())
    return Place(
        _relative_path(file),
        line,
        function,
        source,
        max(0, start - indent),
        max(0, min(stop - indent, len(source))),
        span,
    )


def _relative_path(file: str) -> str:
    """Return the path relative to the working directory if it is inside of it."""
    folder = os.getcwd() + os.sep
    return file.removeprefix(folder)
