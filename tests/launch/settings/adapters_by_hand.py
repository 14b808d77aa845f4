"""Low-rank adapters of a small model, and the same adapters added to its layers by hand."""

from __future__ import annotations

from typing import Any

import torch
from tests.launch.optimizer_jobs import Model, adam
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trainload
from trainload.launching.settings.adapter_weights import first_values
from trainload.launching.settings.adapters import Adapters
from trainload.packaging.package import Package

LAYERS = ("second.weight", "third.weight", "last.weight")
ADAPTERS = Adapters(rank=3, layers=("*d.weight", "last.weight"), alpha=6.0)
WITH_NORM = ADAPTERS.model_copy(update={"also": ("norm.*",)})


class ByHand(nn.Module):
    """A linear layer with a hand-written adapter."""

    def __init__(self, layer: nn.Linear, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up, self.scale = nn.Parameter(down), nn.Parameter(up), scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.scale * functional.linear(
            functional.linear(x, self.down), self.up
        )
        return out

    def merged(self) -> Tensor:
        return self.layer.weight.detach() + self.scale * (self.up @ self.down).detach()


class Regions(Model):
    """Model with layers under autocast and in an activation checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            out: Tensor = self.third(torch.tanh(self.second(self.norm(x))))
            return out

        x = torch.tanh(self.first(x))
        hidden: Tensor = checkpoint(inner, x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            out: Tensor = self.last(x + functional.gelu(hidden))
        return out


def by_hand(
    job: trainload.Job, package: Package, adapters: Adapters, seed: int | None = None
) -> trainload.Job:
    """Return the job with adapters in its model.

    Other parameters are frozen, except for those that `adapters` names.
    """
    chosen = adapters.chosen(package.manifest)
    values = first_values(chosen, package.manifest, package.recipe.seed if seed is None else seed)
    kept = adapters.trained_beside(package.manifest)
    for name, parameter in job.model.named_parameters():
        parameter.requires_grad_(name in kept)
    for each in chosen:
        name = each.weight.removesuffix(".weight")
        layer: Any = job.model.get_submodule(name)
        job.model.set_submodule(name, ByHand(layer, values[each.down], values[each.up], each.scale))
    return job


def adam_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return adam(nn.ParameterList(p for p in model.parameters() if p.requires_grad))
