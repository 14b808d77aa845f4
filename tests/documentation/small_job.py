"""Names that the examples of the documentation use: a small job, its package and its data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

FEWER_STEPS = {"steps=1000": "steps=3"}
"""Replacements in examples that train."""

SETTING = """
import dataclasses
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import trainload
from pathlib import Path
from torch import nn
from torch.export import Dim
from trainload import Job

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.v_proj(x) * self.q_proj(x).softmax(-1)

class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.blocks = nn.ModuleList([Attention(), Attention()])
    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def next_token(model, batch):
    tokens = batch["tokens"].long()
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

def logits(model, batch):
    return {"logits": model(batch["tokens"].long())}

def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)

model, tokens = Gpt(), torch.randint(0, 12, (4, 5), dtype=torch.uint8)
batch = {"tokens": tokens}
gpt = Job(model, batch, optimizer, loss=next_token, predict=logits, steps=3, global_batch=4)
"""
ROWS = """
rows_of_tokens = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(8 * 5, np.uint8)), 5)
for name in ("mine.parquet", "train.parquet"):
    pq.write_table(pa.table({"tokens": rows_of_tokens}), name)
"""
PACKAGE = 'package = trainload.freeze(gpt, "gpt.tl")\n'
WHILE_IT_RUNS = """
import threading
plan = trainload.plan(package, trainload.Cluster(), "single", global_batch=4)
stop, has_stepped = Path("runs/first/stop").absolute(), threading.Event()
def on_event(event):
    if event.kind == "step":
        has_stepped.set()
    if event.kind == "profile":
        stop.touch()
def train():
    try:
        trainload.launch(
            package, plan, "train.parquet", run_dir="runs/first", steps=10**6, backend="local",
            on_event=on_event,
        )
    except trainload.RunInterrupted:
        pass
threading.Thread(target=train).start()
has_stepped.wait()
"""
"""Starts a run that trains until it has been profiled."""


def run_examples(
    where: str,
    before: str,
    examples: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    replacements: Mapping[str, str],
) -> None:
    """Run examples in order, in a folder, after `SETTING` and more code.

    Args:
        where: page or name, for tracebacks.
        before: code that runs first.
        examples: code of the examples.
        folder: working directory, from which modules are imported too.
        monkeypatch: restores the process.
        replacements: text in the examples -> what it is replaced by.
    """
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "examples"}
    exec(compile(SETTING + before, f"before {where}", "exec"), names)
    for number, example in enumerate(examples):
        code = example
        for text, replacement in replacements.items():
            code = code.replace(text, replacement)
        exec(compile(code, f"{where}, example {number}", "exec"), names)
