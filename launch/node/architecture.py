"""Facts that compiled code depends on besides graphs: the machine, and the tools that compile."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from typing import Any

import torch

from trainload.autograd_trace.compiling.inductor import cpp_compiler_version
from trainload.packaging.builds.build_record import Facts

_INDUCTOR = "TORCHINDUCTOR_"
_HARMLESS = frozenset({"CACHE_DIR", "COMPILE_THREADS", "VEC_ISA_OK"})
"""Settings on which the code that Inductor writes does not depend."""


def architecture_of(device: torch.device, threads: int | None = None) -> Facts:
    """Return what compiled code depends on in a device of this machine.

    Two GPUs of one architecture may have different product names and memory, which kernels do not
    depend on.

    Args:
        device: the device.
        threads: number of threads of a worker, which Inductor writes into CPU kernels; None: those
            of this process.

    Example:
        >>> architecture_of(torch.device("cpu"), 4)
        {'device': 'cpu', 'machine': 'x86_64', 'capability': 'AVX512', 'threads': 4,
         'instructions': 'aes amx_bf16 amx_int8 amx_tile avx avx2 avx512_bf16 ...'}
        >>> architecture_of(torch.device("cuda", 0))
        {'device': 'cuda', 'machine': 'x86_64', 'capability': '9.0', 'multiprocessors': 132,
         'shared_memory': 232448, 'name': None}
    """
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)
        return {
            "device": "cuda",
            "machine": platform.machine(),
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "shared_memory": getattr(found, "shared_memory_per_block_optin", None),  # not on ROCm
            "name": found.gcnArchName if torch.version.hip else None,  # on CUDA the product's
        }
    return {
        "device": "cpu",
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": _instructions(),
        "threads": threads or torch.get_num_threads(),
    }


def _instructions() -> str:
    """Return the instruction sets of this CPU, all of which the compiler may use
    (-march=native).
    """
    told: Any = torch.cpu.get_capabilities()
    return " ".join(sorted(name for name, value in told.items() if value is True))


def toolchain_of(device: torch.device) -> Facts:
    """Return what compiles graphs for a device in this process, and the versions.

    Example:
        >>> toolchain_of(torch.device("cpu"))
        {'torch': '2.13.0+cpu', 'python': '3.11', 'libc': 'glibc 2.36', 'settings': None,
         'compiler': 'gcc version 12.2.0'}
    """
    common: Facts = {
        "torch": torch.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "settings": _inductor_settings(),
    }
    if device.type == "cuda":
        platform_version = torch.version.cuda or torch.version.hip
        return common | {"platform": platform_version, "triton": _triton_version()}
    return common | {"compiler": cpp_compiler_version()}


def _inductor_settings() -> str | None:
    """Return the environment variables by which Inductor compiles otherwise than by default; None
    if there are none.
    """
    changed = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_INDUCTOR) and name.removeprefix(_INDUCTOR) not in _HARMLESS
    )
    return ", ".join(changed) or None


def _triton_version() -> str | None:
    """Return the version of Triton, which compiles kernels for GPUs; None if it is missing."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ModuleNotFoundError:
        return None
