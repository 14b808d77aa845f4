"""Run by a test, from a folder of its own with `gpt.py` and `jobs.py` in it: prints its user,
writes the packages that are asked for, and prints their digests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gpt  # type: ignore[import-not-found]  # copies of the tests' own, beside this file
import jobs  # type: ignore[import-not-found]
import torch

import trainload
from trainload.packaging.package import Package
from trainload.packaging.write import write_package


class Small(torch.nn.Module):
    """The laws' job with a model that takes no time to freeze: tied embeddings, dropout, a buffer
    that training writes to.
    """

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(gpt.VOCABULARY, gpt.WIDTH)
        self.head = torch.nn.Linear(gpt.WIDTH, gpt.VOCABULARY)
        self.head.weight = self.tokens.weight
        self.dropout = torch.nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        logits: torch.Tensor = self.head(self.dropout(self.tokens(tokens)))
        return logits


def write(name: str, path: Path) -> Package:
    """Write one of the packages: of the laws' GPT, of a small model, or of a job that was captured
    by hand.
    """
    if name == "job.tl":
        job = jobs.make_job()
        return write_package(path, job.program, job.updates, job.recipe)
    job = gpt.gpt_job()
    return trainload.freeze(job if name == "gpt.tl" else replace(job, model=Small()), path)


def main(folder: Path, names: Sequence[str]) -> None:
    """Packages with these names in `folder`."""
    print(os.getuid())
    for name in names:
        print(write(name, folder / name).digest)


main(Path(sys.argv[1]), sys.argv[2:])
