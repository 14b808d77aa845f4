"""Write packages, and print this process's user id and their digests.

A test runs this file in a folder with copies of `gpt.py` and `jobs.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gpt  # type: ignore[import-not-found]  # copies of the tests' modules, next to this file
import jobs  # type: ignore[import-not-found]
import torch

import trainload
from trainload.packaging.package import Package
from trainload.packaging.write import write_package


class Small(torch.nn.Module):
    """Model of the laws' job that takes no time to freeze.

    It has tied embeddings, dropout and a buffer that training writes to.
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
    """Write a package: of the laws' GPT, of a small model, or of a job captured by hand."""
    if name == "job.tl":
        job = jobs.make_job()
        return write_package(path, job.program, job.updates, job.recipe)
    job = gpt.gpt_job()
    return trainload.freeze(job if name == "gpt.tl" else replace(job, model=Small()), path)


def main(folder: Path, names: Sequence[str]) -> None:
    """Write packages with these names to `folder`."""
    print(os.getuid())
    for name in names:
        print(write(name, folder / name).digest)


main(Path(sys.argv[1]), sys.argv[2:])
