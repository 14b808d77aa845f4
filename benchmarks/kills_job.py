"""Job of the kill benchmark: the demo's GPT in fp32.

Its layers are few and wide, so that a checkpoint has 20 MB and a step is short.
"""

from __future__ import annotations

import dataclasses

import torch
from measure import see_example

see_example()

import job as example  # noqa: E402
from model import GPT, Config  # noqa: E402

import trainload  # noqa: E402

CONFIG = Config(context=32, layers=2, width=256, heads=4, dropout=0.1, autocast=False)


def job() -> trainload.Job:
    """Build the job, always with the same weights."""
    torch.manual_seed(0)
    batch = {
        "tokens": torch.randint(0, CONFIG.vocabulary, (4, CONFIG.context + 1), dtype=torch.uint8)
    }
    return dataclasses.replace(
        example.job(autocast=False), model=GPT(CONFIG), batch=batch, global_batch=8
    )
