"""CPU kernels are kept beside a compiled graph, and loaded from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.autograd_trace.compiling.test_faster_inductor import flat

from trainload.autograd_trace.compiling.inductor import Compiled, compile_graph
from trainload.autograd_trace.compiling.kernels import KERNELS

LOADING = """
import sys, torch
from pathlib import Path
from trainload.autograd_trace.compiling.inductor import load_compiled
(value,) = load_compiled(Path(sys.argv[1]))(torch.arange(12.0).reshape(3, 4))
print(value.tolist())
"""
NO_COMPILER = "/nonexistent/compiler"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graph")


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Compiled:
    """A graph with a kernel, compiled into graph.bin."""
    example = torch.arange(12.0).reshape(3, 4)
    module = flat(lambda x: [x.sin() * 2 + x.sum()], example)
    return compile_graph(module, folder / "graph.bin", {})


def loaded(graph: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Load and call a graph in a new process without a C++ compiler and with an empty cache."""
    return subprocess.run(
        [sys.executable, "-c", LOADING, str(graph)],
        env={**os.environ, "CXX": NO_COMPILER, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_graph_lists_the_kernels_that_are_kept_beside_it(
    compiled: Compiled, folder: Path
) -> None:
    assert compiled.kernels
    assert compiled.kernels == tuple(sorted(path.name for path in (folder / KERNELS).iterdir()))


@pytest.mark.slow
def test_a_graph_is_loaded_without_a_compiler_and_without_inductors_cache(
    compiled: Compiled, folder: Path, tmp_path: Path
) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    done = loaded(folder / "graph.bin", tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), x.sin() * 2 + x.sum())


@pytest.mark.slow
def test_a_graph_without_its_kernels_asks_the_compiler(
    compiled: Compiled, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "graph.bin").write_bytes((folder / "graph.bin").read_bytes())
    done = loaded(tmp_path / "graph.bin", tmp_path / "cache")
    assert done.returncode != 0
    assert NO_COMPILER in done.stderr
