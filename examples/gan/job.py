"""A GAN on scikit-learn's digits: two losses with two optimizers, which take turns.

The discriminator has two updates for each update of the generator.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload
from trainload import Graph, Turn

NOISE = 16
PIXELS = 64
ROWS = 64
ROUNDS = 1500


class GAN(nn.Module):
    """`generator`: noise (rows, 16) -> images (rows, 64) in [0, 1].

    `discriminator`: images -> logits (rows, 1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, PIXELS),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(PIXELS, 128),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(128, 128),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(128, 1),
        )


def generator_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the generator's loss on new images, as many as `batch["image"]` has rows."""
    assert isinstance(model, GAN)
    fake = model.generator(torch.randn(batch["image"].shape[0], NOISE))
    return functional.softplus(-model.discriminator(fake)).mean()


def discriminator_loss(model: nn.Module, batch: dict[str, Tensor]) -> trainload.Loss:
    """Return the discriminator's loss on real and generated images."""
    assert isinstance(model, GAN)
    with torch.no_grad():
        fake = model.generator(torch.randn(batch["image"].shape[0], NOISE))
    real, judged = model.discriminator(batch["image"]), model.discriminator(fake)
    accuracy = 0.5 * ((real > 0).float().mean() + (judged < 0).float().mean())
    return trainload.Loss(
        (functional.softplus(-real) + functional.softplus(judged)).mean(),
        metrics={"accuracy": accuracy},
    )


def job() -> trainload.Job:
    """Build the job."""
    torch.manual_seed(0)
    return trainload.Job(
        model=GAN(),
        batch={"image": torch.rand(4, PIXELS)},
        graphs={
            "generator": Graph(
                loss=generator_loss,
                optimizer=lambda model: torch.optim.Adam(
                    model.get_submodule("generator").parameters(), lr=1e-3, betas=(0.5, 0.99)
                ),
                ema=trainload.Ema(0.99),
            ),
            "discriminator": Graph(
                loss=discriminator_loss,
                optimizer=lambda model: torch.optim.Adam(
                    model.get_submodule("discriminator").parameters(), lr=1e-3, betas=(0.5, 0.99)
                ),
            ),
        },
        loop=[Turn("discriminator", times=2, fresh=True), Turn("generator", fresh=True)],
        predict=lambda model, batch: model.get_submodule("generator")(
            torch.randn(batch["image"].shape[0], NOISE)
        ),
        steps=ROUNDS,
        global_batch=ROWS,
    )
