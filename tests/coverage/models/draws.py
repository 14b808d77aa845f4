"""Random numbers in forward and in the loss."""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, Over, mean_square, sequences, small
from tests.coverage.models.images import images
from torch import Tensor, nn
from torch.nn import functional

FAMILY = Family("draws")
add = FAMILY.add


@add("Dropout")
def _() -> Any:
    return small(lambda model, x: model.part(x), part=nn.Dropout(0.3))


@add("Dropout in place")
def _() -> Any:
    return small(lambda model, x: model.part(x * 1.0), part=nn.Dropout(0.3, inplace=True))


@add("Dropout2d")
def _() -> Any:
    return images(nn.Conv2d(3, 6, 3), nn.Dropout2d(0.3), nn.Conv2d(6, 2, 3))


@add("AlphaDropout")
def _() -> Any:
    return small(lambda model, x: model.part(x), part=nn.AlphaDropout(0.3))


@add("FeatureAlphaDropout")
def _() -> Any:
    return images(nn.Conv2d(3, 6, 3), nn.FeatureAlphaDropout(0.3), nn.Conv2d(6, 2, 3))


@add("RReLU")
def _() -> Any:
    return small(lambda model, x: model.part(x), part=nn.RReLU())


@add("dropout of a value with the batch inside")
def _() -> Any:
    """(time, rows, width): masks belong to rows."""

    def forward(model: Any, x: Tensor) -> Any:
        return model.part(functional.dropout(x.transpose(0, 1), 0.3, model.training)).transpose(
            0, 1
        )

    return sequences(Over(forward, part=nn.Linear(WIDTH, WIDTH)))


@add("dropout of parameters")
def _() -> Any:
    """As DropConnect: one mask for the whole batch."""

    def middle(model: Any, x: Tensor) -> Tensor:
        return functional.linear(x, functional.dropout(model.first.weight, 0.3, model.training))

    return small(middle)


@add("gumbel_softmax")
def _() -> Any:
    return small(
        lambda model, x: functional.gumbel_softmax(x, tau=0.7) if model.training else x.softmax(-1)
    )


@add("gumbel_softmax, hard")
def _() -> Any:
    return small(
        lambda model, x: (
            functional.gumbel_softmax(x, hard=True) if model.training else x.softmax(-1)
        )
    )


@add("a variational autoencoder")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(WIDTH, 8)
            self.decoder = nn.Linear(4, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, -1)
            z = (
                mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
                if self.training
                else mean
            )
            return self.decoder(z), mean, log_variance

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out, mean, log_variance = model(batch["x"])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        result: Tensor = ((out - batch["x"]).square().sum(1) + divergence).mean()
        return result

    return Model(), {"x": torch.randn(ROWS, WIDTH)}, loss


@add("a diffusion step")
def _() -> Any:
    """Draws a time for each row (randint) and noise (randn_like)."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"]
        if model.training:
            t, noise = torch.randint(0, 100, (x.shape[0],)), torch.randn_like(x)
        else:
            t, noise = torch.full((x.shape[0],), 50), torch.ones_like(x)
        level = (t.float() / 100).unsqueeze(1)
        out: Tensor = (model(x * (1 - level) + noise * level) - noise).square().mean(1).mean()
        return out

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add("torch.distributions")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Any:
        mean, scale = model(batch["x"]).chunk(2, -1)
        distribution: Any = torch.distributions.Normal(
            mean, functional.softplus(scale) + 0.1, validate_args=False
        )
        value = distribution.rsample() if model.training else distribution.mean
        return -distribution.log_prob(value.detach()).mean(1).mean() + value.square().mean(1).mean()

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add("multinomial")
def _() -> Any:
    """REINFORCE: an action is drawn for each row."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        action = (
            torch.multinomial(logits.softmax(-1), 1)
            if model.training
            else logits.argmax(-1, keepdim=True)
        )
        return -(
            functional.log_softmax(logits, -1).gather(1, action).squeeze(1)
            * action.squeeze(1).float()
        ).mean()

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add("randperm", mixes_rows=True)
def _() -> Any:
    """A shuffle of features."""
    return small(lambda model, x: x + x[:, torch.randperm(WIDTH)] if model.training else x)


@add("poisson")
def _() -> Any:
    return small(lambda model, x: x + torch.poisson(x.detach().abs()) if model.training else x)


@add("noise in evaluation too")
def _() -> Any:
    """As in a variational autoencoder whose validation loss is drawn."""
    return small(lambda _, x: x + 0.1 * torch.randn_like(x))


@add("bernoulli masks")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        if not model.training:
            return x
        return x * torch.bernoulli(torch.full_like(x, 0.7)) + torch.empty_like(x).bernoulli_(0.5)

    return small(middle)


@add("mixup", mixes_rows=True)
def _() -> Any:
    """Rows are mixed with their neighbours by a drawn factor."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rows = batch["x"].shape[0]
        factor = torch.rand(rows, 1) if model.training else torch.full((rows, 1), 0.5)
        x = factor * batch["x"] + (1 - factor) * batch["x"].flip(0)
        return mean_square(model, {"x": x})

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss
