"""Attention and recurrence."""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import HEADS, ROWS, TIME, WIDTH, Batch, Family, Over, sequences
from torch import Tensor, nn
from torch.nn import functional

from trainload.capture.job.definition import Loss

FAMILY = Family("sequences")
add = FAMILY.add


def attention(dropout: float = 0.0, **options: Any) -> tuple[nn.Module, Batch, Any]:
    """Return (model, batch, loss) of scaled dot-product self-attention."""

    def forward(model: Any, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in model.project(x).chunk(3, -1)
        )
        p = dropout if model.training else 0.0
        return (
            functional.scaled_dot_product_attention(q, k, v, dropout_p=p, **options)
            .transpose(1, 2)
            .flatten(2)
        )

    return sequences(Over(forward, project=nn.Linear(WIDTH, 3 * WIDTH)))


# Attention.


@add("sdpa")
def _() -> Any:
    return attention()


@add("sdpa, causal")
def _() -> Any:
    return attention(is_causal=True)


@add("sdpa with a boolean mask")
def _() -> Any:
    return attention(attn_mask=torch.ones(TIME, TIME, dtype=torch.bool).tril())


@add("sdpa with an additive mask")
def _() -> Any:
    return attention(attn_mask=torch.randn(TIME, TIME))


@add("sdpa with dropout")
def _() -> Any:
    return attention(dropout=0.2)


@add("sdpa, causal with dropout")
def _() -> Any:
    return attention(dropout=0.2, is_causal=True)


@add("sdpa with grouped queries")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        q = model.query(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in model.rest(x).chunk(2, -1))
        return (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )

    return sequences(Over(forward, query=nn.Linear(WIDTH, 16), rest=nn.Linear(WIDTH, 16)))


@add("attention with a mask from the batch")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            q, k, v = (
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.project(x).chunk(3, -1)
            )
            mask = (torch.arange(TIME) < lengths.unsqueeze(1))[:, None, None, :]
            return (
                functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                .transpose(1, 2)
                .flatten(2)
            )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"], batch["lengths"]).square().flatten(1).mean(1).mean()
        return out

    return (
        Model(),
        {"x": torch.randn(ROWS, TIME, WIDTH), "lengths": torch.tensor([3, 6, 4, 5])},
        loss,
    )


@add("sdpa_kernel context")
def _() -> Any:
    """The choice of a kernel is a matter of the machine; the value is the same."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward(model: Any, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in model.project(x).chunk(3, -1)
        )
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return sequences(Over(forward, project=nn.Linear(WIDTH, 3 * WIDTH)))


@add("MultiheadAttention")
def _() -> Any:
    return sequences(
        Over(
            lambda m, x: m.attention(x, x, x)[0],
            attention=nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True),
        )
    )


@add("MultiheadAttention without weights")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Any:
        return model.attention(x, x, x, need_weights=False)[0]

    return sequences(Over(forward, attention=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)))


@add("MultiheadAttention, time first")
def _() -> Any:
    """The batch is the middle of a merged dim inside torch's own code."""

    def forward(model: Any, x: Tensor) -> Any:
        t = x.transpose(0, 1)
        return model.attention(t, t, t)[0].transpose(0, 1)

    return sequences(Over(forward, attention=nn.MultiheadAttention(WIDTH, HEADS)))


class _Padded(nn.Module):
    """A module that is called with x and a padding mask."""

    def __init__(self, part: nn.Module, call: Any) -> None:
        super().__init__()
        self.part = part
        self.call = call

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.call(self.part, x, padding)
        return out


def padded(part: nn.Module, call: Any) -> tuple[nn.Module, Batch, Any]:
    """Return (model, batch, loss) with a key padding mask; the loss excludes padding."""

    def loss(model: nn.Module, batch: Batch) -> Loss:
        kept = (~batch["padding"]).float().unsqueeze(-1)
        out = model(batch["x"], batch["padding"])
        return Loss((out.square() * kept).sum() / kept.sum(), weight=kept.sum())

    padding = torch.arange(TIME) >= torch.tensor([4, 6, 5, 3]).unsqueeze(1)
    return _Padded(part, call), {"x": torch.randn(ROWS, TIME, WIDTH), "padding": padding}, loss


@add("MultiheadAttention with key padding")
def _() -> Any:
    part = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    return padded(part, lambda p, x, padding: p(x, x, x, key_padding_mask=padding)[0])


@add("TransformerEncoder with key padding")
def _() -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.1, batch_first=True)
    return padded(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        lambda p, x, padding: p(x, src_key_padding_mask=padding),
    )


@add("TransformerEncoder, norm first, gelu")
def _() -> Any:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
    )
    return sequences(nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)))


@add("Transformer, encoder and decoder")
def _() -> Any:
    part = nn.Transformer(WIDTH, HEADS, 1, 1, 16, dropout=0.1, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(TIME)
    return sequences(Over(lambda m, x: m.part(x, x, tgt_mask=mask, tgt_is_causal=True), part=part))


# Recurrence.


@add("LSTM")
def _() -> Any:
    return sequences(Over(lambda m, x: m.part(x)[0], part=nn.LSTM(WIDTH, WIDTH, batch_first=True)))


@add("LSTM, two layers, bidirectional")
def _() -> Any:
    return sequences(
        Over(
            lambda m, x: m.part(x)[0],
            part=nn.LSTM(WIDTH, 4, 2, bidirectional=True, batch_first=True),
        )
    )


@add("LSTM with dropout between layers")
def _() -> Any:
    return sequences(
        Over(
            lambda m, x: m.part(x)[0], part=nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)
        )
    )


@add("LSTM with projection")
def _() -> Any:
    return sequences(
        Over(lambda m, x: m.part(x)[0], part=nn.LSTM(WIDTH, 12, proj_size=WIDTH, batch_first=True))
    )


@add(
    "LSTM over packed sequences",
    gap="packing sorts rows by lengths that only the batch knows; padded rows with a mask work",
)
def _() -> Any:
    """The number of steps of each row is in the batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            out: Tensor = self.part(packed)[1][0][-1]
            return out

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"], batch["lengths"]).square().mean(1).mean()
        return out

    return (
        Model(),
        {"x": torch.randn(ROWS, TIME, WIDTH), "lengths": torch.tensor([3, 6, 4, 5])},
        loss,
    )


@add("GRU")
def _() -> Any:
    return sequences(Over(lambda m, x: m.part(x)[0], part=nn.GRU(WIDTH, WIDTH, batch_first=True)))


@add("GRU, bidirectional, time first")
def _() -> Any:
    return sequences(
        Over(
            lambda m, x: m.part(x.transpose(0, 1))[0].transpose(0, 1),
            part=nn.GRU(WIDTH, 4, bidirectional=True),
        )
    )


@add("RNN with relu")
def _() -> Any:
    return sequences(
        Over(
            lambda m, x: m.part(x)[0],
            part=nn.RNN(WIDTH, WIDTH, nonlinearity="relu", batch_first=True),
        )
    )


@add("LSTMCell in a loop")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], WIDTH)
        for t in range(TIME):
            h, c = model.part(x[:, t], (h, c))
        return h

    return sequences(Over(forward, part=nn.LSTMCell(WIDTH, WIDTH)))
