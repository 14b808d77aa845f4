"""Remember what the C++ compiler has answered to Inductor.

Every process that loads or compiles a graph asks which vector instructions the compiler and this
CPU support, for which it loads small libraries in new interpreters, and whether torch's headers are
those that were precompiled, for which it preprocesses them. That takes seconds.

Tested with torch 2.13.0. Private names used: `torch._inductor.codecache`,
`torch._inductor.config`, `torch._inductor.cpu_vec_isa`,
`torch._inductor.runtime.cache_dir_utils`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from torch._inductor import codecache, config, cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

from trainload.capture.source.patched import replaced
from trainload.core.atomic import replace_file
from trainload.core.logs import logged_suppress
from trainload.core.processes import end_with_parent

_log = logging.getLogger(__name__)

_FOLDER = "compiler-answers"
_PRECOMPILED = (".gch", ".pch")
"""Endings that GCC and Clang append to the name of a header."""
_HEADER = "torch/csrc/inductor/cpp_prefix.h"
"""Header of every kernel for a CPU."""
_SUPPORTED = "supported"
_UNUSABLE = "the compiler's answers cannot be remembered"


@contextlib.contextmanager
def remembered_answers() -> Iterator[None]:
    """Within the context, ask the compiler only what no process has asked before.

    Answers are in Inductor's cache (`TORCHINDUCTOR_CACHE_DIR`). They count for one build of torch,
    one compiler and one kind of CPU. Failures are not remembered. If the cache cannot be used, the
    compiler is asked.

    Several threads may be within the context.
    """
    _users.add()
    try:
        yield
    finally:
        _users.remove()


@contextlib.contextmanager
def asking_ahead(device: torch.device, *, forks: bool = False) -> Iterator[None]:
    """Ask the compiler, in the background, what every graph for this device asks it.

    Otherwise Inductor waits for the answers when it defines the first kernel of a node: for builds
    of the probe of vector instructions, and for torch's headers to be precompiled. The end of the
    context waits for the background, whose errors are logged: whatever fails is asked again by the
    graph that needs it.

    Args:
        device: device of the graphs.
        forks: ask in a forked process rather than in a thread, for a caller that forks itself. Its
            other threads hold no locks.
    """
    if device.type != "cpu":
        yield
        return
    background: threading.Thread | ForkProcess = (
        multiprocessing.get_context("fork").Process(target=_build_empty_kernel_in_child)
        if forks
        else threading.Thread(target=_build_empty_kernel, name="compiler", daemon=True)
    )
    background.start()
    try:
        yield
    finally:
        background.join()


def _build_empty_kernel_in_child() -> None:
    end_with_parent()
    _build_empty_kernel()


def _build_empty_kernel() -> None:
    code = f'#include <{_HEADER}>\nextern "C" void kernel(int64_t* x) {{}}\n'
    message = "the C++ compiler cannot be asked ahead"
    with remembered_answers(), logged_suppress(_log, message, Exception, level=logging.DEBUG):
        codecache.CppPythonBindingsCodeCache.load_pybinding(["int64_t*"], code)


class _Users:
    """Counter of the threads within the context: the first one replaces torch's functions, and the
    last one restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._restore = contextlib.ExitStack()

    def add(self) -> None:
        """Add a thread."""
        with self._lock:
            if self._number == 0:
                self._restore.enter_context(_replaced_questions())
            self._number += 1

    def remove(self) -> None:
        """Remove a thread."""
        with self._lock:
            self._number -= 1
            if self._number == 0:
                self._restore.close()


_users = _Users()


@contextlib.contextmanager
def _replaced_questions() -> Iterator[None]:
    """Replace torch's functions that ask the compiler within the context."""
    probing, precompiling = cpu_vec_isa.VecISA.check_build, codecache._precompile_header
    has_built_headers = False

    def check_build(instructions: cpu_vec_isa.VecISA, code: str) -> bool:
        nonlocal has_built_headers
        builds_headers = code == cpu_vec_isa.VecISA._avx_code
        if builds_headers and has_built_headers and _takes_widest():
            # The headers were built for wider instructions, of which Inductor takes the first ones
            # that are supported. Building them takes 3 s for each kind.
            return True
        is_supported = ask(instructions, code)
        has_built_headers |= builds_headers and is_supported
        return is_supported

    def ask(instructions: cpu_vec_isa.VecISA, code: str) -> bool:
        question = (code, instructions.build_arch_flags())
        if _recall(*question) is not None:
            return True
        succeeded = probing(instructions, code)
        if succeeded:
            _remember(_SUPPORTED, *question)
        return succeeded

    def precompile_header(header: str, hashable_cmd_line: str, **command: Any) -> str:
        path = _recall(header, hashable_cmd_line)
        if path is None or not _is_precompiled(path):
            path = precompiling(header, hashable_cmd_line, **command)
            _remember(path, header, hashable_cmd_line)
        return path

    with (
        replaced(cpu_vec_isa.VecISA, "check_build", check_build),
        replaced(codecache, "_precompile_header", precompile_header),
    ):
        yield


def _takes_widest() -> bool:
    """Return True if Inductor takes the first, widest vector instructions that are supported."""
    return config.cpp.simdlen is None and not os.environ.get("ATEN_CPU_CAPABILITY")


def _is_precompiled(header: str) -> bool:
    """Return True if this header is precompiled where this process has such headers.

    Those of a process with another TMPDIR may be removed at any time.
    """
    return Path(header).is_relative_to(codecache._HEADER_DIR) and any(
        os.path.exists(header + ending) for ending in _PRECOMPILED
    )


def _answer(*question: str) -> Path:
    """Return the file with the answer to a question to this compiler for this CPU."""
    compiler = cpu_vec_isa._get_isa_dry_compile_fingerprint("")
    built = os.stat(torch._C.__file__).st_mtime_ns
    parts = (*question, compiler, str(built), torch.backends.cpu.get_cpu_capability())
    return Path(cache_dir()) / _FOLDER / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _recall(*question: str) -> str | None:
    """Return the remembered answer to a question; None if there is none that can be read."""
    with logged_suppress(_log, _UNUSABLE, OSError, level=logging.DEBUG):
        answer = _answer(*question)
        return (answer.read_text() or None) if answer.exists() else None
    return None


def _remember(text: str, *question: str) -> None:
    with logged_suppress(_log, _UNUSABLE, OSError, level=logging.DEBUG):
        answer = _answer(*question)
        answer.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(answer, text.encode(), durable=False)
