"""Completion in shells: the script that is printed, and what it asks the program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem, ShellComplete

from trainload.cli import main as cli

TYPED = """
source <(trainload completion bash)
COMP_LINE='{words}'
COMP_WORDS=({words})
COMP_CWORD={last}
_trainload_completion trainload
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
"""Script that completes as bash does; `compopt` complains, since no key was pressed."""


class Shell(ShellComplete):
    """A shell that has split its line already."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(cli.commands, {}, "trainload", "_TRAINLOAD_COMPLETE")
        self._words = words

    def get_completion_args(self) -> tuple[list[str], str]:
        return [*self._words[:-1]], self._words[-1]

    def items(self) -> list[CompletionItem[str]]:
        return self.get_completions(*self.get_completion_args())


def completed(*words: str) -> list[str]:
    return [item.value for item in Shell(words).items() if item.type == "plain"]


def kinds(*words: str) -> set[str]:
    return {item.type for item in Shell(words).items()}


def test_commands_are_completed() -> None:
    assert completed("re") == ["releases", "report", "resume", "retrain"]
    assert completed("retrain", "ti") == ["tick"]


def test_options_are_completed() -> None:
    assert completed("plan", "x.tl", "--str") == ["--strategy"]


@pytest.mark.parametrize(
    ("words", "choices"),
    [
        (["plan", "x.tl", "--strategy", "zero"], ["zero0", "zero1", "zero2", "zero3"]),
        (["plan", "x.tl", "--recompute", "s"], ["selective"]),
        (["plan", "x.tl", "--device", "h100"], ["h100", "h100-pcie"]),
        (["plan", "x.tl", "--tensor", "2/e"], ["2/expert"]),
        (["launch", "x.tl", "--backend", ""], ["ray", "local", "torchrun"]),
        (["init", "--kind", "tra"], ["transformers", "trainer"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
    ids=lambda words: " ".join(words[-2:]),
)
def test_choices_are_completed(words: list[str], choices: list[str]) -> None:
    assert completed(*words) == choices


def test_settings_are_completed() -> None:
    assert completed("launch", "x.tl", "--set", "keep") == ["keep=", "keep_best=", "keep_every="]
    assert completed("launch", "x.tl", "--set", "precision=b") == ["precision=bf16"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["verify", "x"], "file"),
        (["launch", "x"], "file"),
        (["freeze", "job"], "file"),
        (["launch", "x.tl", "--data", "tr"], "file"),
        (["plan", "x.tl", "-o", "p"], "file"),
        (["push", "x.tl", "st"], "file"),
        (["status", "ru"], "dir"),
        (["resume", "ru"], "dir"),
    ],
    ids=" ".join,
)
def test_paths_are_left_to_the_shell(words: list[str], kind: str) -> None:
    assert kinds(*words) == {kind}


def test_a_run_at_a_url_is_not_opened_for_a_completion() -> None:
    assert completed("status", "nowhere://bucket/run", "--js") == ["--json"]


def test_a_completion_imports_neither_torch_nor_ray() -> None:
    code = (
        "import os, sys\n"
        "os.environ.update(_TRAINLOAD_COMPLETE='bash_complete', COMP_CWORD='4',"
        " COMP_WORDS='trainload launch x.tl --set keep_b')\n"
        "from trainload.cli.main import run\n"
        "try:\n    run([])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["plain,keep_best="])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_registers_a_function_for_the_program(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_TRAINLOAD_COMPLETE={shell}_complete" in script
    assert "_trainload_completion" in script


@pytest.mark.slow  # starts the program for each completion
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["trainload", "lau"], ["launch"]),
        (["trainload", "launch", "x.tl", "--set", "keep_b"], ["keep_best="]),
        (["trainload", "plan", "x.tl", "--strategy", "zero"], ["zero0", "zero1", "zero2", "zero3"]),
    ],
    ids=lambda words: words[-1],
)
def test_bash_completes(words: list[str], found: list[str]) -> None:
    script = TYPED.format(words=" ".join(words), last=len(words) - 1)
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.stdout.split() == found


@pytest.mark.slow  # starts the program
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_appends_no_space_to_a_key() -> None:
    """`compopt` is replaced by a function that prints its last argument."""
    words = "trainload launch x.tl --set keep_b"
    script = TYPED.format(words=words, last=4).replace(
        "COMP_WORDS", 'compopt() { echo "${@: -1}"; }\nCOMP_WORDS', 1
    )
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.stdout.splitlines() == ["nospace", "keep_best="]
