"""Every Python example of README.md and docs/ runs unchanged, except for the number of steps.

The examples of capture.md, graphs.md and variants.md in docs/guides/, which state their results,
have their own tests, and so have hub.md, which needs a server, and the tutorials. Those of
operators.md run in interpreters of their own (test_guides_run.py).
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
    "README.md": "",
    "docs/guides/abstract.md": (
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
    "docs/guides/adapters.md": ROWS + PACKAGE,
    "docs/guides/assets.md": PACKAGE
    + """
Path("LICENSE").write_text("free")
Path("voices.bin").write_bytes(b"la")
Path("runs/tokenizer").mkdir(parents=True)
Path("runs/tokenizer/vocab.json").write_text("{}")
assets = {"LICENSE": "LICENSE", "tokenizer": "runs/tokenizer/"}
Path("gpt.tl").rename("bare.tl")
trainload.freeze(dataclasses.replace(gpt, assets=assets), "gpt.tl")
""",
    "docs/guides/data.md": PACKAGE
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
    "docs/guides/debugging.md": ROWS + PACKAGE,
    "docs/guides/doctor.md": "",
    "docs/guides/export.md": PACKAGE
    + """
Path("gpt.tl").rename("gpt-trained.tl")
trained = trainload.open("gpt-trained.tl")
trainload.export(trained, "gpt.aoti.pt2", to="aoti")
trainload.export(trained, "gpt.onnx", to="onnx")
trainload.export(trained, "gpt-huggingface", to="huggingface")
trainload.export(trained, "gpt.safetensors", to="safetensors")
trainload.export(trained, "gpt-dcp", to="dcp")
""",
    "docs/guides/optimizers.md": "",
    "docs/index.md": "",
    "docs/guides/profiling.md": ROWS + PACKAGE + WHILE_IT_RUNS,
    "docs/guides/passes.md": PACKAGE
    + """
def fuse(graph, program, *, width=1):
    return graph
""",
    "docs/guides/shapes.md": (
        """
class Mask:
    def __init__(self, left, right):
        self.left, self.right = left, right
x, state, weight = torch.zeros(4, 3, 8), torch.zeros(2, 4, 8), torch.ones(5)
left = inputs = targets = torch.zeros(4, 8)
"""
    ),
    "docs/guides/trackers.md": "",
    "docs/guides/transformers.md": "",
    "docs/guides/watching.md": "",
}
ON_RAY = ("README.md", "docs/guides/adapters.md", "docs/guides/data.md")
OTHERS = {
    "docs/guides/capture.md",
    "docs/guides/graphs.md",
    "docs/guides/hub.md",
    "docs/guides/variants.md",
    "docs/reference/operators.md",
}


def run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page's examples in order, in an empty folder."""
    if "onnxruntime" in (ROOT / page).read_text():
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: make integrations")
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
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    as_programs = ("docs/tutorials/", "docs/how-to/")  # test_pages_run.py
    pages = [page for page in pages if not page.startswith(as_programs)]
    assert {page for page in pages if python_blocks(page)} == {*PAGES, *OTHERS}
