"""The job of the bfloat16 part of the parity check."""

from __future__ import annotations

import dataclasses

import torch
from measure import see_example

see_example()

import job as example  # noqa: E402
from model import GPT, Config  # noqa: E402

import trainload  # noqa: E402


def model() -> GPT:
    """The demo's GPT with its autocast region and without dropout, always with the same weights."""
    torch.manual_seed(0)
    return GPT(Config(dropout=0.0))


def bf16() -> trainload.Job:
    """The demo's job without dropout: eager's masks differ from rank to rank, so that its curves
    could not be compared.
    """
    return dataclasses.replace(example.job(), model=model())
