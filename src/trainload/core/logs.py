"""Log messages about failures that the library tolerates.

Modules log through `logging.getLogger(__name__)`, so "trainload" is the parent of their loggers:

    logging.getLogger("trainload").setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from trainload.core.redaction import redacted


@contextmanager
def logs_on_stderr(level: int) -> Iterator[None]:
    """Write the log of trainload to standard error within the block, from a level on."""
    logger = logging.getLogger("trainload")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("trainload: %(levelname)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def log_handled(
    logger: logging.Logger, message: str, error: BaseException, *, level: int = logging.WARNING
) -> None:
    """Log an error that the caller has handled, without credentials.

    Args:
        logger: the logger of the module.
        message: says what failed and what follows from it; the error is appended.
        error: the error.
        level: level of the log record.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    logger.log(level, "%s: %s", redacted(message), redacted(text))


def logged_suppress(
    logger: logging.Logger,
    message: str,
    *errors: type[BaseException],
    level: int = logging.WARNING,
) -> AbstractContextManager[None, bool]:
    """Return a context manager like contextlib.suppress that logs the error that it suppresses.

    Arguments are those of `log_handled`; `errors` are the types that are suppressed.
    """
    return _LoggedSuppress(logger, message, errors, level)


class _LoggedSuppress(AbstractContextManager[None, bool]):
    def __init__(
        self,
        logger: logging.Logger,
        message: str,
        errors: tuple[type[BaseException], ...],
        level: int,
    ) -> None:
        self._logger = logger
        self._message = message
        self._errors = errors
        self._level = level

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, self._errors):
            return False
        log_handled(self._logger, self._message, error, level=self._level)
        return True
