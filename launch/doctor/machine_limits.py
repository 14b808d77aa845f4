"""Checks of a machine's limits: processors, memory, shared memory, open files, disk, caches."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainload.core.errors import StorageError
from trainload.core.formatting import size
from trainload.core.writable_folder import check_writable_folder, existing_folder
from trainload.launching.doctor.check_results import CheckResult, Status
from trainload.launching.node.cache import default_cache_dir

SHARED_BYTES = 512 * 2**20
"""Shared memory for each rank, and for Ray's object store, which a manifest requests too."""
OPEN_FILES = 65536
"""Open files that Ray recommends for a node."""
_FEW_FILES = 4096
_LITTLE_MEMORY, _SCARCE_MEMORY = 2 * 2**30, 2**29
_RAY_KILLS_AT = 0.95
"""Share of the memory above which Ray's memory monitor kills workers."""
_LITTLE_DISK, _SCARCE_DISK = 10 * 2**30, 2**30
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "fuse.sshfs", "9p")
"""Types of file systems that several machines share."""


def examine_processors(root: Path = Path("/")) -> CheckResult:
    """Compare the CPU quota of this process's control group with its processors.

    Args:
        root: root of the file system.
    """
    usable = len(os.sched_getaffinity(0))
    quota = _cpu_quota(root)
    if quota is None or quota >= usable:
        return CheckResult("processors", "ok", f"{usable} of {os.cpu_count()}")
    return CheckResult(
        "processors",
        "warning",
        f"a quota of {quota:g} CPUs on {usable} processors",
        "no CPU quota: a rank that is throttled delays all others",
        "Remove the CPU limit of the container; requests suffice.",
    )


def _cpu_quota(root: Path) -> float | None:
    """Return the number of CPUs of the smallest quota; None if there is none."""
    quotas = []
    for folder in control_groups(root, "cpu"):
        try:
            if (folder / "cpu.max").exists():
                limit, period = (folder / "cpu.max").read_text().split()
            else:
                limit = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
        except (OSError, ValueError):
            continue
        if limit not in ("max", "-1"):
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def examine_memory(root: Path = Path("/")) -> CheckResult:
    """Check that memory is free, within the limit of this process's control group.

    Args:
        root: root of the file system.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    words = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, free = words["MemTotal"], words["MemAvailable"]
    limited = ""
    for folder in control_groups(root, "memory"):
        limit, used = _memory_limit(folder)
        if limit is not None and limit < total:
            total, limited = limit, ", the limit of its control group"
        if limit is not None:
            free = min(free, max(0, limit - used))
    found = f"{size(free)} free of {size(total)}{limited}"
    hint = "End what else runs there, or raise the memory limit of the container."
    if free < _SCARCE_MEMORY:
        return CheckResult("memory", "fails", found, f"{size(_SCARCE_MEMORY)} free", hint)
    if free < _LITTLE_MEMORY or free < (1 - _RAY_KILLS_AT) * total:
        expected = (
            f"{size(_LITTLE_MEMORY)} free, and 5 %: above {_RAY_KILLS_AT:.0%} Ray kills workers"
        )
        return CheckResult("memory", "warning", found, expected, hint)
    return CheckResult("memory", "ok", found)


def _memory_limit(folder: Path) -> tuple[int | None, int]:
    """Return limit and used bytes of a control group, without the files that can be dropped."""
    names = ("memory.max", "memory.current", "inactive_file")
    if not (folder / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        limit = (folder / names[0]).read_text().strip()
        if limit == "max":
            return None, 0
        used = int((folder / names[1]).read_text())
        statistics = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None, 0
    droppable = next(
        (int(line.split()[1]) for line in statistics if line.split()[0] == names[2]), 0
    )
    return int(limit), used - droppable


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all above it, for one controller.

    Args:
        root: root of the file system.
        controller: name of the controller in version 1, where each has its own hierarchy.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = top / controller if names else top
        folder = base / path.strip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(base))


def examine_shared_memory(gpus: int, place: Path = Path("/dev/shm")) -> CheckResult:
    """Compare the size of /dev/shm with the need of Ray and one rank for each GPU.

    Args:
        gpus: number of GPUs; without GPUs, the need of one rank is compared.
        place: mount of the shared memory.
    """
    need = SHARED_BYTES * (1 + max(1, gpus))
    expected = f"{size(need)}: {size(SHARED_BYTES)} for Ray and for each rank"
    hint = "docker run --shm-size, or an emptyDir with medium: Memory at /dev/shm in Kubernetes."
    # NCCL fails without it; Ray uses files, which are slower
    worst: Status = "fails" if gpus else "warning"
    try:
        disk = os.statvfs(place)
    except OSError as error:
        return CheckResult("shared memory", worst, f"{place}: {error.strerror}", expected, hint)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    found = f"{size(free)} free of {size(total)}"
    if free >= need:
        return CheckResult("shared memory", "ok", found)
    return CheckResult("shared memory", worst, found, expected, hint)


def examine_open_files() -> CheckResult:
    """Compare the limit of open files, to which Ray raises its own, with what a node needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    found = f"{soft}, which can {'' if unlimited else 'at most '}be raised to"
    found += " any number" if unlimited else f" {hard}"
    if unlimited or hard >= OPEN_FILES:
        return CheckResult("open files", "ok", found)
    return CheckResult(
        "open files",
        "fails" if hard < _FEW_FILES else "warning",
        found,
        f"{OPEN_FILES}, which Ray recommends",
        f"ulimit -n {OPEN_FILES} (limits.conf, LimitNOFILE= of a unit, or the container runtime).",
    )


