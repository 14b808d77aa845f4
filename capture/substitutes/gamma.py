"""Gamma and Dirichlet variates as operators with known shapes.

torch.distributions builds Beta, Chi2 and Student variates from them.

A variate and its derivative are separate, so that any way of drawing has torch's derivative:
`dirichlet_at(concentration, x)` is x, with the derivative of a variate that turned out to be x.
torch's own kernels compute both, and draw the same numbers as eager mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Dirichlet

_ATEN = torch.ops.aten


@torch.library.custom_op(
    "trainload::dirichlet", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dirichlet(concentration: Tensor) -> Tensor:
    """Draw Dirichlet variates: (..., k) concentrations -> (..., k), one variate in each row."""
    drawn: Tensor = _ATEN._sample_dirichlet.default(concentration)
    return drawn


@torch.library.custom_op("trainload::dirichlet_at", mutates_args=())
def dirichlet_at(concentration: Tensor, x: Tensor) -> Tensor:
    """Return x (..., k), with the derivative of a Dirichlet variate equal to x.

    The derivative is with respect to `concentration`.
    """
    return x.clone()


@torch.library.custom_op("trainload::dirichlet_gradient", mutates_args=())
def dirichlet_gradient(concentration: Tensor, x: Tensor) -> Tensor:
    """Return (..., k): the derivative of each entry of x by its own concentration.

    It is the one before normalization of the row to a sum of 1.
    """
    total = concentration.sum(-1, keepdim=True).expand_as(concentration)
    gradient: Tensor = _ATEN._dirichlet_grad.default(x, concentration, total)
    return gradient


@torch.library.custom_op("trainload::gamma_at", mutates_args=())
def gamma_at(concentration: Tensor, x: Tensor) -> Tensor:
    """Return x, with the derivative of a standard gamma variate equal to x.

    The derivative is with respect to `concentration`.
    """
    return x.clone()


@torch.library.custom_op("trainload::gamma_gradient", mutates_args=())
def gamma_gradient(concentration: Tensor, x: Tensor) -> Tensor:
    """Return the derivative of each element of x by its concentration."""
    gradient: Tensor = _ATEN._standard_gamma_grad.default(concentration, x)
    return gradient


@dirichlet.register_fake
def _(concentration: Tensor) -> Tensor:
    return torch.empty_like(concentration, memory_format=torch.contiguous_format)


for _operator in (dirichlet_at, dirichlet_gradient, gamma_at, gamma_gradient):
    _operator.register_fake(lambda concentration, x: torch.empty_like(x))


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _dirichlet_backward(ctx: Any, by_result: Tensor) -> tuple[Tensor, None]:
    concentration, x = ctx.saved_tensors
    return dirichlet_gradient(concentration, x) * (
        by_result - (x * by_result).sum(-1, keepdim=True)
    ), None


def _gamma_backward(ctx: Any, by_result: Tensor) -> tuple[Tensor, None]:
    return gamma_gradient(*ctx.saved_tensors) * by_result, None


dirichlet_at.register_autograd(_dirichlet_backward, setup_context=_setup_context)
gamma_at.register_autograd(_gamma_backward, setup_context=_setup_context)


def dirichlet_rsample(self: Dirichlet, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008  # torch's own signature
    """Implement `torch.distributions.Dirichlet.rsample` with these operators."""
    concentration = self.concentration.expand(self._extended_shape(sample_shape))
    drawn: Tensor = dirichlet_at(concentration, dirichlet(concentration.detach()))
    return drawn
