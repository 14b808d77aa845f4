"""Socket of a node's fork server, which only its user can reach, and only with the same code."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import trainload

_IMPORTED_WITH = ("CUDA_HOME", "GLOO", "KMP_", "LD_", "MKL_", "NCCL_", "OMP_", "PYTHON", "TORCH")
"""Beginnings of the names of variables that imported code may have read."""
_PASSED_ON = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Variables that the server does not take from the environment of its first client."""
_LIMITS = (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
_KEY_DIGITS = 16
_CREDENTIALS = struct.Struct("3i")


def socket_path() -> Path:
    """Return the path of the socket of a server that has imported what this process would.

    It is in XDG_RUNTIME_DIR, or in a folder of this user among the temporary files.

    Raises:
        PermissionError: the folder belongs to another user, or others may write there.
        OSError: it cannot be created.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # it is removed at the end of the session in which `ray start` was called
    is_ours = os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid()
    folder = (
        Path(runtime, "trainload")
        if is_ours
        else Path(tempfile.gettempdir(), f"trainload-{os.getuid()}")
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that this user alone can use")
    return folder / f"forks-{_key()}.socket"


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Give a short path of a socket within the context, since addresses have at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def check_peer(connection: socket.socket) -> None:
    """Check that the other side of a connection is a process of this user.

    Raises:
        PermissionError: it is not.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    if user != os.getuid():
        connection.close()
        raise PermissionError(f"the other side of the fork server's socket is user {user}")


def _key() -> str:
    """Return a digest of what the imports of this process depend on."""
    facts = {
        "python": sys.executable,
        "path": sys.path,
        "torch": version("torch"),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_IMPORTED_WITH) and name not in _PASSED_ON
        },
        # ranks have these from their server
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")],
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "limits": [resource.getrlimit(each) for each in _LIMITS],
        "code": sorted(_code()),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:_KEY_DIGITS]


def _code() -> Iterator[tuple[str, int, int]]:
    """Return path, size and time of change of each of trainload's modules."""
    for folder, _, names in os.walk(Path(trainload.__file__).parent, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                status = os.stat(os.path.join(folder, name))
                yield os.path.join(folder, name), status.st_size, status.st_mtime_ns
