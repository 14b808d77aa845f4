"""Every Python example of README.md and docs/ runs unchanged, except for the number of steps.

The examples of docs/capture.md, docs/graphs.md and docs/variants.md, which state their results,
have their own tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.documentation.small_job import (
    FEWER_STEPS,
    PACKAGE,
    ROWS,
    WHILE_IT_RUNS,
    run_examples,
)
from tests.house.source import ROOT, python_blocks

pytestmark = pytest.mark.slow

PAGES = {
    "README.md": (
        """
pq.write_table(pa.table({
    "bytes": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(64 * 32, np.uint8)), 32),
    "next": pa.array(np.zeros(64, np.uint8)),
}), "train.parquet")
"""
    ),
    "docs/abstract.md": (
        """
from transformers import LlamaConfig, LlamaForCausalLM
def config(width, layers):
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=64, use_cache=False, **sizes)
config_70b, config_small = config(64, 6), config(32, 3)
def job_of(model):
    ids = torch.zeros(2, 16, dtype=torch.long)
    loss = lambda m, b: m(input_ids=b["ids"], labels=b["ids"]).loss
    return Job(model, {"ids": ids}, optimizer, loss=loss)
"""
    ),
    "docs/adapters.md": ROWS + PACKAGE,
    "docs/assets.md": PACKAGE
    + """
Path("LICENSE").write_text("free")
Path("voices.bin").write_bytes(b"la")
Path("runs/tokenizer").mkdir(parents=True)
Path("runs/tokenizer/vocab.json").write_text("{}")
assets = {"LICENSE": "LICENSE", "tokenizer": "runs/tokenizer/"}
Path("gpt.tl").rename("bare.tl")
trainload.freeze(dataclasses.replace(gpt, assets=assets), "gpt.tl")
""",
    "docs/data.md": PACKAGE
    + """
import ray.data
class database:
    documents = staticmethod(lambda: range(4))
def tokenize(document):
    return np.full((2, 5), document, np.uint8)
def tokens_of(raw):
    return {"tokens": np.zeros((len(raw["text"]), 5), np.uint8)}
Path("raw").mkdir()
Path("raw/0.json").write_text("\\n".join('{"text": "a"}' for _ in range(8)))
plan = trainload.plan(package, trainload.Cluster(), "single")
""",
    "docs/debugging.md": ROWS + PACKAGE,
    "docs/export.md": PACKAGE
    + """
Path("gpt.tl").rename("gpt-trained.tl")
trainload.export(trainload.open("gpt-trained.tl"), "gpt.aoti.pt2", to="aoti")
""",
    "docs/optimizers.md": "",
    "docs/profiling.md": ROWS + PACKAGE + WHILE_IT_RUNS,
    "docs/passes.md": PACKAGE
    + """
def fuse(graph, program, *, width=1):
    return graph
""",
    "docs/shapes.md": (
        """
class Mask:
    def __init__(self, left, right):
        self.left, self.right = left, right
x, state, weight = torch.zeros(4, 3, 8), torch.zeros(2, 4, 8), torch.ones(5)
left = inputs = targets = torch.zeros(4, 8)
"""
    ),
    "docs/trackers.md": "",
    "docs/transformers.md": "",
    "docs/watching.md": "",
}
ON_RAY = ("README.md", "docs/adapters.md", "docs/data.md")
OTHERS = {"docs/capture.md", "docs/graphs.md", "docs/variants.md"}


def run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page's examples in order, in an empty folder."""
    examples = python_blocks(page)
    assert examples
    replacements = {**FEWER_STEPS, "s3://bucket/raw": str(folder / "raw")}
    run_examples(page, PAGES[page], examples, folder, monkeypatch, replacements)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ON_RAY])
# the examples have small models, and do not mention a package of another torch
@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(page, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", ON_RAY)
@pytest.mark.filterwarnings("ignore")  # as above
def test_the_examples_of_a_page_train_on_ray(
    page: str, ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(page, tmp_path, monkeypatch)
    assert (tmp_path / "run" / "run.json").is_file()


def test_every_page_with_examples_is_run() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
    assert {page for page in pages if python_blocks(page)} == {*PAGES, *OTHERS}
