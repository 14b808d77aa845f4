"""Errors of the tracer that a model's own code catches.

Where a branch on a value or a refusal of ours is raised, eager mode raises nothing: a model that catches it goes, while it is traced,
another way than in eager mode, and on the example batch the two ways may give the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainload.capture.causes import BRANCH, DATA, NO_FAKE_KERNEL, NUMBER, SPECIALISED, VALUES, cause_of
from trainload.capture.errors import RequestError
from trainload.capture.patched import replaced
from trainload.capture.place import chain, is_users

_OF_TRACING = (BRANCH, NUMBER, VALUES, NO_FAKE_KERNEL, DATA, SPECIALISED)
_CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__")


class Raised:
    """What the tracer raised in the model's code."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is raised inside if eager mode would not raise it."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RequestError) or cause_of(chain(error)) in _OF_TRACING:
                self._errors.append(error)
            raise

    @contextlib.contextmanager
    def by_sizes(self) -> Iterator[None]:
        """Note, inside, what is raised where a symbolic number becomes one of Python's."""
        with contextlib.ExitStack() as stack:
            for kind in (torch.SymBool, torch.SymInt, torch.SymFloat):
                for name in _CONVERSIONS:
                    if name in vars(kind):
                        stack.enter_context(replaced(kind, name, self._noting(vars(kind)[name])))
            yield

    def caught(self) -> Exception | None:
        """Return the first one that the user's code, or a library of models, has caught.

        An exception's traceback begins with the frame that caught it.
        """
        for error in self._errors:
            if error.__traceback__ is not None and is_users(error.__traceback__.tb_frame.f_code.co_filename):
                return error
        return None

    def _noting(self, conversion: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(conversion)
        def convert(number: Any) -> Any:
            try:
                return conversion(number)
            except Exception as error:
                self._errors.append(error)
                raise

        return convert
