"""Every command of a page is in a block that a test runs, or has a named reason not to run."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests.documentation.page_commands import (
    LEFT_OUT,
    PAGES,
    blocks,
    commands,
    commands_elsewhere,
    commands_in_file,
)

NOT_RUN = {
    "installation": 15,
    "Kubernetes": 3,
    "image": 2,
    "several machines": 6,
    "GPU": 3,
    "endless": 1,
    "person": 1,
}
"""Kind of reason -> number of commands that no test runs for it."""
SCRIPTS = {"gpt.sbatch": 3}
"""Files of pages that are shell scripts, which need Slurm -> their calls of trainload."""


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_commands_are_in_blocks_for_them(page: Path) -> None:
    assert commands_elsewhere(page) == []


def test_the_commands_that_no_test_runs_are_known() -> None:
    reasons = Counter(
        command.reason for page in PAGES for block in blocks(page) for command in commands(block)
    )
    assert reasons.pop("") > 200
    assert reasons == NOT_RUN
    assert {reason.kind for reason in LEFT_OUT} == {*NOT_RUN}


def test_the_scripts_that_no_test_runs_are_known() -> None:
    files = [block for page in PAGES for block in blocks(page) if commands_in_file(block)]
    assert {block.title: len(commands_in_file(block)) for block in files} == SCRIPTS


def test_a_command_of_another_block_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("    trainload runs\n\n```sh\nA=1 pip list\n```\n\n```bash\nmake x\n```\n")
    assert commands_elsewhere(page) == ["trainload runs", "A=1 pip list"]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_blocks_of_a_page_are_valid_bash(page: Path) -> None:
    for block in blocks(page):
        if block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
