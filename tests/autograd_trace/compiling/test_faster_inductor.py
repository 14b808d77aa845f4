"""Inductor compiles a graph in less time, to the same code."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.autograd_trace.outlining.layered import graph_of
from torch import Tensor
from torch._inductor import fx_utils
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.graph import GraphLowering
from torch._inductor.loop_body import LoopBodyBlock
from torch.fx import GraphModule

from trainload.autograd_trace.compiling import inductor
from trainload.autograd_trace.compiling.faster_inductor import _lower_priority
from trainload.autograd_trace.compiling.inductor import (
    NotCompiled,
    compile_graph,
    load_compiled,
)
from trainload.autograd_trace.derivation.aot import fake_mode, trace_flat
from trainload.autograd_trace.outlining.outline import outline

LINKS = 6
SHORTCUTS = ("dtype_rules_made_once", "duplicates_removed", "kernels_started_early")
REPLACED = {
    LoopBodyBlock: ("__init__",),
    DtypePropagationOpsHandler: ("__init__",),
    PythonWrapperCodegen: ("define_kernel",),
}


def hashed(x: Tensor) -> list[Tensor]:
    """Compute a chain in which every value has two users, as a hash does."""
    for _ in range(LINKS):
        x = (x ^ (x >> 3)) * 5
    return [x, x.float().sum()]


def signed_zeros(x: Tensor) -> list[Tensor]:
    """Compute zeros of both signs, and equal constants of two types."""
    zero, negative = torch.full_like(x, 0.0), torch.full_like(x, -0.0)
    written = torch.where(x > 0, zero, negative)
    return [written, torch.where(x > 1, x * 2, x + 2.0), x.clone().add_(1).mul_(x)]


CASES: dict[str, tuple[Callable[[Tensor], list[Tensor]], Tensor]] = {
    "a hash": (hashed, torch.arange(-40, 40, dtype=torch.int32)),
    "signed zeros": (signed_zeros, torch.linspace(-2, 2, 64)),
}


def flat(function: Callable[[Tensor], list[Tensor]], example: Tensor) -> GraphModule:
    return trace_flat(lambda x: function(x), [fake_mode().from_tensor(example)])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Use an empty cache of Inductor with this name."""

    def use(name: str) -> Path:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        return tmp_path / name

    return use


