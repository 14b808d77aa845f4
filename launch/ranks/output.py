"""Forward a worker's output, of Python and of native code, to the driver as well as to its original
destination.
"""

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
def forward_output(hear: Callable[[str], None]) -> Iterator[None]:
    """Call `hear` with the output of this process within the context, in pieces, from a thread.

    When the context ends, all output has been passed on. It is redirected to an unlinked file, not
    into a pipe: native code that holds the GIL may print more than a pipe holds, and Python could
    not read it.
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
        """Create a new file, and redirect stdout and stderr to it."""
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
        """Restore the original stdout and stderr."""
        _flush()
        for descriptor, target in zip(self._before, (1, 2), strict=True):
            os.dup2(descriptor, target)

    def follow(self, ended: threading.Event) -> None:
        """Read the output until `ended` is set, then close the files."""
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
        """Read all available output and pass it on.

        Pieces end at the end of a word, so that secrets, which are redacted, are not split.
        """
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
