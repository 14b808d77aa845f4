"""Webhooks: events as JSON, sent with HTTP POST and signed as standardwebhooks.com specifies.

Receivers verify `webhook-signature`, the HMAC of `webhook-id`, `webhook-timestamp` and the body,
and use `webhook-id`, which is the same whenever an event is delivered, to ignore repetitions.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from trainload.core.credentials import resolve
from trainload.core.errors import StorageError, first_line
from trainload.core.storage.bounded_files import within_limit
from trainload.core.versions import VERSION
from trainload.retraining.config.config import Webhook

_FIRST_PAUSE = 1.0
"""Seconds before the second attempt; each further pause is twice as long."""
_PREFIX = "whsec_"
"""Beginning of a secret in base64, as that specification writes it."""
_URL = re.compile(r"https?://(\[[0-9a-f:.]+\]|[\w.-]+)(:\d{1,5})?([/?][!-~]*)?", re.IGNORECASE)
"""URLs of HTTP without a user, whose password is no reference of its own."""
_TRY_AGAIN = frozenset({408, 425, 429})
"""Statuses below 500 after which the same request may succeed later."""


class _RejectedError(StorageError):
    """The server will not accept the message later either."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects are failures: they would send the message to a server that nobody configured."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


def deliver(hook: Webhook, message_id: str, message: Mapping[str, Any]) -> int:
    """Send a message, and return the number of attempts.

    Args:
        hook: its receiver.
        message_id: the same whenever this message is sent.
        message: JSON data.

    Raises:
        StorageError: a reference cannot be resolved, or the server did not accept the message in
            any attempt.
    """
    body = json.dumps(message, sort_keys=True, separators=(",", ":")).encode()
    url = url_of(hook)
    secret = None if hook.secret is None else resolve(hook.secret)
    seconds = hook.timeout.total_seconds()
    pause = _FIRST_PAUSE
    for attempt in range(1, hook.attempts + 1):
        try:
            within_limit(
                _post,
                url,
                body,
                headers_of(message_id, body, secret, int(time.time())),
                hook.url,
                seconds,
                where=hook.url,
                # sockets have a limit for each read only
                seconds=seconds,
                who="the webhook",
            )
        except _RejectedError:
            raise
        except StorageError:
            if attempt == hook.attempts:
                raise
            time.sleep(pause)
            pause *= 2
        else:
            break
    return attempt


def url_of(hook: Webhook) -> str:
    """Return the URL of a webhook, with its references resolved.

    Raises:
        StorageError: a reference cannot be resolved, or the result is not a URL of HTTP. The
            message does not show it: it may be secret in parts.
    """
    url = resolve(hook.url).strip()
    if _URL.fullmatch(url) is None:
        raise StorageError(
            "this is not the URL of a webhook",
            where=hook.url,
            expected="http:// or https://, a host, and no spaces",
        )
    return url


def headers_of(message_id: str, body: bytes, secret: str | None, timestamp: int) -> dict[str, str]:
    """Return the headers of a message that is sent at a time, in seconds since 1970."""
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"trainload/{VERSION}",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
    }
    if secret is not None:
        signed = f"{message_id}.{timestamp}.".encode() + body
        digest = hmac.digest(_key(secret), signed, hashlib.sha256)
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


def _key(secret: str) -> bytes:
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except ValueError:  # its text has the secret
        key = b""
    if not key:
        raise StorageError(
            "the secret of a webhook is not valid base64",
            where="webhooks, secret",
            expected=f"{_PREFIX} and base64, or any other text",
        )
    return key


def _post(url: str, body: bytes, headers: Mapping[str, str], where: str, seconds: float) -> None:
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        request = urllib.request.Request(url, body, dict(headers), method="POST")
        with opener.open(request, timeout=seconds):
            pass
    except urllib.error.HTTPError as error:
        with error:
            is_final = error.code < 500 and error.code not in _TRY_AGAIN
        kind = _RejectedError if is_final else StorageError
        raise kind(
            "the webhook did not accept a message",
            where=where,
            expected="a status from 200 to 299",
            got=f"status {error.code}",
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        got = first_line(reason) if isinstance(reason, BaseException) else str(reason)
        raise StorageError("the webhook cannot be reached", where=where, got=got) from error
