"""Gamma and Dirichlet variates have torch's numbers and derivatives, for any number of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from torch import Tensor, distributions, nn

from trainload.capture.parity.replays import Check
from trainload.capture.substitutes.gamma import dirichlet_rsample, gamma_at
from trainload.freezing.prove import prove


def test_dirichlet_variates_and_their_derivatives_are_torchs() -> None:
    results = []
    for rsample in (distributions.Dirichlet.rsample, dirichlet_rsample):
        torch.manual_seed(0)
        concentration = (torch.rand(5, 3) * 3 + 0.1).requires_grad_()
        x = rsample(distributions.Dirichlet(concentration), torch.Size((2,)))
        x.square().sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        results.append((x.detach(), concentration.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_the_derivative_of_a_gamma_variate_is_torchs() -> None:
    concentration = (torch.rand(50) * 5 + 0.1).requires_grad_()
    x = distributions.Gamma(concentration, torch.ones(50)).rsample()
    (expected,) = torch.autograd.grad(x.square().sum(), concentration)
    (found,) = torch.autograd.grad(
        gamma_at(concentration, x.detach()).square().sum(), concentration
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def mixed(_: Any, x: Tensor) -> Tensor:
    share = distributions.Beta(0.4, 0.4).sample((x.shape[0], 1))
    return share * x + (1 - share) * x.mean(0)


def learned(model: Any, x: Tensor) -> Tensor:
    rate = nn.functional.softplus(x) + 0.1
    return (
        distributions.Gamma(rate, model.first.weight.mean().exp()).rsample()
        if model.training
        else x
    )


def beta(model: Any, x: Tensor) -> Tensor:
    return (
        distributions.Beta(x.exp() + 0.1, nn.functional.softplus(x) + 0.1).rsample()
        if model.training
        else x
    )


def mixture(model: Any, x: Tensor) -> Tensor:
    return x * distributions.Dirichlet(x.exp() + 0.1).rsample() if model.training else x


def heavy(model: Any, x: Tensor) -> Tensor:
    return distributions.StudentT(4.0, x, 1.0).rsample() if model.training else x


@pytest.mark.matrix("Dirichlet")
@pytest.mark.parametrize(
    "middle",
    [mixed, learned, beta, mixture, heavy],
    ids=["mixup", "Gamma", "Beta", "Dirichlet", "StudentT"],
)
def test_a_model_with_them_is_captured_and_derived(middle: Any) -> None:
    program = prove(job(Model(middle)), Check.USUAL).program
    assert str(program.graphs["train"].guard) == "x float32[batch, 8]"
