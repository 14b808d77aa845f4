"""Jobs of steps.py besides those of examples/gpt."""

from __future__ import annotations

import dataclasses

import torch
from layered_models import MODELS, Size
from measure import see_example

import trainload

see_example()

_SIZE = Size(time=64, width=128, vocabulary=256, side=16, rows=16)


def _job(model: str) -> trainload.Job:
    torch.manual_seed(0)
    return MODELS[model].job(_SIZE)


def gpt_12_layers(*, autocast: bool = False) -> trainload.Job:
    """Return the demo's GPT with 12 layers, in float32."""
    import job as example
    from model import GPT, Config

    torch.manual_seed(0)
    model = GPT(Config(layers=12, autocast=autocast))
    return dataclasses.replace(example.job(autocast), model=model)


def gpt_12_layers_bf16() -> trainload.Job:
    """Return the same with its blocks in bfloat16 under autocast."""
    return gpt_12_layers(autocast=True)


def llama() -> trainload.Job:
    """Return a Llama with grouped key-value heads."""
    return _job("Llama, 4 heads on 2 key-value heads")


def vit() -> trainload.Job:
    """Return a vision transformer."""
    return _job("ViT")


def bert() -> trainload.Job:
    """Return a BERT."""
    return _job("BERT")


def cnn() -> trainload.Job:
    """Return a CNN of residual blocks."""
    return _job("CNN of repeated blocks")
