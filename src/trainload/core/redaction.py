"""What must not be read by others is taken out of texts: credentials in URLs, and secrets that this process has been given by reference."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, quote_plus

REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")
"""${env:NAME} or ${file:/PATH}: where a secret is. It is none, and is shown as it stands."""
HIDDEN = "***"

_LEAST = 4
"""Characters of a secret that is looked for; a shorter one would be found in every text."""
_PASSWORD = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*:/{1,2}[^/:@?#\s]*):(?!:)(?!\d+(?:[/?#\s]|$))(?P<secret>\S*)@", re.IGNORECASE)
"""USER:PASSWORD@ after a scheme, of whose two slashes a path may have left one. A password may hold slashes; a port is none, and neither
is the :: of fsspec's chains."""
_USER = re.compile(r"(?P<before>https?:/{1,2})(?P<secret>[^/:@?#\s]+)@", re.IGNORECASE)
"""TOKEN@ after http://. Elsewhere what stands there is a user, or a container."""
_FIELD = re.compile(r"(?P<before>[?&;](?P<name>[\w.-]+)=)(?P<secret>[^&;#\s\"']*)")
_WORDS = frozenset({"signature", "sig", "token", "secret", "password", "passwd", "pwd", "credential", "credentials", "auth", "key"})
_AS_ONE = frozenset({"apikey", "accesskey", "secretkey", "accountkey", "sharedkey", "authorization"})
_REFERENCES_AWAY = 0xE000
"""The first of the characters (for private use, in Unicode) that references become while a text is searched."""

_known: dict[str, str] = {}  # of this process: a secret that it was given -> how it was referred to


def is_secret_name(name: str) -> bool:
    """Whether what a variable or a field of a URL is called says that it holds a secret: by its last word, such as the KEY of API_KEY, or
    by PASSWORD or SECRET anywhere, unless it is called a file or a path.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if not words or words[-1] in ("file", "path", "dir"):
        return False
    return words[-1] in _WORDS or words[-1] in _AS_ONE or "password" in words or "secret" in words


def hide(secret: str, reference: str) -> None:
    """From now on this process shows `reference` in the place of `secret`, in whatever form a URL, JSON or Python writes it."""
    if len(secret) >= _LEAST:
        forms = (secret, quote(secret, safe=""), quote(secret), quote_plus(secret), json.dumps(secret)[1:-1], repr(secret)[1:-1])
        _known.update(dict.fromkeys(forms, reference))


def redacted(text: str) -> str:
    """The text without secrets: `HIDDEN` in the place of credentials in URLs, references in the place of what they stood for."""
    for secret, reference in sorted(_known.items(), key=lambda item: -len(item[0])):
        text = text.replace(secret, reference)
    if ":/" not in text:
        return text
    kept: list[str] = []

    def away(match: re.Match[str]) -> str:
        kept.append(match[0])
        return chr(_REFERENCES_AWAY + len(kept) - 1)

    searched = REFERENCE.sub(away, text)
    for pattern, end in ((_PASSWORD, "@"), (_USER, "@"), (_FIELD, "")):
        searched = pattern.sub(lambda match, end=end: _without(match, end), searched)  # type: ignore[misc]  # of its default
    return "".join(kept[ord(c) - _REFERENCES_AWAY] if 0 <= ord(c) - _REFERENCES_AWAY < len(kept) else c for c in searched)


def _without(match: re.Match[str], end: str) -> str:
    """A match without its secret, if it has one: a field must be called like one, and references are none."""
    groups = match.groupdict()
    secret = "".join(c for c in groups["secret"] if ord(c) < _REFERENCES_AWAY)
    if not secret or ("name" in groups and not is_secret_name(groups["name"])):
        return match[0]
    colon = ":" if match.re is _PASSWORD else ""
    return f"{groups['before']}{colon}{HIDDEN}{end}"


def redacted_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """JSON data with all its texts `redacted`."""
    return {name: _redacted_value(value) for name, value in data.items()}


def _redacted_value(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return redacted_data(value)
    return [_redacted_value(each) for each in value] if isinstance(value, list | tuple) else value
