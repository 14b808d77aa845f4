"""Redaction of credentials in URLs, and of secrets that this process has resolved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, quote_plus

REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")
"""${env:NAME} or ${file:/PATH}: a reference to a secret.

It is not secret itself, and is shown as it is.
"""
HIDDEN = "***"

_LEAST = 4
"""Minimum length of a secret that is redacted; a shorter one would occur in every text."""
_PASSWORD = re.compile(
    r"(?P<before>[a-z][a-z0-9+.-]*:/{1,2}[^/:@?#\s]*):(?!:)(?!\d+(?:[/?#\s]|$))(?P<secret>\S*)@",
    re.IGNORECASE,
)
"""USER:PASSWORD@ after a scheme, of whose two slashes pathlib may have removed one.

A password may contain slashes. A port is not a password, nor is the :: of fsspec's chained URLs.
"""
_USER = re.compile(r"(?P<before>https?:/{1,2})(?P<secret>[^/:@?#\s]+)@", re.IGNORECASE)
"""TOKEN@ after http(s)://. In other schemes this part is a user or a container."""
_FIELD = re.compile(r"(?P<before>[?&;](?P<name>[\w.-]+)=)(?P<secret>[^&;#\s\"']*)")
_WORDS = frozenset(
    {
        "signature",
        "sig",
        "token",
        "secret",
        "password",
        "passwd",
        "pwd",
        "credential",
        "credentials",
        "auth",
        "key",
    }
)
_JOINED_WORDS = frozenset(
    {"apikey", "accesskey", "secretkey", "accountkey", "sharedkey", "authorization"}
)
_FIRST_PLACEHOLDER = 0xE000
"""First of the private-use characters that replace references while a text is searched."""

_known: dict[str, str] = {}  # secret that this process has resolved -> its reference


def is_secret_name(name: str) -> bool:
    """Return True if the name of a variable or URL field suggests a secret.

    Its last word decides, such as the KEY of API_KEY, or PASSWORD or SECRET anywhere, unless it
    names a file or a path.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if not words or words[-1] in ("file", "path", "dir"):
        return False
    return (
        words[-1] in _WORDS
        or words[-1] in _JOINED_WORDS
        or "password" in words
        or "secret" in words
    )


def hide(secret: str, reference: str) -> None:
    """Make this process show `reference` instead of `secret` from now on, in every form in which a
    URL, JSON or Python writes it.
    """
    if len(secret) >= _LEAST:
        forms = (
            secret,
            quote(secret, safe=""),
            quote(secret),
            quote_plus(secret),
            json.dumps(secret)[1:-1],
            repr(secret)[1:-1],
        )
        _known.update(dict.fromkeys(forms, reference))


def redacted(text: str) -> str:
    """Return the text without secrets: credentials in URLs become `HIDDEN`, and resolved secrets
    their references.
    """
    for secret, reference in sorted(_known.items(), key=lambda item: -len(item[0])):
        text = text.replace(secret, reference)
    if ":/" not in text:
        return text
    references: list[str] = []

    def protect(match: re.Match[str]) -> str:
        references.append(match[0])
        return chr(_FIRST_PLACEHOLDER + len(references) - 1)

    searched = REFERENCE.sub(protect, text)
    for pattern, end in ((_PASSWORD, "@"), (_USER, "@"), (_FIELD, "")):
        searched = pattern.sub(lambda match, end=end: _hide_secret(match, end), searched)  # type: ignore[misc]  # because of the default
    return "".join(
        references[ord(c) - _FIRST_PLACEHOLDER]
        if 0 <= ord(c) - _FIRST_PLACEHOLDER < len(references)
        else c
        for c in searched
    )


def _hide_secret(match: re.Match[str], end: str) -> str:
    """Return a match without its secret, if it has one.

    A field's name must suggest a secret; references are not secrets.
    """
    groups = match.groupdict()
    secret = "".join(c for c in groups["secret"] if ord(c) < _FIRST_PLACEHOLDER)
    if not secret or ("name" in groups and not is_secret_name(groups["name"])):
        return match[0]
    colon = ":" if match.re is _PASSWORD else ""
    return f"{groups['before']}{colon}{HIDDEN}{end}"


def redacted_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON data with all its strings `redacted`."""
    return {name: _redacted_value(value) for name, value in data.items()}


def _redacted_value(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return redacted_data(value)
    return [_redacted_value(each) for each in value] if isinstance(value, list | tuple) else value
