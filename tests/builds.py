"""Builds for tests of their format and their trust: files of made bytes, and a library."""

from __future__ import annotations

import _ctypes
from pathlib import Path

from trainload.core.records import now
from trainload.packaging.builds.build_folder import file_entries, write_build
from trainload.packaging.builds.build_record import BuildRecord, Target

TARGET = Target(
    job="a" * 64,
    toolchain={"torch": "2.13.0+cpu", "python": "3.11", "compiler": "gcc version 12.2.0"},
    architecture={"device": "cpu", "capability": "AVX512", "threads": 4},
)


def made_build(
    path: Path,
    *,
    target: Target = TARGET,
    unverified: tuple[str, ...] = (),
    content: str = "code",
    kernel: bytes | None = None,
) -> Path:
    """Write a build of two graphs at `path`. Its kernel is a library that exists, or has these
    bytes.
    """
    part = path.with_name(f"{path.name}-graphs")
    (part / "kernels").mkdir(parents=True)
    (part / "index.json").write_text("{}")
    (part / "train.only.bin").write_text(content)
    (part / "kernels" / "abc.so").write_bytes(
        Path(_ctypes.__file__).read_bytes() if kernel is None else kernel
    )
    record = BuildRecord(
        target=target,
        release="0.1.0",
        compiled=("train.only", "train.update"),
        unverified=unverified,
        files=file_entries({0: part}),
        created=now(),
    )
    write_build(path, record, {0: part})
    return path
