"""Keeps torch from printing pages of output beside the one error report of the user."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Silence torch's loggers and torch.export's output to stderr.

    The exception has the details.
    """
    loggers = [
        logging.getLogger(n)
        for n in logging.Logger.manager.loggerDict
        if n == "torch" or n.startswith("torch.")
    ]
    before = [(logger, logger.disabled) for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, disabled in before:
            logger.disabled = disabled


def ignore_torchs_warnings() -> None:
    """Ignore warnings of torch about itself that a user cannot act on.

    Call it inside `warnings.catch_warnings()`.
    """
    warnings.simplefilter("ignore", FutureWarning)  # torch uses its own deprecated names
    warnings.simplefilter("ignore", DeprecationWarning)
    # cond's tracer looks at it
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
