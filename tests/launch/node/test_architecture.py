"""A build is for an architecture and a toolchain, not for a product or a node."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainload
from trainload.autograd_trace.derivation import inductor
from trainload.launching.node import architecture
from trainload.launching.node.architecture import architecture_of, toolchain_of
from trainload.launching.node.build_key import build_key
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

GPU = torch.device("cuda", 0)
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "total_memory": 80 * 2**30,
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "shared_memory_per_block_optin": 232_448,
}


@pytest.fixture
def plan(tiny: Package) -> Plan:
    return trainload.plan(tiny, trainload.Cluster(), "single")


def describe(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Let torch describe an H100 that differs in some facts."""
    found = SimpleNamespace(**{**H100, **facts})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.mark.parametrize(
    "same", [{"name": "NVIDIA H100 NVL"}, {"total_memory": 94 * 2**30}], ids=lambda f: next(iter(f))
)
def test_gpus_of_one_architecture_share_a_build(
    same: dict[str, Any], tiny: Package, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(monkeypatch)
    first = build_key(tiny, plan, GPU)
    describe(monkeypatch, **same)
    assert build_key(tiny, plan, GPU) == first


@pytest.mark.parametrize(
    "other",
    [{"minor": 3}, {"multi_processor_count": 114}, {"shared_memory_per_block_optin": 101_376}],
    ids=lambda f: next(iter(f)),
)
def test_gpus_of_other_architectures_do_not(
    other: dict[str, Any], tiny: Package, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(monkeypatch)
    first = build_key(tiny, plan, GPU)
    describe(monkeypatch, **other)
    assert build_key(tiny, plan, GPU) != first


def test_the_cores_of_a_node_with_gpus_do_not_matter(
    tiny: Package, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(monkeypatch)
    assert build_key(tiny, plan, GPU, threads=2) == build_key(tiny, plan, GPU, threads=64)


def test_the_threads_of_a_worker_on_cpus_do(tiny: Package, plan: Plan) -> None:
    cpu = torch.device("cpu")
    assert build_key(tiny, plan, cpu, threads=1) != build_key(tiny, plan, cpu, threads=2)


@pytest.mark.parametrize("name", ["cpp_compiler_version", "torch.__version__"])
def test_another_version_of_what_compiles_is_another_build(
    name: str, tiny: Package, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    first = build_key(tiny, plan, cpu)
    if name == "torch.__version__":
        monkeypatch.setattr(torch, "__version__", "2.13.1")
    else:
        monkeypatch.setattr(architecture, name, lambda: "gcc version 99.1.0")
    assert build_key(tiny, plan, cpu) != first


def test_a_gpu_is_described_by_what_its_kernels_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    describe(monkeypatch)
    assert architecture_of(GPU) == {
        "device": "cuda",
        "capability": "9.0",
        "multiprocessors": 132,
        "shared_memory": 232_448,
        "name": None,
    }
    assert set(toolchain_of(GPU)) == {"torch", "python", "platform", "triton"}


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_another_version_of_what_compiles_kernels_is_another_build(
    name: str, tiny: Package, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(monkeypatch)
    first = build_key(tiny, plan, GPU)
    if name == "cuda":
        monkeypatch.setattr(torch.version, "cuda", "99.1")
    else:
        monkeypatch.setattr(architecture, "_triton_version", lambda: "99.1")
    assert build_key(tiny, plan, GPU) != first


def test_the_compiler_is_named_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'clang version 21.1.0 (tags/x)'\n")
    compiler.chmod(0o700)
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", lambda: str(compiler))
    inductor.cpp_compiler_version.cache_clear()
    try:
        assert inductor.cpp_compiler_version() == "clang version 21.1.0"
    finally:
        inductor.cpp_compiler_version.cache_clear()
