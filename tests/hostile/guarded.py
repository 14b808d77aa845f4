"""Reading a package under watch: what runs code, starts processes, writes files or makes tensors is
noted.
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
    """What happened under watch.

    Attributes:
        acts: audit events of Python's that reading a package has no use for, with their arguments.
        made: bytes of tensors that were made, but for those on the meta device.
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
    """Notes what happens within it; the bytes of tensors only if `count`.

    An audit hook of Python's stays; this one sleeps otherwise.
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
    """All that is known of a package before its first tensor is made: what a launch demands of
    it.
    """
    package = open_package(path)
    package.check_contents()
    return package


def refusal(path: Path, file: str) -> str:
    """The line that a package gets, "" where it is taken. A derived graph that is not sound is
    passed over unless it was sealed here, so verifying says what it is.
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
