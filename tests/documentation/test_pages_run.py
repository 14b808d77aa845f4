"""Every tutorial and every how-to page runs as it is written."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.documentation.page_commands import blocks
from tests.documentation.page_runner import missing_lines, pages, run_page
from tests.documentation.small_job import PACKAGE, ROWS, run_examples
from tests.packaging.places import BUCKET, KEYS, s3_server

TUTORIALS = pages("tutorials")
HOW_TOS = pages("how-to")
STOPPED_RUN = """
trainload.freeze(dataclasses.replace(gpt, seed=1), "second.tl")
plan = trainload.plan(package, trainload.Cluster(devices_per_node=1), "single", global_batch=4)
def stop(event):
    if event.kind == "step":
        Path("run/stop").touch()
try:
    trainload.launch(
        package, plan, "train.parquet", run_dir="run", steps=12, compile=False, backend="local",
        on_event=stop,
    )
except trainload.RunInterrupted:
    pass
"""
SMALLER = {"8192, 80, 64": "256, 4, 16", "128256": "512", "--nodes 16 ": ""}
"""Sizes that a page states, and those of the test."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the how-to pages assume it: packages, rows and a run that was stopped."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        run_examples("how-to", ROWS + PACKAGE + STOPPED_RUN, [], folder, patch, {})
    return folder


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("page", TUTORIALS, ids=[page.stem for page in TUTORIALS])
def test_a_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        if "$BUCKET" in page.read_text():
            server = stack.enter_context(s3_server())
            bucket = {**KEYS, "AWS_ENDPOINT_URL": server, "BUCKET": f"s3://{BUCKET}"}
            for name, value in bucket.items():
                monkeypatch.setenv(name, value)
        assert run_page(page, tmp_path) == len(blocks(page))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("page", HOW_TOS, ids=[page.stem for page in HOW_TOS])
@pytest.mark.filterwarnings("ignore")  # small models
def test_a_how_to_runs(page: Path, prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    assert run_page(page, folder, SMALLER) == len(blocks(page))


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
