"""Functions that read sizes or values are captured correctly for any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.jobs import Batch, Model, job
from torch import Tensor, nn
from torch.nn import functional

from trainload.capture.program import Program
from trainload.capture.substitutes.shape_functions import SUBSTITUTES
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError

ROWS = (2, 11, 31)
Loss = Callable[[nn.Module, Batch], Any]
_normal: Any = torch.distributions.Normal


def two_views(model: nn.Module, batch: Batch) -> Any:
    """Compute two views in one call, and split the result."""
    first, second = model(torch.cat([batch["x"], batch["x"].flip(1)])).chunk(2)
    return (first - second).square().mean() + first.exp().mean()


def three_views(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"]
    parts = torch.chunk(model(torch.cat([x, x + 1, x - 1])), 3, dim=0)
    return sum(
        (float(n) * part.square().mean() for n, part in enumerate(parts, 1)), torch.zeros(())
    )


def two_inputs(model: nn.Module, batch: Batch) -> Any:
    """Compute two columns in one call."""
    first, second = model(torch.cat([batch["x"], batch["y"]])).chunk(2, 0)
    return (first @ second.t()).logsumexp(-1).mean()


def distances(model: nn.Module, batch: Batch) -> Any:
    """Return the mean distance from the outputs to the shifted rows."""
    return torch.cdist(model(batch["x"]), batch["x"] + 3.0).mean()


def covariance(model: nn.Module, batch: Batch) -> Any:
    return (
        torch.cov(model(batch["x"]).t()).square().sum()
        + model(batch["x"]).t().cov(correction=0).trace()
    )


def likelihood(model: nn.Module, batch: Batch) -> Any:
    out = model(batch["x"])
    return functional.gaussian_nll_loss(out, batch["x"], out.square(), full=True) + _log_likelihood(
        out, batch["x"]
    )


def _log_likelihood(out: Tensor, x: Tensor) -> Any:
    distribution: Any = torch.distributions.MultivariateNormal(torch.zeros(8), torch.eye(8) * 2.0)
    return -(distribution.log_prob(out) + _normal(out, out.exp()).log_prob(x).sum(-1)).mean()


def at_rows(program: Program, model: nn.Module, rows: int, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return the captured loss and eager's."""
    generator = torch.Generator().manual_seed(rows)
    batch = {
        spec.name: torch.randn(rows, 8, generator=generator)
        for spec in program.graphs["train"].inputs
    }
    captured, *_ = program.graphs["train"].exported.module(check_guards=False)(batch)
    return captured, loss(model, batch)


@pytest.mark.matrix("two_views", "covariance", "likelihood")  # a test below covers distances
@pytest.mark.parametrize(
    "loss", [two_views, three_views, two_inputs, distances, covariance, likelihood]
)
def test_any_number_of_rows_gives_what_eager_gives(loss: Loss) -> None:
    model = Model()
    names = ("x", "y") if loss is two_inputs else ("x",)
    program = capture(job(model, loss=loss, batch={name: torch.randn(4, 8) for name in names}))
    for rows in ROWS:
        torch.testing.assert_close(*at_rows(program, model, rows, loss), rtol=2e-5, atol=1e-6)


def test_distances_of_many_rows_are_the_ones_of_a_matrix_product() -> None:
    model = Model()
    program = capture(job(model, loss=distances, batch={"x": torch.randn(40, 8)}))
    torch.testing.assert_close(*at_rows(program, model, 11, distances), rtol=2e-5, atol=1e-6)


def masks() -> tuple[Tensor, Tensor]:
    """Return a causal mask and one that is not causal."""
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return causal, causal | torch.ones(5, 5, dtype=torch.bool).tril(-3)


def encoder() -> nn.Module:
    """Return an encoder; torch would read its mask's values to see whether it is causal."""
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), 1
    ).train()


class Decoder(nn.Module):
    """A decoder, in which torch would do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(8, 2, 8, 0.0, batch_first=True), 1
        )
        self.first = encoder()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        later = masks()[0] if mask is None else mask
        out: Tensor = self.layers(x, self.first(x, later), later)
        return out


def assert_taken(model: nn.Module, loss: Loss) -> None:
    """Check that the graph of a model computes eager's loss for another number of rows."""
    program = capture(job(model, loss=loss, batch={"x": torch.randn(4, 5, 8)}))
    x = torch.randn(7, 5, 8)
    captured, *_ = program.graphs["train"].exported.module(check_guards=False)({"x": x})
    torch.testing.assert_close(captured, loss(model, {"x": x}), rtol=2e-5, atol=1e-6)


@pytest.mark.slow  # the next test covers an encoder
def test_a_transformers_mask_is_taken_as_it_is() -> None:
    def loss(model: Any, batch: Batch) -> Any:
        return model(batch["x"]).square().mean() + model(batch["x"], masks()[1]).mean()

    assert_taken(Decoder().train(), loss)


@pytest.mark.slow
def test_an_encoders_mask_is_taken_as_it_is() -> None:
    assert_taken(encoder(), lambda model, batch: model(batch["x"], masks()[1]).square().mean())


def moved(dtype: torch.dtype) -> Loss:
    return lambda model, batch: model.to("cpu", dtype)(batch["x"].to(dtype)).square().mean()


def test_a_module_that_is_moved_to_where_it_is_stays_the_same() -> None:
    model = Model()
    program = capture(job(model, loss=moved(torch.float32)))
    torch.testing.assert_close(
        *at_rows(program, model, 7, moved(torch.float32)), rtol=2e-5, atol=1e-6
    )


def test_a_module_that_is_cast_in_forward_is_refused() -> None:
    with pytest.raises(CaptureError):
        capture(job(Model(), loss=moved(torch.bfloat16)))


def test_halves_of_a_number_of_rows_that_may_be_odd_are_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        first, second = model(batch["x"]).chunk(2)
        return first.mean() - second.mean()

    with pytest.raises(CaptureError, match=r"only have certain sizes|only one size"):
        capture(job(Model(), loss=loss))


@pytest.mark.slow  # test_errors.py covers branches on values
def test_a_distribution_that_is_told_to_look_at_its_values_is_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        return -_normal(model(batch["x"]), 1.0, validate_args=True).log_prob(batch["x"]).mean()

    with pytest.raises(CaptureError, match="Python branches on a value"):
        capture(job(Model(), loss=loss))


@pytest.mark.parametrize(
    ("function", "args", "options"),
    [
        (torch.chunk, (torch.arange(7.0).view(7, 1), 3), {}),
        (torch.cdist, (torch.randn(3, 4), torch.randn(5, 4)), {"p": 1.0}),
        (torch.cov, (torch.randn(3, 9),), {}),
        (torch.cov, (torch.randn(9),), {"correction": 0}),
        (torch.cov, (torch.randn(2, 4, dtype=torch.complex64),), {}),
        (torch.cov, (torch.randn(3, 9),), {"aweights": torch.rand(9)}),
        (
            functional.gaussian_nll_loss,
            (torch.randn(3, 4), torch.randn(3, 4), torch.rand(3)),
            {"reduction": "sum"},
        ),
        (
            functional.gaussian_nll_loss,
            (torch.randn(3, 4), torch.randn(3, 4), torch.zeros(3, 1)),
            {"full": True, "reduction": "none"},
        ),
    ],
)
def test_a_substitute_is_the_function(function: Any, args: Any, options: Any) -> None:
    torch.testing.assert_close(SUBSTITUTES[function](*args, **options), function(*args, **options))
