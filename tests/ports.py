"""Ports for servers that must be told theirs before they listen."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, LAST = 20_000, 32_000
"""Above those that Ray's workers take (10002 to 19999), and below those that Linux gives to whoever
connects without asking for one (ip_local_port_range begins at 32768).
"""
_counter = itertools.count()


def free_port() -> int:
    """Return a port that nobody listens on, and that this process has not returned before.

    A port that the kernel hands out may be taken again before the server that was promised it has
    begun; one in this range is not. Processes of one suite begin at different places.
    """
    for number in _counter:
        port = FIRST + (os.getpid() * 61 + number) % (LAST - FIRST)
        with socket.socket() as attempt:
            try:
                attempt.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("counters do not end")
