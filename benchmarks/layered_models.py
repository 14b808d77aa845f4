"""Models of several layers, whose layers a compiler should see once. All weights are random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload

LAYERS = 6
CLASSES = 10
_ROWS = 4


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a model and of its example batch.

    Attributes:
        layers: number of layers of each stack.
        time: tokens of a row.
        width: width of the residual stream.
        vocabulary: number of tokens that there are.
        channels: width of convolutions.
        side: height and width of an image.
        rows: rows of an update.
    """

    layers: int = LAYERS
    time: int = 16
    width: int = 32
    vocabulary: int = 64
    channels: int = 32
    side: int = 8
    rows: int = 8


@dataclass(frozen=True, slots=True)
class Layered:
    """A model, and the number of its repeated parts: an encoder and a decoder are two."""

    job: Callable[[Size], trainload.Job]
    parts: int = 1


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _job(size: Size, model: nn.Module, batch: dict[str, Tensor], loss: Any) -> trainload.Job:
    return trainload.Job(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=_optimizer,
        steps=10,
        global_batch=size.rows,
    )


def _tokens(size: Size, further: int = 0) -> Tensor:
    return torch.randint(1, size.vocabulary, (_ROWS, size.time + further))


def _images(size: Size) -> Tensor:
    return torch.randn(_ROWS, 1, size.side, size.side)


def _labels() -> Tensor:
    return torch.randint(0, CLASSES, (_ROWS,))


def _gpt(size: Size) -> trainload.Job:
    from model import GPT, Config

    config = Config(
        vocabulary=size.vocabulary,
        context=size.time,
        layers=size.layers,
        width=size.width,
        heads=4,
        dropout=0.1,
        autocast=True,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"][:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    return _job(size, GPT(config), {"tokens": _tokens(size, 1)}, loss)


def _llama(size: Size) -> trainload.Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=2 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * size.time,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["tokens"][:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    return _job(size, LlamaForCausalLM(config), {"tokens": _tokens(size, 1)}, loss)


def _vit(size: Size) -> trainload.Job:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        intermediate_size=2 * size.width,
        image_size=size.side,
        patch_size=2,
        num_channels=1,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(pixel_values=batch["image"]).logits
        return functional.cross_entropy(logits, batch["label"])

    batch = {"image": _images(size), "label": _labels()}
    return _job(size, ViTForImageClassification(config), batch, loss)


def _bert(size: Size) -> trainload.Job:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        intermediate_size=2 * size.width,
        max_position_embeddings=2 * size.time,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["tokens"]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["label"].flatten())

    batch = {"tokens": _tokens(size), "label": _tokens(size)}
    return _job(size, BertForMaskedLM(config), batch, loss)


def _t5(size: Size) -> trainload.Job:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_kv=8,
        d_ff=2 * size.width,
        num_layers=size.layers,
        num_decoder_layers=size.layers,
        num_heads=4,
        dropout_rate=0.1,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["tokens"], decoder_input_ids=batch["label"][:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["label"][:, 1:].flatten())

    batch = {"tokens": _tokens(size), "label": _tokens(size, 1)}
    return _job(size, T5ForConditionalGeneration(config), batch, loss)


class Experts(nn.Module):
    """(rows, time, width) -> the same: each position uses the best two of four experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 4, bias=False)
        self.up = nn.Parameter(width**-0.5 * torch.randn(4, width, 2 * width))
        self.down = nn.Parameter((2 * width) ** -0.5 * torch.randn(4, 2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        scores = self.router(normal)
        best, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))
        hidden = functional.gelu(torch.einsum("rtw,ewh->rteh", normal, self.up))
        return x + torch.einsum("rteh,ehw,rte->rtw", hidden, self.down, weights)


class Residual(nn.Module):
    """(rows, channels, side, side) -> the same: two convolutions with batch norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.convolutions[0](x)))
        y = self.norms[1](self.convolutions[1](y))
        return functional.relu(x + y)


class Recurrent(nn.Module):
    """(rows, time, width) -> the same: an LSTM of some layers, whose steps are written out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(size.width, size.width) for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            state = (torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]))
            steps = []
            for step in x.unbind(1):
                state = cell(step, state)
                steps.append(state[0])
            x = torch.stack(steps, 1)
        return x


class Tokens(nn.Module):
    """Classes of sequences of tokens."""

    def __init__(self, size: Size, middle: nn.Module) -> None:
        super().__init__()
        self.enter, self.middle = nn.Embedding(size.vocabulary, size.width), middle
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.head(self.middle(self.enter(tokens)).mean(1))
        return x


class Images(nn.Module):
    """Classes of images."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, size.channels, 3, padding=1)
        self.middle = nn.Sequential(*(Residual(size.channels) for _ in range(size.layers)))
        self.head = nn.Linear(size.channels, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x: Tensor = self.head(self.middle(self.enter(image)).mean((2, 3)))
        return x


def _classifier(size: Size, model: nn.Module, name: str, value: Tensor) -> trainload.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[name]), batch["label"])

    return _job(size, model, {name: value, "label": _labels()}, loss)


def _experts(size: Size) -> trainload.Job:
    middle = nn.Sequential(*(Experts(size.width) for _ in range(size.layers)))
    return _classifier(size, Tokens(size, middle), "tokens", _tokens(size))


def _cnn(size: Size) -> trainload.Job:
    return _classifier(size, Images(size), "image", _images(size))


def _lstm(size: Size) -> trainload.Job:
    return _classifier(size, Tokens(size, Recurrent(size)), "tokens", _tokens(size))


MODELS = {
    "GPT of the demo": Layered(_gpt),
    "Llama, 4 heads on 2 key-value heads": Layered(_llama),
    "ViT": Layered(_vit),
    "BERT": Layered(_bert),
    "T5": Layered(_t5, parts=2),
    "mixture of experts": Layered(_experts),
    "CNN of repeated blocks": Layered(_cnn),
    "LSTM, steps written out": Layered(_lstm),
}
"""Name -> model. The first six are expected to have no graph that stays flat."""
