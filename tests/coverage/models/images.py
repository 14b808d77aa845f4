"""Convolutions, grids and other image operations."""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import ROWS, Batch, Family, Over, mean_square
from torch import Tensor, nn
from torch.nn import functional

FAMILY = Family("images")
add = FAMILY.add


def images(*layers: nn.Module) -> tuple[nn.Module, Batch, Any]:
    """Return (model, batch, loss) of a stack of layers over (rows, 3, 8, 8)."""
    return nn.Sequential(*layers), {"x": torch.randn(ROWS, 3, 8, 8)}, mean_square


@add("a convolutional classifier")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    stack = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8, 5),
    )
    return stack, {"x": torch.randn(ROWS, 3, 8, 8), "y": torch.tensor([0, 1, 2, 3])}, loss


@add("transposed convolution and PixelShuffle")
def _() -> Any:
    return images(nn.ConvTranspose2d(3, 8, 3, stride=2), nn.PixelShuffle(2), nn.AvgPool2d(2))


@add("Conv1d and Conv3d")
def _() -> Any:
    return images(nn.Flatten(2), nn.Conv1d(3, 4, 5), nn.Unflatten(2, (3, 4, 5)), nn.Conv3d(4, 2, 2))


@add("Unfold and Fold")
def _() -> Any:
    return images(nn.Conv2d(3, 3, 1), nn.Unfold(2, stride=2), nn.Fold((8, 8), 2, stride=2))


@add("interpolate and grid_sample")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        grid = model.grid(x.flatten(1)).view(-1, 8, 8, 2).tanh()
        return functional.interpolate(
            functional.grid_sample(x, grid, align_corners=False), scale_factor=2.0, mode="bilinear"
        )

    return Over(forward, grid=nn.Linear(192, 128)), {"x": torch.randn(ROWS, 3, 8, 8)}, mean_square


@add("affine_grid")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        theta = model.theta(x.flatten(1)).view(-1, 2, 3)
        return functional.grid_sample(
            x,
            functional.affine_grid(theta, list(x.shape), align_corners=False),
            align_corners=False,
        )

    return Over(forward, theta=nn.Linear(192, 6)), {"x": torch.randn(ROWS, 3, 8, 8)}, mean_square


@add("channels_last")
def _() -> Any:
    model, batch, loss = images(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    return model.to(memory_format=torch.channels_last), batch, loss  # type: ignore[call-overload]  # its stubs lack this one
