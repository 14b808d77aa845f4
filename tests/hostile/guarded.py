"""Read packages under watch, and record forbidden events.

Recorded are the execution of code, started processes, written files and the size of created
tensors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainload.core.errors import PackageError
from trainload.packaging.derived import read_derived
from trainload.packaging.package import Package, open_package
from trainload.packaging.signatures.verify import verify_package

_RUNS = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.",
    "pty.",
    "pickle.find_class",
    "marshal.",
    "socket.",
    "ctypes.dlopen",
)
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
    "shutil.",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass
class Noted:
    """Events that were recorded under watch.

    Attributes:
        acts: audit events of Python that reading a package does not need, with their arguments.
        made: bytes of the created tensors, except those on the meta device.
    """

    acts: list[str] = field(default_factory=list)
    made: int = 0


_watching: list[Noted] = []
_hooked: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    opens_to_write = (
        event == "open"
        and len(arguments) == 3
        and isinstance(arguments[2], int)
        and bool(arguments[2] & _WRITES)
    )
    if event.startswith((*_RUNS, *_CHANGES)) or opens_to_write:
        _watching[-1].acts.append(f"{event} {arguments!r}"[:200])


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, noted: Noted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type != "meta":
            self._noted.made += result.nbytes
        return result


@contextmanager
def watched(*, count: bool = True) -> Iterator[Noted]:
    """Record what happens in this context; the bytes of tensors only if `count`.

    Python's audit hooks cannot be removed; this one does nothing outside the context.
    """
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    noted = Noted()
    _watching.append(noted)
    try:
        with _Counting(noted) if count else nullcontext():
            yield noted
    finally:
        _watching.pop()


def checked(path: Path) -> Package:
    """Open and check a package as a launch does before it creates the first tensor."""
    package = open_package(path)
    package.check_contents()
    return package


def refusal(path: Path, file: str) -> str:
    """Return the error message for a package, or "" if it is accepted.

    An invalid derived graph is ignored unless it was sealed here; the message is then that of its
    verification.
    """
    try:
        package = checked(path)
        if not file.startswith("derived/") or read_derived(package, file.split("/")[1]) is not None:
            return ""
    except PackageError as error:
        return str(error)
    return "; ".join(
        f"{problem.file}: {problem.problem}" for problem in verify_package(path).problems
    )
