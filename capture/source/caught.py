"""Detects errors of the tracer that the model's own code catches.

Tracing raises where eager mode does not, for example at a branch on a tensor's value. A model that
catches such an error takes another path while it is traced than in eager mode, and both paths may
give the same result on the example batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainload.capture.source.causes import (
    BRANCH,
    DATA,
    NO_FAKE_KERNEL,
    NUMBER,
    SPECIALISED,
    VALUES,
    cause_of,
)
from trainload.capture.source.patched import replaced
from trainload.capture.source.source_place import chain, is_users
from trainload.core.errors import RequestError

_OF_TRACING = (BRANCH, NUMBER, VALUES, NO_FAKE_KERNEL, DATA, SPECIALISED)
_CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__")


class Raised:
    """Errors that tracing raised in the model's code and eager mode would not raise."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record an exception that is raised inside the block if eager mode would not raise it."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RequestError) or cause_of(chain(error)) in _OF_TRACING:
                self._errors.append(error)
            raise

    @contextlib.contextmanager
    def by_sizes(self) -> Iterator[None]:
        """Record, inside the block, exceptions of conversions of symbolic numbers."""
        with contextlib.ExitStack() as stack:
            for kind in (torch.SymBool, torch.SymInt, torch.SymFloat):
                for name in _CONVERSIONS:
                    if name in vars(kind):
                        stack.enter_context(replaced(kind, name, self._recording(vars(kind)[name])))
            yield

    def caught(self) -> Exception | None:
        """Return the first recorded error that the user's code or a model library caught, or None.

        The first entry of an exception's traceback is the frame that caught it.
        """
        for error in self._errors:
            if error.__traceback__ is not None and is_users(
                error.__traceback__.tb_frame.f_code.co_filename
            ):
                return error
        return None

    def _recording(self, conversion: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(conversion)
        def convert(number: Any) -> Any:
            try:
                return conversion(number)
            except Exception as error:
                self._errors.append(error)
                raise

        return convert
