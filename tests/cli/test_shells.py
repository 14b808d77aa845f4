"""Completion of lines that are typed in real shells, which split words in their own ways."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.waiting import wait_until

SETUP = {
    "bash": """bind 'set bell-style none'; eval "$(trainload completion bash)"; """,
    "zsh": """autoload -Uz compinit; compinit -u -D; eval "$(trainload completion zsh)"; """,
}
"""Shell -> lines of its startup file, beside settings for a terminal without colours."""
COMMAND = {"bash": ["bash", "--norc", "-i"], "zsh": ["zsh", "-f", "-i"]}
LINES = {
    "trainload lau": "trainload launch ",
    "trainload retrain ti": "trainload retrain tick ",
    "trainload launch x.tl --set keep_b": "trainload launch x.tl --set keep_best=",
    "trainload launch x.tl --set precision=b": "trainload launch x.tl --set precision=bf16 ",
    "trainload launch x.tl --set=precision=b": "trainload launch x.tl --set=precision=bf16 ",
    "trainload plan x.tl --recompute=se": "trainload plan x.tl --recompute=selective ",
    "trainload plan x.tl --strategy=hy": "trainload plan x.tl --strategy=hybrid",
    "trainload launch 'x y.tl' --backend lo": "trainload launch 'x y.tl' --backend local ",
    "trainload verify two": "trainload verify two\\ words/",
    "trainload verify --identity=two": "trainload verify --identity=two\\ words/",
    "trainload status two": "trainload status two\\ words/",
}
"""Text before the Tab key is pressed -> the completed line."""
QUICK = ("bash", "trainload launch x.tl --set precision=b")


class Terminal:
    """An interactive shell on a terminal that understands no control sequences."""

    def __init__(self, shell: str, folder: Path) -> None:
        self._written = bytearray()
        self._leader, follower = pty.openpty()
        self._process = subprocess.Popen(
            COMMAND[shell],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, **program_in_path(), "PS1": "> ", "TERM": "dumb"},
        )
        os.close(follower)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.type(f"{SETUP[shell]} echo rea''dy\n")
        wait_until(lambda: "\nready" in self.text)

    def _read(self) -> None:
        while True:
            try:
                block = os.read(self._leader, 65536)
            except OSError:  # the shell has ended
                return
            self._written.extend(block)

    @property
    def text(self) -> str:
        """Output of the shell so far, without control sequences."""
        return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|\r", "", self._written.decode())

    def type(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        os.close(self._leader)


def program_in_path() -> dict[str, str]:
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@contextmanager
def terminal(shell: str, folder: Path) -> Iterator[Terminal]:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    opened = Terminal(shell, folder)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        pytest.param(
            shell,
            line,
            marks=() if (shell, line) == QUICK else pytest.mark.slow,
            id=f"{shell}: {line}",
        )
        for shell in COMMAND
        for line in LINES
    ],
)
def test_the_tab_key_completes_a_line(shell: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "two words").mkdir()
    with terminal(shell, tmp_path) as typed:
        typed.type(f"{line}\t")
        wait_until(lambda: f"> {LINES[line]}" in typed.text)


@pytest.mark.slow
@pytest.mark.parametrize("shell", COMMAND)
def test_several_values_are_listed(shell: str, tmp_path: Path) -> None:
    with terminal(shell, tmp_path) as typed:
        typed.type("trainload plan x.tl --strategy=zero\t\t")
        wait_until(lambda: re.search(r"zero0 +zero1 +zero2 +zero3", typed.text) is not None)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("trainload lau", ["launch\tTrain a package."]),
        ("trainload launch x.tl --set precision=b", ["precision=bf16"]),
        ("trainload plan x.tl --recompute=se", ["--recompute=selective"]),
        ("trainload verify --identity=two", ["--identity=two words/"]),
        ("trainload verify two", ["two words/"]),
        (
            "trainload plan x.tl --strat",
            ["--strategy\tsingle, zero0 to zero3, hybrid[/shard size]."],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fish_completes_a_line(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "two words").mkdir()
    done = subprocess.run(
        ["fish", "--no-config", "-c", f'trainload completion fish | source; complete -C "{line}"'],
        cwd=tmp_path,
        env={**os.environ, **program_in_path()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == found
