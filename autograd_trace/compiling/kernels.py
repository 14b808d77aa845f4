"""CPU kernels of compiled graphs: kept beside the graphs, and loaded from there.

Inductor looks for a kernel in its cache under a hash of the compiler's whole command, with the
paths of this installation, and asks the compiler several questions before it looks. A kernel that
is kept beside its graph is found by its source, on any machine of the same architecture, whether or
not that has a compiler.

Tested with torch 2.13.0. Private names used: `torch._inductor.codecache`,
`torch._inductor.runtime.cache_dir_utils`.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

from trainload.capture.source.patched import replaced
from trainload.core.paths import link_or_copy

KERNELS = "kernels"
"""Folder of kernels, beside the graphs that call them."""
_SUFFIX = ".so"

Kernel = Callable[..., None]


@contextlib.contextmanager
def kernels_noted() -> Iterator[dict[str, Callable[[], Kernel]]]:
    """Note the kernels that Inductor compiles within the context.

    Yields:
        Name of each kernel -> function that waits for its compiler and returns it. Names are hashes
        of the kernels' sources.
    """
    # what this process has loaded for an earlier graph need not be in the present cache
    CppPythonBindingsCodeCache.cache.clear()
    noted: dict[str, Callable[[], Kernel]] = {}
    thread = threading.get_ident()  # another one may ask the compiler ahead

    def note(name: str, loading: Callable[[], Callable[[], Kernel]]) -> Callable[[], Kernel]:
        kernel = loading()
        if threading.get_ident() == thread:
            noted[name] = kernel
        return kernel

    with _loading_replaced(note):
        yield noted


def keep_kernels(noted: Mapping[str, Callable[[], Kernel]], folder: Path) -> tuple[str, ...]:
    """Keep kernels that `kernels_noted` has noted in a folder, as links if possible.

    Returns:
        Names of the kernels' files, sorted.
    """
    for name, kernel in noted.items():
        # another graph of the build may call the same kernel
        with contextlib.suppress(FileExistsError):
            link_or_copy(_file_of(kernel()), folder / (name + _SUFFIX))
    return tuple(sorted(name + _SUFFIX for name in noted))


def _file_of(kernel: Kernel) -> Path:
    """Return the file of a kernel in Inductor's cache.

    This process may have loaded it from another folder, for an earlier graph.
    """
    loaded = Path(getattr(kernel, "__self__").__file__)  # noqa: B009  # the module of the function
    return Path(cache_dir(), loaded.parent.name, loaded.name)


@contextlib.contextmanager
def kernels_from(folder: Path) -> Iterator[None]:
    """Load kernels that are kept in a folder from there within the context; Inductor finds or
    compiles all others.
    """

    def look(name: str, loading: Callable[[], Callable[[], Kernel]]) -> Callable[[], Kernel]:
        file = folder / (name + _SUFFIX)
        return partial(_loaded, file, name) if file.exists() else loading()

    with _loading_replaced(look):
        yield


@contextlib.contextmanager
def _loading_replaced(
    load: Callable[[str, Callable[[], Callable[[], Kernel]]], Callable[[], Kernel]],
) -> Iterator[None]:
    """Within the context, call `load` with a kernel's name and Inductor's own function instead of
    that function. It returns a function that returns the kernel.
    """
    own: Any = vars(CppPythonBindingsCodeCache)["load_pybinding_async"].__func__

    def loading(cache: Any, types: Sequence[str], source: str, *args: Any, **options: Any) -> Any:
        call = partial(own, cache, types, source, *args, **options)
        return load(_name(types, source), call) if cache is CppPythonBindingsCodeCache else call()

    with replaced(CppPythonBindingsCodeCache, "load_pybinding_async", classmethod(loading)):
        yield


def _loaded(file: Path, name: str) -> Kernel:
    cache: Any = CppPythonBindingsCodeCache
    kernel: Kernel = getattr(cache._load_library_inner(str(file), name), cache.entry_function)
    return kernel


def _name(types: Sequence[str], source: str) -> str:
    """Return a hash of what a kernel is compiled from."""
    text = "\0".join((*types, "", source))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
