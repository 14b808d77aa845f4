"""Gamma and Dirichlet variates, of which torch.distributions makes those of Beta, Chi2 and Student: operators that know their shapes.

A variate and its derivative are apart: `dirichlet_at(concentration, x)` is x, with the derivative of a variate that turned out to be x.
torch's own kernels compute both, and draw what eager mode draws.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Dirichlet

_ATEN = torch.ops.aten


@torch.library.custom_op("trainload::dirichlet", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dirichlet(concentration: Tensor) -> Tensor:
    """(..., k) positive numbers -> (..., k), each row of a Dirichlet distribution."""
    drawn: Tensor = _ATEN._sample_dirichlet.default(concentration)
    return drawn


@torch.library.custom_op("trainload::dirichlet_at", mutates_args=())
def dirichlet_at(concentration: Tensor, x: Tensor) -> Tensor:
    """X (..., k), with the derivative by `concentration` of a Dirichlet variate that is x."""
    return x.clone()


@torch.library.custom_op("trainload::dirichlet_gradient", mutates_args=())
def dirichlet_gradient(concentration: Tensor, x: Tensor) -> Tensor:
    """(..., k): how each entry of x moves with its own concentration, before the row is brought back to a sum of 1."""
    total = concentration.sum(-1, keepdim=True).expand_as(concentration)
    gradient: Tensor = _ATEN._dirichlet_grad.default(x, concentration, total)
    return gradient


@torch.library.custom_op("trainload::gamma_at", mutates_args=())
def gamma_at(concentration: Tensor, x: Tensor) -> Tensor:
    """x, with the derivative by `concentration` of a standard gamma variate that is x."""
    return x.clone()


@torch.library.custom_op("trainload::gamma_gradient", mutates_args=())
def gamma_gradient(concentration: Tensor, x: Tensor) -> Tensor:
    """How each element of x moves with its concentration."""
    gradient: Tensor = _ATEN._standard_gamma_grad.default(concentration, x)
    return gradient


@dirichlet.register_fake
def _(concentration: Tensor) -> Tensor:
    return torch.empty_like(concentration, memory_format=torch.contiguous_format)


for _operator in (dirichlet_at, dirichlet_gradient, gamma_at, gamma_gradient):
    _operator.register_fake(lambda concentration, x: torch.empty_like(x))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _dirichlet_backward(ctx: Any, by_result: Tensor) -> tuple[Tensor, None]:
    concentration, x = ctx.saved_tensors
    return dirichlet_gradient(concentration, x) * (by_result - (x * by_result).sum(-1, keepdim=True)), None


def _gamma_backward(ctx: Any, by_result: Tensor) -> tuple[Tensor, None]:
    return gamma_gradient(*ctx.saved_tensors) * by_result, None


dirichlet_at.register_autograd(_dirichlet_backward, setup_context=_keep)
gamma_at.register_autograd(_gamma_backward, setup_context=_keep)


def dirichlet_rsample(self: Dirichlet, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008  # torch's own signature
    """`torch.distributions.Dirichlet.rsample` by these operators."""
    concentration = self.concentration.expand(self._extended_shape(sample_shape))
    drawn: Tensor = dirichlet_at(concentration, dirichlet(concentration.detach()))
    return drawn
