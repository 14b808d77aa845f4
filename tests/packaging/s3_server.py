"""moto's S3 server on loopback, which a test runs.

It prints its port, and ends when its standard input is closed. It handles one request at a time,
since moto looks for an object and then writes it: with threads its conditional writes would not be
atomic.
"""

from __future__ import annotations

import logging
import os
import sys
import threading


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server(
        "127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False
    )
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
