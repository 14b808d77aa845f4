"""Small models of several layers, whose layers a compiler should see once.

Used by layers.py. All weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload

LAYERS = 6
ROWS, TIME, WIDTH, CLASSES, VOCABULARY = 8, 16, 32, 10, 64


@dataclass(frozen=True, slots=True)
class Layered:
    """A model, and the number of its repeated parts: an encoder and a decoder are two."""

    job: Callable[[], trainload.Job]
    parts: int = 1


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _job(model: nn.Module, batch: dict[str, Tensor], loss: Any) -> trainload.Job:
    return trainload.Job(
        model=model, batch=batch, loss=loss, optimizer=_optimizer, steps=10, global_batch=ROWS
    )


def _tokens(time: int = TIME) -> Tensor:
    return torch.randint(1, VOCABULARY, (4, time))


def _causal(model: nn.Module) -> trainload.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["tokens"][:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    return _job(model, {"tokens": _tokens(TIME + 1)}, loss)


def _gpt() -> trainload.Job:
    from model import GPT, Config

    config = Config(
        vocabulary=VOCABULARY,
        context=TIME,
        layers=LAYERS,
        width=WIDTH,
        heads=4,
        dropout=0.1,
        autocast=True,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"][:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    return _job(GPT(config), {"tokens": _tokens(TIME + 1)}, loss)


def _llama() -> trainload.Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * TIME,
    )
    return _causal(LlamaForCausalLM(config))


def _vit() -> trainload.Job:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(pixel_values=batch["image"]).logits
        return functional.cross_entropy(logits, batch["label"])

    batch = {"image": torch.randn(4, 1, 8, 8), "label": torch.randint(0, CLASSES, (4,))}
    return _job(ViTForImageClassification(config), batch, loss)


def _bert() -> trainload.Job:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=2 * TIME,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["tokens"]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["label"].flatten())

    return _job(BertForMaskedLM(config), {"tokens": _tokens(), "label": _tokens()}, loss)


def _t5() -> trainload.Job:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=4,
        dropout_rate=0.1,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["tokens"], decoder_input_ids=batch["label"][:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["label"][:, 1:].flatten())

    batch = {"tokens": _tokens(), "label": _tokens(TIME + 1)}
    return _job(T5ForConditionalGeneration(config), batch, loss)


class Experts(nn.Module):
    """(rows, time, WIDTH) -> the same: each position uses the best two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(WIDTH**-0.5 * torch.randn(4, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter((2 * WIDTH) ** -0.5 * torch.randn(4, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        scores = self.router(normal)
        best, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))
        hidden = functional.gelu(torch.einsum("rtw,ewh->rteh", normal, self.up))
        return x + torch.einsum("rteh,ehw,rte->rtw", hidden, self.down, weights)


class Residual(nn.Module):
    """(rows, WIDTH, height, width) -> the same: two convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.convolutions[0](x)))
        y = self.norms[1](self.convolutions[1](y))
        return functional.relu(x + y)


class Recurrent(nn.Module):
    """(rows, time, WIDTH) -> the same: an LSTM of LAYERS layers, whose steps are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(LAYERS))

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

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.enter, self.middle = nn.Embedding(VOCABULARY, WIDTH), middle
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.head(self.middle(self.enter(tokens)).mean(1))
        return x


class Images(nn.Module):
    """Classes of images."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.middle = nn.Sequential(*(Residual() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x: Tensor = self.head(self.middle(self.enter(image)).mean((2, 3)))
        return x


def _classifier(model: nn.Module, name: str, value: Tensor) -> trainload.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[name]), batch["label"])

    return _job(model, {name: value, "label": torch.randint(0, CLASSES, (4,))}, loss)


MODELS = {
    "GPT of the demo": Layered(_gpt),
    "Llama, 4 heads on 2 key-value heads": Layered(_llama),
    "ViT": Layered(_vit),
    "BERT": Layered(_bert),
    "T5": Layered(_t5, parts=2),
    "mixture of experts": Layered(
        lambda: _classifier(
            Tokens(nn.Sequential(*(Experts() for _ in range(LAYERS)))), "tokens", _tokens()
        )
    ),
    "CNN of repeated blocks": Layered(
        lambda: _classifier(Images(), "image", torch.randn(4, 1, 8, 8))
    ),
    "LSTM, steps written out": Layered(
        lambda: _classifier(Tokens(Recurrent()), "tokens", _tokens())
    ),
}
"""Name -> model. The first six are expected to have no graph that stays flat."""
