"""Secrets by reference: ${env:NAME} and ${file:/PATH} in URLs and storage options.

URLs are recorded and printed with their references. `resolve` is called only by the process that
opens the storage, on its node.
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
_REFERENCE_LIKE = re.compile(r"\$\{[^}]*\}?")


def check_no_credentials(url: str, where: str = "") -> None:
    """Check that a URL contains no secret, since it is written to files and displayed.

    Raises:
        StorageError: it does; the message does not show the secret.
    """
    redacted_url = redacted(url)
    if HIDDEN in redacted_url and HIDDEN not in url:
        raise StorageError(
            "the URL contains credentials, which would be written to files",
            where=where or redacted_url,
            got=redacted_url if where else "",
            hint=(
                "Set them in the environment of every node, or refer to them as ${env:NAME} or"
                " ${file:/PATH}."
            ),
        )


def resolve(text: str) -> str:
    """Replace references in a URL or option by their values on this node.

    From now on this process redacts these values.

    Args:
        text: may contain ${env:NAME}, an environment variable, and ${file:/PATH}, a file's text
            without the final line break.

    Raises:
        StorageError: there is no such variable or file here, or `text` contains a secret itself or
            another kind of reference.
    """
    check_no_credentials(text)
    for match in _REFERENCE_LIKE.finditer(text):
        if not REFERENCE.fullmatch(match[0]):
            raise StorageError(
                "this is not a reference to a secret",
                where=text,
                expected="${env:NAME} or ${file:/PATH}",
                got=match[0],
            )
    return REFERENCE.sub(lambda match: _value(match, text), text)


def resolve_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options with all strings resolved, nested ones included.

    Raises StorageError as `resolve`.
    """
    resolved: dict[str, Any] = {}
    for name, value in options.items():
        resolved[name] = (
            resolve(value)
            if isinstance(value, str)
            else resolve_options(value)
            if isinstance(value, Mapping)
            else value
        )
    return resolved


def without_secrets(error: BaseException) -> BaseException:
    """Return an error without secrets: the error itself, if neither it nor its causes contain
    any.
    """
    report = "".join(traceback.format_exception(error))
    if redacted(report) == report:
        return error
    if isinstance(error, TrainloadError):  # its own text is redacted, its causes are not
        error.__cause__ = error.__context__ = None
        return error
    return TrainingError(f"{type(error).__name__}: {redacted(str(error))}")


@contextmanager
def no_secrets_raised() -> Iterator[None]:
    """Convert exceptions of the block by `without_secrets`."""
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
        value = _read_secret_file(name, match[0], text)
    hide(value, match[0])
    return value


def _read_secret_file(name: str, reference: str, text: str) -> str:
    path = Path(name)
    try:
        if not path.is_absolute():
            raise OSError("the path does not begin with /")
        with path.open("rb") as file:
            value = file.read(_MOST_BYTES).decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        reason = (
            "it is not text"
            if isinstance(error, UnicodeDecodeError)
            else error.strerror or str(error)
        )
        raise StorageError(
            f"{reference} names a file that cannot be read here: {reason}",
            where=text,
            hint="Make it readable to the processes that open the storage, on every node.",
        ) from None
    if not value:
        raise StorageError(f"{reference} names a file that is empty", where=text)
    return value
