"""A webhook's server on loopback, which answers as a test says."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hook:
    """A request that was received.

    Attributes:
        url: URL of the server.
        requests: headers and body of each request.
        answer: called with the number of the request (0-based); returns the status.
    """

    def __init__(self, url: str, answer: Callable[[int], int]) -> None:
        self.url, self.answer = url, answer
        self.requests: list[tuple[dict[str, str], bytes]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]

    @property
    def types(self) -> list[str]:
        return [message["type"] for message in self.messages]

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.requests]


@contextmanager
def hook_server(
    answer: Callable[[int], int] = lambda number: 204, body: bytes = b""
) -> Iterator[Hook]:
    """Run a server within the context, which responds to every request with this body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"] or 0))
            hook.requests.append(({name.lower(): v for name, v in self.headers.items()}, data))
            status = hook.answer(len(hook.requests) - 1)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", f"{hook.url}/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hook = Hook(f"http://127.0.0.1:{server.server_port}", answer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hook
        finally:
            server.shutdown()
            thread.join()


def is_signed(headers: dict[str, str], body: bytes, secret: bytes) -> bool:
    """Return True if a request has the signature that standardwebhooks.com specifies."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
    return headers["webhook-signature"] == f"v1,{digest}"
