"""Keeps torch from printing pages beside the one line that a user gets."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
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


def ignore_torchs_warnings() -> None:
    """Within `warnings.catch_warnings()`: what torch says of itself while it traces, and a user can do nothing about."""
    warnings.simplefilter("ignore", FutureWarning)  # torch deprecates names of its own
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")  # cond's tracer looks at it
