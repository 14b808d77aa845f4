"""Checks of a storage: it can be written, its conditional create works, and its clock agrees."""

from __future__ import annotations

import secrets
import time
from statistics import median

from trainload.core.errors import TrainloadError
from trainload.core.formatting import interval
from trainload.core.storage.interface import StoreFiles
from trainload.core.storage.open_files import open_bounded
from trainload.launching.doctor.check_results import CheckResult

_SECONDS = 30.0
_SLOW_SECONDS = 1.0
_ROUNDS = 5
_CLOCK_SECONDS = 60.0
"""Difference of the clocks that is reported; S3 rejects requests from 15 minutes."""
_RESOLUTION = 1.0
"""Storages give modification times in seconds."""


def examine_store(url: str) -> tuple[CheckResult, ...]:
    """Write small files below probes/ of a storage, and remove them.

    Args:
        url: a path or URL of `StoreFiles`.
    """
    try:
        files = open_bounded(url, _SECONDS)
        exclusive = files.exclusive
        return (
            _examine_create(exclusive),
            _examine_latency(files),
            _examine_clock(files),
        )
    except TrainloadError as error:
        return (
            CheckResult(
                "store",
                "fails",
                error.problem + (f" ({error.got})" if error.got else ""),
                f"that {url} can be read and written",
                error.hint or "Check the URL, the credentials, and the network of this machine.",
            ),
        )


def _examine_create(exclusive: bool) -> CheckResult:
    if exclusive:
        return CheckResult("store", "ok", "a second create of the same file is rejected")
    return CheckResult(
        "store",
        "fails",
        "a second create of the same file is not rejected",
        "conditional creates (If-None-Match), or hard links of a file system",
        "Use a storage that has them: runs, leases and promotions need them.",
    )


def _examine_latency(files: StoreFiles) -> CheckResult:
    """Measure the time to write and to read a small file."""
    path, writes, reads = f"probes/{secrets.token_hex(16)}", [], []
    try:
        for number in range(_ROUNDS):
            content = b"%d" % number
            began = time.perf_counter()
            files.replace(path, content)
            written = time.perf_counter()
            found = files.read(path, 100)
            reads.append(time.perf_counter() - written)
            writes.append(written - began)
            if found != content:
                return CheckResult(
                    "store latency",
                    "fails",
                    "a reader does not see a file that was just replaced",
                    "that a write is visible as soon as it is done",
                    "Use a storage with strong consistency; omit caches and gateways.",
                )
    finally:
        files.delete(path)
        files.prune("probes")
    write, read = median(writes), median(reads)
    text = f"write {interval(write)}, read {interval(read)}"
    if max(write, read) <= _SLOW_SECONDS:
        return CheckResult("store latency", "ok", text)
    return CheckResult(
        "store latency",
        "warning",
        text,
        f"at most {interval(_SLOW_SECONDS)} for a small file",
        "Use a storage in the region of the machines.",
    )


def _examine_clock(files: StoreFiles) -> CheckResult:
    """Compare the storage's modification time of a new file with this machine's clock."""
    folder = f"probes/{secrets.token_hex(16)}"
    try:
        before = time.time()
        files.replace(f"{folder}/clock", b"1")
        after = time.time()
        modified = next((each.modified for each in files.walk(folder)), None)
    finally:
        files.delete(f"{folder}/clock")
        files.prune("probes")
    if modified is None:
        return CheckResult("store clock", "not applicable", "it gives no modification times")
    late = max(0.0, modified - after) or min(0.0, modified + _RESOLUTION - before)
    text = f"within {_RESOLUTION:g} s" if not late else f"{late:+.0f} s"
    if abs(late) <= _CLOCK_SECONDS:
        return CheckResult("store clock", "ok", text)
    return CheckResult(
        "store clock",
        "fails",
        f"{text} compared to this machine",
        f"at most {_CLOCK_SECONDS:g} s",
        "Synchronise this machine's clock (chrony, systemd-timesyncd).",
    )
