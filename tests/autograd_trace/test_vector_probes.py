"""Vector instructions are probed once per node, not once per process."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor import cpu_vec_isa

from trainload.autograd_trace.derivation.vector_probes import remembered_probes


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Codes that Inductor's own probe was called with; it fails for code that begins with "no"."""
    called: list[str] = []

    def check_build(instructions: cpu_vec_isa.VecISA, code: str) -> bool:
        called.append(code)
        return not code.startswith("no")

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return called


def probe(code: str, instructions: cpu_vec_isa.VecISA | None = None) -> bool:
    """Probe as a new process would."""
    with remembered_probes():
        chosen = cpu_vec_isa.VecAVX2() if instructions is None else instructions
        return chosen.check_build(code)


def test_a_success_is_remembered(probes: list[str]) -> None:
    assert [probe("code"), probe("code")] == [True, True]
    assert probes == ["code"]


def test_a_failure_is_probed_again(probes: list[str]) -> None:
    assert [probe("no code"), probe("no code")] == [False, False]
    assert probes == ["no code", "no code"]


def test_other_code_and_other_instructions_are_probed(probes: list[str]) -> None:
    probe("code")
    probe("other code")
    probe("code", cpu_vec_isa.VecAVX512())
    assert probes == ["code", "other code", "code"]


def test_another_compiler_is_probed(probes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    probe("code")
    monkeypatch.setattr(cpu_vec_isa, "_get_isa_dry_compile_fingerprint", lambda flags: "clang")
    probe("code")
    assert probes == ["code", "code"]


def test_outside_of_the_context_torch_is_as_it_was(probes: list[str]) -> None:
    probe("code")
    cpu_vec_isa.VecAVX2().check_build("code")
    assert probes == ["code", "code"]
