"""Keeps torch from printing pages beside the one line that a user gets."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Silences torch's loggers and what torch.export prints to stderr; what went wrong is in the exception that is raised."""
    loggers = [logging.getLogger(n) for n in logging.Logger.manager.loggerDict if n == "torch" or n.startswith("torch.")]
    before = [(found, found.disabled) for found in loggers]
    try:
        for found in loggers:
            found.disabled = True
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for found, disabled in before:
            found.disabled = disabled