def kernels(cache: Path) -> dict[str, str]:
    """Return the kernels of a cache: their names, which depend on their code, and their code."""
    return {path.name: path.read_text() for path in cache.rglob("*.main.cpp")}


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_are_those_without_the_shortcuts(
    case: str, cache: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = cache("fast")
    compile_graph(flat(*CASES[case]), tmp_path / "fast.bin", {})
    for shortcut in SHORTCUTS:
        monkeypatch.setattr(inductor, shortcut, nothing)
    plain = cache("plain")
    compile_graph(flat(*CASES[case]), tmp_path / "plain.bin", {})
    assert kernels(fast)
    assert kernels(fast) == kernels(plain)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_interpreted_graph(
    case: str, cache: Callable[[str], Path], tmp_path: Path
) -> None:
    cache("own")
    compile_graph(flat(*CASES[case]), tmp_path / "graph.bin", {})
    _, example = CASES[case]
    for value, expected in zip(
        load_compiled(tmp_path / "graph.bin")(example), flat(*CASES[case])(example), strict=True
    ):
        assert torch.equal(value, expected)
        assert torch.equal(value.float().signbit(), expected.float().signbit())


def test_a_chain_does_not_double_with_each_link(
    cache: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache("own")
    blocks: list[LoopBodyBlock] = []
    beginning = LoopBodyBlock.__init__

    def begin(block: LoopBodyBlock, *arguments: object) -> None:
        beginning(block, *arguments)  # type: ignore[arg-type]
        blocks.append(block)

    monkeypatch.setattr(LoopBodyBlock, "__init__", begin)
    compile_graph(flat(*CASES["a hash"]), tmp_path / "graph.bin", {})
    operations, around = 5 * LINKS, 20
    longest = max(len(block.graph.nodes) for block in blocks)
    assert LINKS < longest <= operations + around < 2**LINKS


def test_a_kernel_is_built_while_the_next_one_is_written(
    cache: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache("own")
    events: list[str] = []
    defining, asking = PythonWrapperCodegen.define_kernel, AsyncCompile.cpp_pybinding

    def define_kernel(*arguments: object, **options: object) -> None:
        started = any(thread.name.startswith("kernels") for thread in threading.enumerate())
        events.append(f"defined, compiler at work: {started}")
        defining(*arguments, **options)  # type: ignore[arg-type]

    def cpp_pybinding(*arguments: object) -> object:
        events.append("asked for")
        return asking(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PythonWrapperCodegen, "define_kernel", define_kernel)
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", cpp_pybinding)
    compile_graph(flat(lambda x: hashed(x + 7), CASES["a hash"][1]), tmp_path / "graph.bin", {})
    assert "defined, compiler at work: True" in events
    assert events.index("defined, compiler at work: True") < events.index("asked for")


def test_a_kernel_of_a_graph_that_failed_is_built_for_the_next_one(
    cache: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache("own")
    defining = PythonWrapperCodegen.define_kernel
    graph = partial(flat, lambda x: hashed(x + 11), CASES["a hash"][1])
    busy = threading.Event()

    def define_kernel(*arguments: object, **options: object) -> None:
        defining(*arguments, **options)  # type: ignore[arg-type]
        raise KeyError("no more")

    def submit(pool: ThreadPoolExecutor, work: Callable[..., Any], *rest: Any) -> Future[Any]:
        for _ in range(pool._max_workers):  # so that the kernel's turn does not come
            submitting(pool, busy.wait)
        return submitting(pool, work, *rest)

    def shutdown(pool: ThreadPoolExecutor, wait: bool = True, **options: Any) -> None:
        ending(pool, wait=False, **options)
        busy.set()
        ending(pool, wait=wait)

    submitting, ending = ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown
    with monkeypatch.context() as patch:
        patch.setattr(PythonWrapperCodegen, "define_kernel", define_kernel)
        patch.setattr(ThreadPoolExecutor, "submit", submit)
        patch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
        with pytest.raises(NotCompiled, match="no more"):
            compile_graph(graph(), tmp_path / "graph.bin", {})
    assert not [each for each in threading.enumerate() if each.name.startswith("kernels")]
    compile_graph(graph(), tmp_path / "graph.bin", {})


@pytest.mark.skipif(
    not hasattr(fx_utils, "_is_fake_tensor_same"), reason="this torch does not look into regions"
)
def test_results_of_regions_that_no_pass_has_changed_are_kept(
    cache: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache("own")
    module = graph_of(3)
    inductor.prepare_graph(module)
    outlined = outline(module).module
    computed: list[tuple[int, int]] = []
    updating = FakeTensorUpdater.incremental_update

    def update(updater: FakeTensorUpdater) -> int:
        nodes = updater.gm.graph.nodes
        changed = sum(updater.hash_node(node) not in updater.processed_hashes for node in nodes)
        updated = updating(updater)
        computed.append((changed, updated))
        return updated

    def stop(*_: object) -> None:
        raise KeyError("the passes are over")

    monkeypatch.setattr(FakeTensorUpdater, "incremental_update", update)
    monkeypatch.setattr(GraphLowering, "run", stop)
    with pytest.raises(NotCompiled, match="the passes are over"):
        inductor._compile(outlined, tmp_path / "graph.bin", {}, {})
    assert any(not changed for changed, _ in computed)
    assert all(changed or not updated for changed, updated in computed)


@pytest.mark.parametrize(("own", "expected"), [(0, 5), (10, 15), (19, 19)])
def test_the_compiler_is_nicer_than_the_process(
    own: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda *_: own)
    monkeypatch.setattr(os, "setpriority", lambda which, who, niceness: found.append(niceness))
    _lower_priority()
    assert found == [expected]


def test_afterwards_torch_is_as_it_was(cache: Callable[[str], Path], tmp_path: Path) -> None:
    before = {(owner, name): getattr(owner, name) for owner in REPLACED for name in REPLACED[owner]}
    cache("own")
    compile_graph(flat(*CASES["a hash"]), tmp_path / "graph.bin", {})
    assert before == {(owner, name): getattr(owner, name) for owner, name in before}
