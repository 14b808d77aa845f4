"""Job of the bfloat16 part of the parity benchmark."""

from __future__ import annotations

import dataclasses

import torch
from measure import see_example

see_example()

import job as example  # noqa: E402
from model import GPT, Config  # noqa: E402

import trainload  # noqa: E402


def model() -> GPT:
    """Build the demo's GPT with autocast, without dropout, always with the same weights."""
    torch.manual_seed(0)
    return GPT(Config(dropout=0.0))


def bf16() -> trainload.Job:
    """Build the demo's job without dropout.

    Eager's dropout masks differ between ranks, so curves with dropout could not be compared.
    """
    return dataclasses.replace(example.job(), model=model())
