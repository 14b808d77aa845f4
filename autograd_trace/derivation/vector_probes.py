"""Remember which vector instructions the compiler and this CPU support.

To find that out, Inductor compiles small libraries, and every process that loads or compiles a
graph loads each of them in a new interpreter, which takes a second.

Tested with torch 2.13.0. Private names used: `torch._inductor.cpu_vec_isa`,
`torch._inductor.runtime.cache_dir_utils`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

from trainload.core.atomic import create_file

_FOLDER = "vector-probes"


@contextlib.contextmanager
def remembered_probes() -> Iterator[None]:
    """Within the context, libraries that a process has loaded once are not loaded again.

    The record is in Inductor's cache (`TORCHINDUCTOR_CACHE_DIR`), an empty file for each success;
    a probe that has failed is repeated by the next process.
    """
    probing = cpu_vec_isa.VecISA.check_build

    def check_build(instructions: cpu_vec_isa.VecISA, code: str) -> bool:
        record = Path(cache_dir()) / _FOLDER / _key(instructions, code)
        if record.exists():
            return True
        succeeded = probing(instructions, code)
        if succeeded:
            record.parent.mkdir(mode=0o700, exist_ok=True)
            create_file(record, b"")
        return succeeded

    cpu_vec_isa.VecISA.check_build = check_build  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        cpu_vec_isa.VecISA.check_build = probing  # type: ignore[method-assign]


def _key(instructions: cpu_vec_isa.VecISA, code: str) -> str:
    """Return a digest of all that the result of a probe depends on."""
    compiler = cpu_vec_isa._get_isa_dry_compile_fingerprint(instructions.build_arch_flags())
    parts = (code, compiler, torch.backends.cpu.get_cpu_capability())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
