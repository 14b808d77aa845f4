"""What a worker prints, from Python or from native code, on its way to the driver as well as to where it went before."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from trainload.core.redaction import redacted

_LOOK_SECONDS = 0.2
_READ_BYTES = 1 << 16
_FILE_BYTES = 64 << 20


@contextmanager
def heard(hear: Callable[[str], None]) -> Iterator[None]:
    """Within it `hear` is told what this process prints, from a thread, a piece at a time; all of it, by the end.

    Prints go to a file without a name, not into a pipe: native code may print more than a pipe holds, while it keeps Python from reading.
    """
    ended = threading.Event()
    output = _Output(hear)
    thread = threading.Thread(target=output.follow, args=(ended,), name="output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        output.restore()
        ended.set()
        thread.join()


class _Output:
    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear = hear
        self._before = os.dup(1), os.dup(2)
        self._file = self._redirect()
        self._at = 0

    def _redirect(self) -> int:
        """Makes a new file, and prints go there."""
        _flush()
        descriptor, path = tempfile.mkstemp(prefix="trainload-output-")
        os.unlink(path)
        os.set_inheritable(descriptor, False)
        appending = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_APPEND)
        for target in (1, 2):
            os.dup2(appending, target)
        os.close(appending)
        return descriptor

    def restore(self) -> None:
        """Prints go where they went before."""
        _flush()
        for descriptor, target in zip(self._before, (1, 2), strict=True):
            os.dup2(descriptor, target)

    def follow(self, ended: threading.Event) -> None:
        """Reads until it is told that nothing more will come."""
        while True:
            over = ended.wait(_LOOK_SECONDS)
            self._read()
            if over:
                break
            if self._at > _FILE_BYTES:
                old, self._file = self._file, self._redirect()
                self._read_from(old)
                os.close(old)
                self._at = 0
        os.close(self._file)
        for descriptor in self._before:
            os.close(descriptor)

    def _read(self) -> None:
        self._read_from(self._file)

    def _read_from(self, descriptor: int) -> None:
        """All that there is. It is read up to the end of a word, since what it holds of secrets is taken out."""
        while data := os.pread(descriptor, _READ_BYTES, self._at):
            if len(data) == _READ_BYTES:
                data = data[: max(data.rfind(b" "), data.rfind(b"\n")) + 1] or data
            self._at += len(data)
            text = redacted(data.decode(errors="replace"))
            with suppress(OSError):  # Ray's log may be on a full disk
                os.write(self._before[1], text.encode())
            self._hear(text)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