def examine_disk() -> CheckResult:
    """Check the free space of the cache's and the temporary files' disks."""
    places = {"cache": existing_folder(default_cache_dir()), "temporary": _temporary()}
    free = {
        f"{name} {place}": shutil.disk_usage(place).free
        for name, place in places.items()
        if place is not None
    }
    found = ", ".join(f"{size(count)} free in {place}" for place, count in free.items())
    least = min(free.values())
    if least >= _LITTLE_DISK:
        return CheckResult("disk", "ok", found)
    return CheckResult(
        "disk",
        "fails" if least < _SCARCE_DISK else "warning",
        found,
        f"{size(_LITTLE_DISK)} for packages, compiled graphs and converted data",
        "Free some space, or set TRAINLOAD_CACHE_DIR and TMPDIR to folders on a larger disk.",
    )


def _temporary() -> Path | None:
    """Return the folder of temporary files; None if none can be written."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None


def examine_temporary_files() -> CheckResult:
    """Create a socket of the kind that ranks are started through in the temporary folder.

    Its path has a maximum length.
    """
    expected = "a folder for temporary files, with a path that is short enough for sockets"
    hint = "Set TMPDIR to a short path that can be written, such as /tmp."
    place = _temporary()
    if place is None:
        return CheckResult("temporary files", "fails", "no folder can be written", expected, hint)
    try:
        with tempfile.TemporaryDirectory(prefix="trainload-", dir=place) as folder:
            path = Path(folder) / "forks.socket"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
    except OSError as error:
        reason = error.strerror or str(error)
        return CheckResult("temporary files", "fails", f"{place}: {reason}", expected, hint)
    return CheckResult("temporary files", "ok", str(place))


def examine_cache(root: Path = Path("/")) -> CheckResult:
    """Check that the node's cache is private, can be written, and is on a disk of this machine.

    Args:
        root: root of the file system, for /proc.
    """
    folder = default_cache_dir()
    existing = existing_folder(folder)
    hint = "Set TRAINLOAD_CACHE_DIR to a folder of your own on a disk of the machine."
    try:
        check_writable_folder(folder, "it cannot be written", hint)
    except StorageError as error:
        found = f"{folder}: {error.got}"
        return CheckResult("cache", "fails", found, "a folder that can be written", hint)
    status = existing.stat()
    if existing == folder and (
        status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        found = f"{folder}: owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
        return CheckResult("cache", "fails", found, "a folder of your own, mode 0700", hint)
    kind, options = mount_of(existing, root)
    found = f"{folder}, {kind}"
    if "noexec" in options:
        expected = "a mount without noexec: compiled graphs are loaded from it"
        return CheckResult("cache", "fails", f"{found}, noexec", expected, hint)
    if kind in _REMOTE:
        expected = "a disk of the machine; locks on a shared one are slow"
        return CheckResult("cache", "warning", found, expected, hint)
    return CheckResult("cache", "ok", found)


def mount_of(path: Path, root: Path = Path("/")) -> tuple[str, tuple[str, ...]]:
    """Return type and options of the file system of a path; "unknown" if /proc does not tell.

    Args:
        path: an existing file or folder.
        root: root of the file system that has /proc.
    """
    found: tuple[int, str, tuple[str, ...]] = (-1, "unknown", ())
    place = path.resolve()
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown", ()
    for line in lines:
        before, _, after = line.partition(" - ")
        # octal escapes for spaces and the like
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        options = tuple(before.split()[5].split(","))
        # a later mount at the same place hides an earlier one
        if place.is_relative_to(mount) and len(mount.parts) >= found[0]:
            found = len(mount.parts), after.split()[0], options
    return found[1], found[2]
