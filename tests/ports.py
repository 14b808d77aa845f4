"""Ports for servers that need a port number before they listen."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, LAST = 20_000, 32_000
"""Range of the ports.

It is above the ports of Ray's workers (10002 to 19999), and below Linux's ephemeral ports
(ip_local_port_range begins at 32768).
"""
_counter = itertools.count()


def free_port() -> int:
    """Return an unused port that this process has not returned before.

    A port that the kernel assigns may be taken again before the server that it is meant for has
    started; one in this range is not. Processes of one suite begin at different ports.
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
