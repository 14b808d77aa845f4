"""GPUs that this machine does not have, described to torch and Triton by a library that stands for
CUDA's runtime and driver (gpu.c).

With it torch's CUDA build derives, shards and compiles graphs for the GPU; nothing is computed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainload.core.atomic import new_folder
from trainload.core.errors import CompileError, RequestError
from trainload.launching.node.cache import private_folder
from trainload.sharding.planner.device import DeviceProfile, names, read

COUNTED = (
    "launches",
    "library_launches",
    "copies_to_gpu",
    "copies_from_gpu",
    "copies_on_gpu",
    "waits",
    "allocated_bytes",
    "recorded",
)
"""Names of the library's counters, in the order of `described_gpu_counts`."""
MODE = "TRAINLOAD_DESCRIBED_GPU"
"""Environment variable. With "dry" launches of kernels succeed, without effect; by default they
fail.
"""
_SOURCE = Path(__file__).with_name("gpu.c")
_LIBRARY = "libcuda.so.1"
_PRELOADED = "LD_PRELOAD"
_COMPILERS = ("gcc", "clang", "cc")
_RESERVED = 1024
"""Bytes of shared memory that the driver keeps of each block."""
_BLOCKS = {"7.5": 16, "8.6": 16, "8.7": 16, "8.9": 24}
"""Resident blocks of a multiprocessor by compute capability; others have 32."""
_HEADERS = ("backends", "nvidia", "include")


def described(name: str) -> DeviceProfile:
    """Return the profile of a GPU that can be described.

    Args:
        name: a device of `trainload plan --device`: a name, such as "h100", or the path of a
            profile.

    Raises:
        PlanError: there is no such device.
        RequestError: the device's profile lacks its architecture.
    """
    profile = read(name)
    if profile.architecture is None:
        known = [each for each in names() if read(each).architecture is not None]
        raise RequestError(
            "the profile of this device does not say what graphs are compiled for",
            where="device",
            expected=f"one of {', '.join(known)}, or a profile with an architecture",
            got=name,
        )
    return profile


def is_this_machines(profile: DeviceProfile) -> bool:
    """Return True if this process has a GPU of the same architecture."""
    architecture = profile.architecture
    if architecture is None or not torch.cuda.is_available():
        return False
    found: Any = torch.cuda.get_device_properties(0)
    return (
        f"{found.major}.{found.minor}" == architecture.capability
        and found.multi_processor_count == architecture.multiprocessors
        and found.shared_memory_per_block_optin == architecture.shared_memory - _RESERVED
    )


def environment_with(profile: DeviceProfile, cache_dir: Path) -> dict[str, str]:
    """Return environment variables for a process in which torch finds the described GPU and no
    other.

    Args:
        profile: the GPU.
        cache_dir: the node's cache, in which the library is kept.

    Raises:
        RequestError: this torch is not a build for CUDA.
        CompileError: the library cannot be compiled.
    """
    if torch.version.cuda is None:
        raise RequestError(
            "graphs for GPUs are compiled by torch's build for CUDA",
            where="device",
            expected="torch with CUDA",
            got=f"torch {torch.__version__}",
            hint="Install it; it needs no GPU for this.",
        )
    library = _library(profile, cache_dir)
    before = [value for value in (os.environ.get(_PRELOADED),) if value]
    return {
        **{name: value for name, value in os.environ.items() if name != MODE},
        _PRELOADED: ":".join([str(library), *before]),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "CUDA_VISIBLE_DEVICES": "0",
    }


def _library(profile: DeviceProfile, cache_dir: Path) -> Path:
    """Return the library that describes a GPU; it is compiled at its first use."""
    headers = _headers()
    definitions = [f"-D{name}={value}" for name, value in _facts(profile).items()]
    key = hashlib.sha256(_SOURCE.read_bytes())
    key.update("\0".join([*definitions, str(torch.version.cuda), str(headers)]).encode())
    folder = private_folder(cache_dir / "described") / key.hexdigest()[:32]
    if not folder.is_dir():
        with new_folder(folder) as draft:
            _compile(draft / _LIBRARY, definitions, headers)
    return folder / _LIBRARY


def _facts(profile: DeviceProfile) -> Mapping[str, str | int]:
    """Return the macros of gpu.c."""
    architecture = profile.architecture
    assert architecture is not None
    major, _, minor = architecture.capability.partition(".")
    return {
        "GPU_NAME": f'"described {profile.name}"',
        "GPU_MAJOR": major,
        "GPU_MINOR": minor,
        "GPU_MULTIPROCESSORS": architecture.multiprocessors,
        "GPU_THREADS": architecture.threads,
        "GPU_BLOCKS": _BLOCKS.get(architecture.capability, 32),
        "GPU_SHARED_MEMORY": architecture.shared_memory,
        "GPU_L2": architecture.l2_bytes,
        "GPU_MEMORY": profile.memory_bytes,
    }


def _headers() -> Path:
    """Return the folder of CUDA's headers, which Triton contains."""
    found = importlib.util.find_spec("triton")
    place = Path(found.origin or "").parent.joinpath(*_HEADERS) if found is not None else None
    if place is None or not (place / "cuda.h").is_file():
        raise CompileError(
            "Triton, which compiles kernels for GPUs, is missing or has no headers of CUDA",
            where=sys.prefix,
            hint="Install torch's build for CUDA.",
        )
    return place


def _compile(library: Path, definitions: list[str], headers: Path) -> None:
    names_ = [os.environ["CC"]] if "CC" in os.environ else list(_COMPILERS)
    compiler = next(filter(None, map(shutil.which, names_)), None)
    if compiler is None:
        raise CompileError("no C compiler was found", where="build", hint="Install gcc.")
    command = [
        *(compiler, "-O1", "-fPIC", "-shared", "-w", f"-I{headers}"),
        *(f"-Wl,-soname,{_LIBRARY}", *definitions, "-o", str(library), str(_SOURCE)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(
            "the library that describes a GPU cannot be compiled",
            where=compiler,
            got=" / ".join(done.stderr.strip().splitlines()[:2]),
        )
