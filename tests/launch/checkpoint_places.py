"""Places of checkpoints for tests: folder, fsspec's memory, S3, and a proxy with failures."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import s3fs
from tests.packaging.places import BUCKET

from trainload.core.storage.remote_files import RemoteFiles
from trainload.launching.checkpoints.checkpoint_place import CheckpointPlace, place_of, whole_place


@dataclass(frozen=True, slots=True)
class Kept:
    """A place of checkpoints, with direct access to its files."""

    url: str

    @property
    def place(self) -> CheckpointPlace:
        return place_of(Path("/nowhere"), whole_place(self.url))

    @property
    def is_folder(self) -> bool:
        return not self.url.startswith(("s3://", "memory://"))

    def files(self) -> dict[str, int]:
        """Return path -> size of all files, including drafts of checkpoints."""
        if self.is_folder:
            root = Path(self.url.removeprefix("file://"))
            return {
                path.relative_to(root).as_posix(): path.stat().st_size
                for path in sorted(root.rglob("*"))
                if path.is_file()
            }
        return {file.path: file.size for file in RemoteFiles(self.url, {}).walk("")}

    def read(self, path: str) -> bytes:
        if self.is_folder:
            return (Path(self.url.removeprefix("file://")) / path).read_bytes()
        found = RemoteFiles(self.url, {}).read(path, 2**30)
        assert found is not None
        return found

    def write(self, path: str, data: bytes) -> None:
        if self.is_folder:
            (Path(self.url.removeprefix("file://")) / path).write_bytes(data)
        else:
            RemoteFiles(self.url, {}).replace(path, data)

    def delete(self, path: str) -> None:
        if self.is_folder:
            (Path(self.url.removeprefix("file://")) / path).unlink()
        else:
            RemoteFiles(self.url, {}).delete(path)


def s3_kept() -> Kept:
    """Return a new, empty place in S3."""
    return Kept(f"s3://{BUCKET}/{secrets.token_hex(8)}/run")


_REASON = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


def _denied(method: bytes) -> bytes:
    body = b"" if method == b"HEAD" else _REASON
    head = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Wire:
    """Proxy between a client and a server that can simulate failures.

    Attributes:
        refuse: close connections at once.
        refused: number of connections that were refused.
        silent: accept requests but never forward them.
        denied: respond to requests with these methods that access is denied.
        seen: request lines that were forwarded.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.removeprefix("http://").partition(":")
        self._server = (host, int(port))
        self._door = socket.create_server(("127.0.0.1", 0))
        self.refuse = False
        self.refused = 0
        self.silent = False
        self.denied: frozenset[bytes] = frozenset()
        self.seen: list[str] = []
        self._open: list[socket.socket] = []
        threading.Thread(target=self._welcome, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._door.getsockname()[1]}"

    def close(self) -> None:
        for each in (self._door, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        """Close the current connections."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _welcome(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                self.refused += 1
                continue
            server = socket.create_connection(self._server)
            self._open += [client, server]
            threading.Thread(target=self._carry, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._carry, args=(server, client, False), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                if self.refuse:
                    break
                if asks and self.silent:
                    continue
                if asks and (method := data.partition(b" ")[0]) in self.denied:
                    source.sendall(_denied(method))
                    break
                if asks:
                    self.seen += [
                        line.decode("latin1")
                        for line in data.split(b"\r\n")
                        if line.endswith(b" HTTP/1.1")
                    ]
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def wire_to(server: str) -> Iterator[Wire]:
    """Run a proxy for a server; within the block, S3 clients of this process use the proxy."""
    wire = Wire(server)
    use(wire.url)
    try:
        yield wire
    finally:
        wire.close()
        use(server)


def use(server: str) -> None:
    """Make this process use an S3 server, and drop fsspec's cached connections."""
    os.environ["AWS_ENDPOINT_URL"] = server
    s3fs.S3FileSystem.clear_instance_cache()
