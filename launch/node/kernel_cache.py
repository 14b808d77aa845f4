"""Inductor's cache of kernels, which all builds of a node share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from trainload.launching.node.build_key import BUILD_VERSION
from trainload.launching.node.cache import private_folder, use


def use_inductor_cache(cache_dir: Path) -> None:
    """Set Inductor's cache to the node's cache of kernels.

    It is content-addressed, too, and shared by all builds, since plans of one package have most
    kernels in common.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_kernels(cache_dir))


def _kernels(cache_dir: Path) -> Path:
    """Return the folder of the node's kernels, and mark it as used by this process.

    There is one for each release of torch and each BUILD_VERSION, since Inductor would otherwise
    find kernels that an earlier version has compiled.
    """
    folder = private_folder(cache_dir / "kernels") / f"torch-{torch.__version__}-{BUILD_VERSION}"
    use(folder)
    return private_folder(folder)


@contextmanager
def own_kernels(cache_dir: Path, draft: Path) -> Iterator[None]:
    """Make Inductor write new kernels into `draft` within the context, and add them to the node's
    kernels if it succeeds.

    Inductor's C++ compiler writes libraries in place, and an existing library counts as complete.
    So a process that is killed would leave a partial library that fails every later run, and a
    compiler that outlives it could overwrite a library of the next process.
    """
    shared, own = _kernels(cache_dir), draft / "inductor"
    _link_files(shared, own)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    try:
        yield
        _link_files(own, shared)
        shutil.rmtree(own)
    finally:
        use_inductor_cache(cache_dir)


def _link_files(source: Path, target: Path) -> None:
    """Hard-link the files of `source` into `target`, each atomically; existing files of `target`
    remain.
    """
    for folder, _, names in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in names:
            if not name.endswith(".lock"):
                # another build of this node may run concurrently
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(Path(folder) / name, there / name)
