"""Secrets by reference: ${env:NAME} and ${file:/PATH} in URLs and storage options stand for what only who opens the storage must know.

What records or prints a URL has it as it was given. `resolve` is called by the process that opens the storage, on the node that it is on.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainload.core.errors import StorageError, TrainingError, TrainloadError
from trainload.core.redaction import HIDDEN, REFERENCE, hide, redacted

_MOST_BYTES = 65536
_ANY = re.compile(r"\$\{[^}]*\}?")


def check_no_credentials(url: str, where: str = "") -> None:
    """Check that a URL contains no secret, since it is written to files and displayed.

    Raises: StorageError, which does not show it.
    """
    shown = redacted(url)
    if HIDDEN in shown and HIDDEN not in url:
        raise StorageError(
            "a URL with credentials in it would be written into files",
            where=where or shown,
            got=shown if where else "",
            hint="Leave them to the environment of every node, or refer to them: ${env:NAME} or ${file:/PATH}.",
        )


def resolve(text: str) -> str:
    """A URL or option with the values that its references stand for, on this node. From now on this process does not show them.

    Args:
        text: with ${env:NAME}, an environment variable, or ${file:/PATH}, a file's text without the end of its last line.

    Raises:
        StorageError: there is no such variable or file here; `text` holds a secret itself, or a reference of another kind.
    """
    check_no_credentials(text)
    for match in _ANY.finditer(text):
        if not REFERENCE.fullmatch(match[0]):
            raise StorageError("this is no reference to a secret", where=text, expected="${env:NAME} or ${file:/PATH}", got=match[0])
    return REFERENCE.sub(lambda match: _value(match, text), text)


def resolve_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a storage, those inside options too, with all their texts resolved. Raises: StorageError as `resolve`."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found[name] = resolve(value) if isinstance(value, str) else resolve_options(value) if isinstance(value, Mapping) else value
    return found


def without_secrets(error: BaseException) -> BaseException:
    """An error that may be raised, printed and sent: itself, where neither it nor what it came of holds a secret."""
    told = "".join(traceback.format_exception(error))
    if redacted(told) == told:
        return error
    if isinstance(error, TrainloadError):  # what it says itself is redacted
        error.__cause__ = error.__context__ = None
        return error
    return TrainingError(f"{type(error).__name__}: {redacted(str(error))}")


@contextmanager
def no_secrets_raised() -> Iterator[None]:
    """What is raised within it is raised as `without_secrets` has it."""
    try:
        yield
    except Exception as error:
        clean = without_secrets(error)
        if clean is error:
            raise
        raise clean from None


def _value(match: re.Match[str], text: str) -> str:
    kind, name = match[1], match[2]
    if kind == "env":
        value = os.environ.get(name)
        if not value:
            raise StorageError(
                f"{match[0]} names an environment variable that is not set here",
                where=text,
                hint=f"Set {name} for the processes that open the storage, on every node.",
            )
    else:
        value = _text_of(name, match[0], text)
    hide(value, match[0])
    return value


def _text_of(name: str, reference: str, text: str) -> str:
    path = Path(name)
    try:
        if not path.is_absolute():
            raise OSError("the path does not begin with /")
        with path.open("rb") as file:
            value = file.read(_MOST_BYTES).decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is no text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise StorageError(
            f"{reference} names a file that cannot be read here: {reason}",
            where=text,
            hint="Put it there for the processes that open the storage, on every node.",
        ) from None
    if not value:
        raise StorageError(f"{reference} names a file that is empty", where=text)
    return value
