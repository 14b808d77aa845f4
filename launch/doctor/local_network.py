"""Checks of a machine's own network: proxies, and the name by which process groups find its
address.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from trainload.core.errors import first_line
from trainload.core.redaction import redacted
from trainload.launching.doctor.check_results import CheckResult

_SECONDS = 5.0
_INTERFACE = "GLOO_SOCKET_IFNAME"


def examine_proxies() -> CheckResult:
    """Request a page of this process's own server on the loopback interface, through the proxies of
    the environment.
    """
    proxies = {
        name: value
        for name, value in urllib.request.getproxies().items()
        if name in ("http", "https", "grpc", "all")
    }
    said = redacted(", ".join(f"{name}_proxy={value}" for name, value in proxies.items()))
    token = secrets.token_hex(16)
    try:
        with (
            _served(token) as url,
            # not urlopen, whose proxies are those of its first call
            urllib.request.build_opener().open(url, timeout=_SECONDS) as answer,
        ):
            own = answer.read(len(token)).decode() == token
            problem = "" if own else "another server answers requests to 127.0.0.1"
    except OSError as error:
        problem = f"requests to 127.0.0.1 fail: {redacted(first_line(error))}"
    if not problem:
        return CheckResult("proxies", "ok", said or "none")
    return CheckResult(
        "proxies",
        "fails",
        f"{problem}; {said or 'no proxy'}",
        "that requests to this machine are not sent to a proxy",
        "Set no_proxy=localhost,127.0.0.1,::1 and the addresses of the nodes.",
    )


@contextmanager
def _served(text: str) -> Iterator[str]:
    """Serve a text on a free port of the loopback interface. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def examine_host_name(*, has_peers: bool) -> CheckResult:
    """Resolve the host name, whose address gloo gives to the other nodes, unless
    GLOO_SOCKET_IFNAME names an interface.

    Args:
        has_peers: True if other machines connect to this one.
    """
    interface, name = os.environ.get(_INTERFACE), socket.gethostname()
    if interface:
        return _examine_interfaces(interface)
    try:
        addresses = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})
        problem = ""
    except OSError as error:
        addresses, problem = [], f"{name} cannot be resolved: {error.strerror}"
    if all(_is_loopback(address) for address in addresses):
        problem = problem or f"{name} resolves to {', '.join(addresses)}"
    if not problem or not has_peers:
        return CheckResult("host name", "ok", problem or f"{name}, {', '.join(addresses)}")
    return CheckResult(
        "host name",
        "fails",
        problem,
        "an address that other nodes can reach",
        f"Set {_INTERFACE} to the network interface of the nodes, or correct /etc/hosts.",
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _examine_interfaces(names: str) -> CheckResult:
    present = {name for _, name in socket.if_nameindex()}
    missing = [name for name in names.split(",") if name not in present]
    if not missing:
        return CheckResult("host name", "ok", f"{_INTERFACE}={names}")
    return CheckResult(
        "host name",
        "fails",
        f"{_INTERFACE}={names}, and there is no {', '.join(missing)}",
        f"one of {', '.join(sorted(present))}",
        f"Correct {_INTERFACE}, or unset it.",
    )
