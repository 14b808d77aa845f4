"""A build is for an architecture and a toolchain, not for a product or a node."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainload
from trainload.autograd_trace.compiling import inductor
from trainload.launching.node import architecture
from trainload.launching.node.architecture import architecture_of, toolchain_of
from trainload.launching.node.build_key import build_target
from trainload.packaging.package import Package

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "total_memory": 80 * 2**30,
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "shared_memory_per_block_optin": 232_448,
}


KeyOf = Callable[..., str]
"""(device, threads=...) -> key of the build for it."""


@pytest.fixture
def key_of(tiny: Package) -> KeyOf:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    return lambda device, **options: build_target(tiny, plan, device, **options).key


def describe(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Let torch describe an H100 that differs in some facts."""
    found = SimpleNamespace(**{**H100, **facts})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.mark.parametrize(
    ("fact", "value", "shares"),
    [
        ("name", "NVIDIA H100 NVL", True),
        ("total_memory", 94 * 2**30, True),
        ("minor", 3, False),
        ("multi_processor_count", 114, False),
        ("shared_memory_per_block_optin", 101_376, False),
    ],
)
def test_gpus_share_a_build_if_they_have_one_architecture(
    fact: str, value: Any, shares: bool, key_of: KeyOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(monkeypatch)
    first = key_of(GPU)
    describe(monkeypatch, **{fact: value})
    assert (key_of(GPU) == first) == shares


def test_the_cores_of_a_node_with_gpus_do_not_matter(
    key_of: KeyOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(monkeypatch)
    assert key_of(GPU, threads=2) == key_of(GPU, threads=64)


def test_the_threads_of_a_worker_on_cpus_do(key_of: KeyOf) -> None:
    assert key_of(CPU, threads=1) != key_of(CPU, threads=2)


@pytest.mark.parametrize(
    ("device", "owner", "name", "value"),
    [
        (CPU, torch, "__version__", "2.13.1"),
        (CPU, architecture, "cpp_compiler_version", lambda: "gcc version 99.1.0"),
        (GPU, torch.version, "cuda", "99.1"),
        (GPU, architecture, "_triton_version", lambda: "99.1"),
    ],
    ids=["torch", "compiler", "CUDA", "Triton"],
)
def test_another_version_of_what_compiles_is_another_build(
    device: torch.device,
    owner: Any,
    name: str,
    value: Any,
    key_of: KeyOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    describe(monkeypatch)
    first = key_of(device)
    monkeypatch.setattr(owner, name, value)
    assert key_of(device) != first


def test_a_gpu_is_described_by_what_its_kernels_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    describe(monkeypatch)
    assert architecture_of(GPU) == {
        "device": "cuda",
        "machine": platform.machine(),
        "capability": "9.0",
        "multiprocessors": 132,
        "shared_memory": 232_448,
        "name": None,
    }
    assert set(toolchain_of(GPU)) == {
        *("torch", "python", "libc", "settings"),
        *("platform", "triton"),
    }


def test_settings_of_inductor_are_part_of_the_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_AUTOTUNE", "CACHE_DIR", "COMPILE_THREADS"):
        monkeypatch.setenv(f"TORCHINDUCTOR_{name}", "1")
    assert toolchain_of(CPU)["settings"] == "TORCHINDUCTOR_MAX_AUTOTUNE=1"


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
