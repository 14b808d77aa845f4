"""The C++ compiler is asked once per node, not once per process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor import codecache, cpu_vec_isa

from trainload.autograd_trace.compiling import compiler_answers
from trainload.autograd_trace.compiling.compiler_answers import asking_ahead, remembered_answers


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Questions that Inductor has asked. A probe fails whose code begins with "no"."""
    questions: list[str] = []

    def check_build(instructions: cpu_vec_isa.VecISA, code: str) -> bool:
        questions.append(code)
        return not code.startswith("no")

    def precompile_header(header: str, hashable_cmd_line: str, **command: object) -> str:
        questions.append(header)
        path = tmp_path / "header.h"
        path.with_name("header.h.gch").touch()
        return str(path)

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    monkeypatch.setattr(codecache, "_precompile_header", precompile_header)
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return questions


def probe(code: str, instructions: cpu_vec_isa.VecISA | None = None) -> bool:
    """Probe as a new process would."""
    with remembered_answers():
        chosen = cpu_vec_isa.VecAVX2() if instructions is None else instructions
        return chosen.check_build(code)


def precompile(header: str, command: str = "g++") -> str:
    """Precompile a header as a new process would."""
    with remembered_answers():
        return codecache._precompile_header(header, command)


def test_a_probe_that_succeeds_is_remembered(asked: list[str]) -> None:
    assert [probe("code"), probe("code")] == [True, True]
    assert asked == ["code"]


def test_a_probe_that_fails_is_repeated(asked: list[str]) -> None:
    assert [probe("no code"), probe("no code")] == [False, False]
    assert asked == ["no code", "no code"]


def test_other_code_and_other_instructions_are_probed(asked: list[str]) -> None:
    probe("code")
    probe("other code")
    probe("code", cpu_vec_isa.VecAVX512())
    assert asked == ["code", "other code", "code"]


HEADERS = cpu_vec_isa.VecISA._avx_code
WIDE, NARROW = cpu_vec_isa.VecAVX512(), cpu_vec_isa.VecAVX2()


def headers_asked(asked: list[str]) -> int:
    """Return how often the headers are built for wide and narrow instructions in one process."""
    with remembered_answers():
        assert [WIDE.check_build(HEADERS), NARROW.check_build(HEADERS)] == [True, True]
    return asked.count(HEADERS)


def test_headers_are_built_for_the_widest_instructions_alone(asked: list[str]) -> None:
    assert headers_asked(asked) == 1


def test_headers_are_built_for_all_instructions_if_others_may_be_chosen(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert headers_asked(asked) == 2


def test_instructions_that_were_not_needed_are_not_remembered(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers_asked(asked)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    probe(HEADERS)
    assert asked.count(HEADERS) == 2


def test_another_compiler_is_asked(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    probe("code")
    monkeypatch.setattr(cpu_vec_isa, "_get_isa_dry_compile_fingerprint", lambda flags: "clang")
    probe("code")
    assert asked == ["code", "code"]


def test_a_header_is_precompiled_once_for_a_command(asked: list[str]) -> None:
    assert precompile("a.h") == precompile("a.h")
    precompile("a.h", "g++ -O1")
    assert asked == ["a.h", "a.h"]


def test_a_precompiled_header_that_was_deleted_is_made_again(asked: list[str]) -> None:
    made = Path(precompile("a.h"))
    made.with_name("header.h.gch").unlink()
    precompile("a.h")
    assert asked == ["a.h", "a.h"]


def test_the_other_ending_of_a_precompiled_header_counts_too(asked: list[str]) -> None:
    made = Path(precompile("a.h"))
    made.with_name("header.h.gch").rename(made.with_name("header.h.pch"))
    precompile("a.h")
    assert asked == ["a.h"]


def test_a_header_of_a_process_with_another_tmpdir_is_not_used(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    precompile("a.h")
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / "other"))
    precompile("a.h")
    assert asked == ["a.h", "a.h"]


def test_another_build_of_torch_is_asked(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probe("code")
    (tmp_path / "_C.so").touch()
    monkeypatch.setattr(torch._C, "__file__", str(tmp_path / "_C.so"))
    probe("code")
    assert asked == ["code", "code"]


def fill_disk(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def replace_file(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compiler_answers, "replace_file", replace_file)


def replace_folder(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.mkdir()
    (cache / "compiler-answers").touch()


@pytest.mark.parametrize("spoil", [fill_disk, replace_folder])
def test_if_the_cache_cannot_be_used_the_compiler_is_asked(
    spoil: Callable[[pytest.MonkeyPatch, Path], None],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    spoil(monkeypatch, tmp_path / "cache")
    assert [probe("code"), probe("code")] == [True, True]
    assert precompile("a.h") == str(tmp_path / "header.h")
    assert asked == ["code", "code", "a.h"]


def test_threads_can_be_within_the_context_in_any_order(asked: list[str]) -> None:
    before = cpu_vec_isa.VecISA.check_build, codecache._precompile_header
    first, second = remembered_answers(), remembered_answers()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    probe("code")
    assert [cpu_vec_isa.VecAVX2().check_build("code"), asked] == [True, ["code"]]
    second.__exit__(None, None, None)
    assert (cpu_vec_isa.VecISA.check_build, codecache._precompile_header) == before


def test_a_forked_process_asks_for_all(asked: list[str], tmp_path: Path) -> None:
    with asking_ahead(torch.device("cpu"), forks=True):
        pass
    assert asked == []  # not in this process
    assert list((tmp_path / "cache" / "compiler-answers").iterdir())


@pytest.mark.parametrize(("device", "headers"), [("cpu", 1), ("cuda", 0)])
def test_the_compiler_is_asked_before_the_first_kernel(
    device: str, headers: int, asked: list[str]
) -> None:
    with asking_ahead(torch.device(device)):
        pass
    assert asked.count("torch/csrc/inductor/cpp_prefix.h") == headers


def test_a_background_that_fails_is_left_to_the_graph_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding", fail)
    with asking_ahead(torch.device("cpu")):
        asked = True
    assert asked


def test_outside_of_the_context_torch_is_as_it_was(asked: list[str]) -> None:
    probe("code")
    cpu_vec_isa.VecAVX2().check_build("code")
    assert asked == ["code", "code"]
