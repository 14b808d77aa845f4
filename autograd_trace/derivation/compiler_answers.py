"""Remember what the C++ compiler has answered to Inductor.

Every process that loads or compiles a graph asks which vector instructions the compiler and this
CPU support, for which it loads small libraries in new interpreters, and whether torch's headers are
those that were precompiled, for which it preprocesses them. That takes seconds.

Tested with torch 2.13.0. Private names used: `torch._inductor.codecache`,
`torch._inductor.cpu_vec_isa`, `torch._inductor.runtime.cache_dir_utils`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

from trainload.core.atomic import replace_file

_FOLDER = "compiler-answers"
_PRECOMPILED = ".gch"


@contextlib.contextmanager
def remembered_answers() -> Iterator[None]:
    """Within the context, ask the compiler only what no process has asked before.

    Answers are in Inductor's cache (`TORCHINDUCTOR_CACHE_DIR`), which belongs to one release of
    torch. Failures are not remembered.
    """
    probing, precompiling = cpu_vec_isa.VecISA.check_build, codecache._precompile_header

    def check_build(instructions: cpu_vec_isa.VecISA, code: str) -> bool:
        answer = _answer(code, instructions.build_arch_flags())
        if answer.exists():
            return True
        succeeded = probing(instructions, code)
        if succeeded:
            _remember(answer, "")
        return succeeded

    def precompile_header(header: str, hashable_cmd_line: str, **command: Any) -> str:
        answer = _answer(header, hashable_cmd_line)
        path = answer.read_text() if answer.exists() else ""
        if not path or not Path(path + _PRECOMPILED).exists():
            path = precompiling(header, hashable_cmd_line, **command)
            _remember(answer, path)
        return path

    cpu_vec_isa.VecISA.check_build = check_build  # type: ignore[method-assign, assignment]
    codecache._precompile_header = precompile_header  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu_vec_isa.VecISA.check_build = probing  # type: ignore[method-assign]
        codecache._precompile_header = precompiling


def _answer(*question: str) -> Path:
    """Return the file with the answer to a question to this compiler for this CPU."""
    compiler = cpu_vec_isa._get_isa_dry_compile_fingerprint("")
    parts = (*question, compiler, torch.backends.cpu.get_cpu_capability())
    return Path(cache_dir()) / _FOLDER / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _remember(answer: Path, text: str) -> None:
    answer.parent.mkdir(mode=0o700, exist_ok=True)
    replace_file(answer, text.encode(), durable=False)
