"""Every tutorial runs as it is written, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.documentation.tutorial_page import blocks, missing_lines, pages, run_page

TUTORIALS = pages("tutorials")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("page", TUTORIALS, ids=[page.stem for page in TUTORIALS])
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path) == len(blocks(page))


def test_a_line_that_is_not_printed_is_missing() -> None:
    printed = "loss  0.25\nstep 3/4\n"
    assert missing_lines("loss 0.5\n...\nstep 4/4", printed) == []
    assert missing_lines("step 4/4\nloss 0.5", printed) == ["loss N"]
    assert missing_lines("accuracy 0.5", printed) == ["accuracy N"]


def test_blocks_have_their_language_and_title(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('text\n```python title="a.py"\nx = 1\n```\n\n```bash\nls\n```\n')
    assert [(block.language, block.title, block.text) for block in blocks(page)] == [
        ("python", "a.py", "x = 1\n"),
        ("bash", "", "ls\n"),
    ]
