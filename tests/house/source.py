"""Read the project's own source, for the tests of its structure."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("capture", "autograd_trace", "packaging", "sharding", "launch")
"""Stages of the project, bottom-up."""
IMPORTED_AS = {**{stage: stage for stage in STAGES}, "launch": "launching"}
"""Stage -> its name in `trainload`, where `launch` is a function."""
PRIVATE_TORCH = frozenset(
    {
        "autograd_trace/derivation/aot.py",
        "autograd_trace/compiling/call_sizes.py",
        "autograd_trace/compiling/compiler_answers.py",
        "autograd_trace/compiling/cuda_graphs.py",
        "autograd_trace/compiling/described_device.py",
        "autograd_trace/compiling/faster_inductor.py",
        "autograd_trace/compiling/inductor.py",
        "autograd_trace/compiling/kernels.py",
        "autograd_trace/derivation/named_groups.py",
        "autograd_trace/derivation/wait_time.py",
        "capture/initialization/construction_recorder.py",
        "capture/initialization/fake_tensors.py",
        "capture/job/torch_modes.py",
        "capture/tracing/lazy_graphs.py",
        "packaging/graphs/graph_json.py",
        "packaging/graphs/graph_replacement.py",
        "packaging/graphs/torch_operators.py",
    }
)
"""Modules that may use torch's private names."""


def stage_files() -> list[Path]:
    return sorted(path for stage in STAGES for path in (ROOT / stage).rglob("*.py"))


def face_files() -> list[Path]:
    face = ROOT / "src" / "trainload"
    stages = {face / name for name in IMPORTED_AS.values()}
    return sorted(path for path in face.rglob("*.py") if not stages & set(path.parents))


Names = tuple[tuple[int, str], ...]
"""(line, dotted name) pairs."""


@functools.cache
def read(text: str) -> tuple[Names, Names]:
    """Return the names that the module `text` imports, and those that it uses.

    Imports inside functions are included. Uses are attributes, and arguments of import_module.

    `from a import b` imports both a and a.b. The result is cached, since several tests read each
    file; the syntax tree is not.
    """
    imported: list[tuple[int, str]] = []
    used: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                imported += [(node.lineno, alias.name) for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                imported += [
                    (node.lineno, module),
                    *((node.lineno, f"{module}.{alias.name}") for alias in names),
                ]
            case ast.Attribute():
                name = dotted(node)
                used += [(node.lineno, name)] if name is not None else []
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if (
                dotted(function) or ""
            ).endswith("import_module"):
                used.append((node.lineno, name))
    return tuple(imported), tuple(used)


def imports(text: str) -> Names:
    """Return (line, dotted name) of everything that `text` imports."""
    return read(text)[0]


def dotted(node: ast.AST) -> str | None:
    """Return `a.b.c` for an attribute chain that begins with a plain name, otherwise None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def private_names(text: str, library: str) -> list[str]:
    """Return "line: name" for each private name of a library that `text` uses.

    Operator namespaces (`torch.ops._c10d_functional`) are public.
    """
    imported, used = read(text)
    return [f"{line}: {name}" for line, name in (*imported, *used) if _is_private(name, library)]


def _is_private(name: str, library: str) -> bool:
    parts = name.split(".")
    if parts[0] != library or parts[:2] == ["torch", "ops"]:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def python_blocks(page: str) -> list[str]:
    """Return the Python examples of a page, given by its path from the root."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
