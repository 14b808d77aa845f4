"""Typical losses and models of training scripts.

Among them are several views of an example, codebooks, flows, and attention over states.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, Small
from torch import Tensor, nn
from torch.nn import functional

FAMILY = Family("recipes")
add = FAMILY.add


def rows() -> Batch:
    """Return a batch of (ROWS, WIDTH) numbers."""
    return {"x": torch.randn(ROWS, WIDTH)}


@add("two views through one call, chunked", mixes_rows=True)
def _() -> Any:
    """SimCLR: both views are encoded in one call."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        first, second = (
            functional.normalize(part, dim=-1)
            for part in model(torch.cat([batch["x"], batch["y"]])).chunk(2, 0)
        )
        scores = first @ second.t() / 0.5
        targets = torch.arange(scores.shape[0])
        return (
            functional.cross_entropy(scores, targets)
            + functional.cross_entropy(scores.t(), targets)
        ) / 2

    return Small(lambda _, x: x.relu()), rows() | {"y": torch.randn(ROWS, WIDTH)}, loss


@add(
    "two dropout masks of one batch agree",
    stacks=2,
)
def _() -> Any:
    """R-Drop."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        first, second = model(torch.cat([batch["x"], batch["x"]])).log_softmax(-1).chunk(2)
        return functional.nll_loss(first, batch["y"]) + functional.kl_div(
            first, second, log_target=True, reduction="batchmean"
        )

    return (
        Small(lambda m, x: m.drop(x.relu()), drop=nn.Dropout(0.3)),
        rows() | {"y": torch.arange(ROWS)},
        loss,
    )


@add("a codebook by the nearest distance")
def _() -> Any:
    """A vector-quantised autoencoder; torch.cdist."""

    class Quantised(Small):
        codes: Any

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            code = self.codes(torch.cdist(hidden, self.codes.weight).argmin(-1))
            out: Tensor = self.last(hidden + (code - hidden).detach())
            return (
                (out - x).square().mean()
                + functional.mse_loss(code, hidden.detach())
                + 0.25 * functional.mse_loss(hidden, code.detach())
            )

    return (
        Quantised(lambda _, x: x, codes=nn.Embedding(6, WIDTH)),
        rows(),
        lambda model, batch: model(batch["x"]),
    )


@add("hardest triplets of the batch", mixes_rows=True)
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        embedded = functional.normalize(model(batch["x"]), dim=-1)
        apart = torch.cdist(embedded, embedded + 1e-3)
        alike = batch["y"][:, None] == batch["y"][None]
        return functional.relu((apart * alike).amax(1) - (apart + 10 * alike).amin(1) + 0.5).mean()

    return Small(lambda _, x: x.relu()), rows() | {"y": torch.tensor([0, 1, 0, 1])}, loss


@add("covariance of the features", mixes_rows=True)
def _() -> Any:
    """VICReg; torch.cov."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        covariance = torch.cov(out.t())
        return (
            functional.relu(1 - (out.var(0) + 1e-4).sqrt()).mean()
            + (covariance.square().sum() - covariance.diag().square().sum()) / WIDTH
        )

    return Small(lambda _, x: x.relu()), rows(), loss


@add("a normalizing flow onto a multivariate normal")
def _() -> Any:
    """Coupling layers with log-determinants; distributions with torch's checks of values on."""

    def loss(model: Any, batch: Batch) -> Any:
        kept, moved = batch["x"].chunk(2, -1)
        scale, shift = model(batch["x"] * torch.tensor([1.0] * 4 + [0.0] * 4)).chunk(2, -1)
        out = torch.cat([kept, moved * scale.tanh().exp() + shift], -1) @ model.mix
        normal: Any = torch.distributions.MultivariateNormal(torch.zeros(WIDTH), torch.eye(WIDTH))
        return -(normal.log_prob(out) + scale.tanh().sum(-1) + torch.slogdet(model.mix)[1]).mean()

    return (
        Small(
            lambda _, x: x.tanh(), mix=nn.Parameter(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])
        ),
        rows(),
        loss,
    )


@add("means and variances by gaussian_nll_loss")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean, spread = model(batch["x"]).chunk(2, -1)
        return functional.gaussian_nll_loss(
            mean, batch["x"][:, :4], functional.softplus(spread), full=True
        )

    return Small(lambda _, x: x.relu()), rows(), loss


@add("attention over a recurrent encoder's states")
def _() -> Any:
    """Its last bias has no gradient but rounding: a softmax does not see it."""

    class Attending(Small):
        cell: Any
        score: Any

        def forward(self, x: Tensor) -> Tensor:
            states, last = self.cell(x)
            scores = self.score(torch.tanh(states + self.first(last[0])[:, None]))
            out: Tensor = self.last((scores.softmax(1) * states).sum(1))
            return out

    parts = {"cell": nn.GRU(WIDTH, WIDTH, batch_first=True), "score": nn.Linear(WIDTH, 1)}
    return (
        Attending(lambda _, x: x, **parts),
        {"x": torch.randn(ROWS, 5, WIDTH)},
        lambda m, b: m(b["x"]).square().mean(),
    )


@add("TransformerDecoder with a causal mask")
def _() -> Any:
    """Its layers look at the mask's values to see whether it is causal."""

    class Decoding(Small):
        encoder: Any
        decoder: Any

        def forward(self, x: Tensor) -> Tensor:
            later = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            out: Tensor = self.last(self.decoder(x, self.encoder(self.first(x), later), later))
            return out

    parts = {
        "encoder": nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 1
        ),
        "decoder": nn.TransformerDecoder(
            nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True), 1
        ),
    }
    return (
        Decoding(lambda _, x: x, **parts),
        {"x": torch.randn(ROWS, 5, WIDTH)},
        lambda m, b: m(b["x"]).square().mean(),
    )
