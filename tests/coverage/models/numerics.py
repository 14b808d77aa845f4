"""Derivatives of operators that are easy to get wrong.

Among them are selections, reductions, linear algebra, complex numbers and random draws.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, mean_square, small
from torch import Tensor, nn
from torch.nn import functional

FAMILY = Family("numerics")
add = FAMILY.add


_block_diag: Any = torch.block_diag


def _positive(model: Any) -> Any:
    """Return a positive definite matrix of the first layer's weights.

    It is (WIDTH, WIDTH), and its eigenvalues are well separated.
    """
    w = model.first.weight
    return w @ w.t() + torch.diag(torch.arange(1.0, WIDTH + 1))


# Selections.


@add("where over a branch whose gradient is NaN")
def _() -> Any:
    """Autograd's gradient is NaN times zero, unless the input is made safe first, as here."""
    return small(lambda _, x: torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0))


@add("index_put with accumulation")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        places = torch.tensor([0, 0, 3, 3, 3])
        y = torch.zeros_like(x).index_put(
            (torch.arange(x.shape[0]).unsqueeze(1), places), x[:, :5] ** 2, accumulate=True
        )
        y[:, places] = y[:, places] * model.first.bias[:5]
        return y + x

    return small(middle)


@add("scatter_reduce of every kind")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        index = torch.tensor([0, 1, 0, 2, 2, 3, 0, 1]).expand_as(x)
        kinds = ("sum", "mean", "amax", "amin", "prod")
        return sum(
            (
                torch.ones_like(x).scatter_reduce(1, index, x, kind, include_self=kind == "prod")
                for kind in kinds
            ),
            x,
        )

    return small(middle)


@add("segment_reduce", mixes_rows=True)
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        lengths = torch.tensor([3, 2, 3])
        return x + torch.segment_reduce(x.t().contiguous(), "mean", lengths=lengths, axis=0).sum(
            0
        ).unsqueeze(1)

    return small(middle)


@add("cummax, cummin, kthvalue, median, mode")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        chosen = x.kthvalue(3, -1)[0] + x.median(-1)[0] * 2 + x.mode(-1)[0] * 3 + x.nanmedian(-1)[0]
        return x.cummax(-1)[0] + x.cummin(-1)[0] * 2 + chosen.unsqueeze(-1)

    return small(middle)


@add("amax and amin with ties, aminmax, std, prod with zeros")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Any:
        y = x.relu()
        low, high = x.aminmax(dim=-1)
        each = (
            y.amax(-1)
            + y.amin(-1) * 3
            + low * high
            + x.std(-1)
            + (y[:, :3] + 0.0).prod(-1)
            + x.norm(dim=-1)
        )
        return x + each.unsqueeze(-1)

    return small(middle)


@add("sort and argsort as a permutation")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        order = torch.argsort(x, dim=-1, descending=True, stable=True)
        return (
            x.gather(-1, order).cumsum(-1)
            + torch.take_along_dim(x.sin(), order, -1)
            + x.msort().sum(0, keepdim=True) * 0
        )

    return small(middle)


@add("masked_scatter and repeat_interleave", mixes_rows=True)
def _() -> Any:
    """masked_scatter takes what it writes from the beginning of the whole source."""

    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.repeat_interleave(torch.tensor([1, 2, 1, 2, 2, 3, 1, 4]), dim=1, output_size=16)[
            :, ::2
        ]
        return torch.zeros_like(x).masked_scatter(torch.arange(WIDTH) % 2 == 0, x) + y

    return small(middle)


@add("unfold and as_strided")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        windows = x.unfold(1, 4, 2).sum(-1)
        return (
            functional.pad(windows, (0, 5)) + x.as_strided((x.shape[0], WIDTH), (WIDTH, 1)).square()
        )

    return small(middle)


@add(
    "unique values of the batch",
    refused="how many there are is known only when the batch is there, and sizes the result's rows",
)
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        values = torch.unique(batch["k"])
        if values.shape[0] > 2:
            return mean_square(model, batch)
        return mean_square(model, batch) * 2

    model, batch, _ = small(lambda _, x: x.relu())
    return model, {**batch, "k": torch.tensor([1, 2, 2, 5])}, loss


@add("losses averaged over the groups of the batch", mixes_rows=True)
def _() -> Any:
    """By unique's inverse, whose values have the size of the batch."""

    def loss(model: nn.Module, batch: Batch) -> Any:
        each = model(batch["x"]).square().mean(1)
        _, inverse, counts = torch.unique(batch["k"], return_inverse=True, return_counts=True)
        return (each / counts[inverse]).sum()

    model, batch, _ = small(lambda _, x: x.relu())
    return model, {**batch, "k": torch.tensor([1, 2, 2, 5])}, loss


# Linear algebra.


@add("eigenvalues, singular values, QR")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        matrix = _positive(model)
        values, vectors = torch.linalg.eigh(matrix)
        u, s, v = torch.linalg.svd(
            model.first.weight + torch.diag(torch.arange(1.0, WIDTH + 1)), full_matrices=False
        )
        q, r = torch.linalg.qr(matrix)
        return (
            x @ vectors.square()
            + values
            + (u @ torch.diag(s.log()) @ v).sum(0)
            + (q.square() @ r).sum(0)
        )

    return small(middle)


@add("inverses, pseudo-inverses, matrix functions")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        matrix = _positive(model)
        low = torch.linalg.cholesky(matrix)
        sign, size = torch.linalg.slogdet(matrix)
        out = x @ torch.linalg.inv(matrix) + torch.cholesky_solve(x.t(), low).t() + (sign * size)
        out = (
            out
            + x @ torch.linalg.pinv(matrix)
            + x @ torch.linalg.matrix_exp(model.first.weight * 0.1)
        )
        solved: Tensor = (
            out
            + torch.linalg.solve_triangular(low, x.t(), upper=False).t()
            + x @ torch.linalg.matrix_power(matrix * 0.1, 3)
        )
        return solved

    return small(middle)


@add(
    "least squares",
    gap=(
        "torch has no fake kernel for lstsq; linalg.solve of the normal equations, or pinv, is"
        " captured"
    ),
)
def _() -> Any:
    return small(lambda model, x: x + torch.linalg.lstsq(_positive(model), x.t()).solution.t())


@add("batched solve and determinants")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Any:
        matrix = x.unsqueeze(-1) * x.unsqueeze(-2) + torch.eye(WIDTH) * 2
        return (
            torch.linalg.solve(matrix, x.unsqueeze(-1)).squeeze(-1)
            + torch.logdet(matrix).unsqueeze(-1)
            + torch.linalg.det(matrix * 0.5)[:, None]
        )

    return small(middle)


@add("distances of every norm", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        centres = model.last.weight
        each = [torch.cdist(x, centres, p=p) for p in (1.0, 2.0, 3.0, float("inf"))]
        return sum(each, x) + functional.pairwise_distance(x, centres[0]).unsqueeze(1)

    return small(middle)


@add("products: kron, cross, tensordot, outer, block_diag")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        kron = torch.kron(model.first.weight[:2, :2], model.last.weight[:4, :4])
        cross = torch.linalg.cross(x[:, :3], x[:, 3:6])
        block = _block_diag(model.first.weight[:3, :3], model.last.weight[:5, :5])
        return (
            x @ kron
            + functional.pad(cross, (0, 5))
            + torch.tensordot(x, block, dims=([1], [0]))
            + torch.outer(x.sum(1), model.first.bias)
        )

    return small(middle)


# Complex numbers and transforms.


@add("rotary embedding by complex numbers")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(x.shape[0], WIDTH // 2, 2)) * torch.polar(
            torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) * 0.3
        )
        return torch.view_as_real(turned).flatten(1)

    return small(middle)


@add("complex weights held as real parameters")
def _() -> Any:
    """A spectral layer, as in Fourier neural operators."""

    def middle(model: Any, x: Tensor) -> Any:
        weight = torch.view_as_complex(model.weight)
        return (
            torch.fft.irfft(torch.fft.rfft(x) * weight, n=WIDTH)
            + torch.fft.fft(x).abs()
            + torch.angle(torch.fft.fft(x + 3)).sin()
        )

    return small(middle, weight=nn.Parameter(torch.randn(WIDTH // 2 + 1, 2)))


@add("two-dimensional and shifted transforms")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Any:
        grid = torch.fft.fftshift(torch.fft.fft2(x.view(-1, 2, 4)))
        return torch.fft.ifft2(grid).real.flatten(1) + grid.imag.flatten(1) * 0.1

    return small(middle)


@add("stft and its inverse")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(9))
            self.window = nn.Buffer(torch.hann_window(16))

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.stft(x, 16, 8, window=self.window, return_complex=True)
            spectrum = spectrum * self.gain.view(1, 9, 1)
            return torch.istft(
                spectrum, 16, 8, window=self.window, length=64
            ) + spectrum.abs().mean((1, 2)).unsqueeze(1)

    return Model(), {"x": torch.randn(ROWS, 64)}, mean_square


# Special functions.


@add("special functions")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        p = x.sigmoid()
        each = [
            p.erfinv(),
            p.logit(),
            torch.lgamma(p + 1),
            torch.digamma(p + 1),
            torch.special.i0e(x),
            torch.special.ndtri(p),
            torch.xlogy(p, p),
        ]
        each += [
            torch.special.entr(p),
            x.sinc(),
            torch.logaddexp(x, p),
            torch.hypot(x, p + 1),
            torch.atan2(x, p + 1),
            torch.special.log_ndtr(x),
        ]
        return torch.stack(each).sum(0)

    return small(middle)


@add("rounding, remainders and other steps")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = (
            x
            + x.round()
            + x.frac() * 2
            + x.remainder(0.7)
            + x.fmod(0.3)
            + x.clamp(-0.5, 0.5)
            + x.copysign(x.flip(1))
            + x.nan_to_num(0.0)
        )
        return (
            y
            + torch.heaviside(x.detach(), torch.tensor(0.5))
            + x.lerp(x.sin(), 0.3)
            + torch.addcmul(x, x, x.cos(), value=0.5)
        )

    return small(middle)


@add("fake quantisation with a learned scale")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        scaled = x / model.scale
        return ((scaled.round() - scaled).detach() + scaled) * model.scale

    return small(middle, scale=nn.Parameter(torch.tensor(0.2)))


# Images.


def images(forward: Any, **parts: nn.Module) -> tuple[nn.Module, Batch, Any]:
    """Return (model, batch, loss) of a function of (model, x) over images (rows, 3, 8, 8)."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict(parts)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = forward(self.parts, x)
            return out

    return Model(), {"x": torch.randn(ROWS, 3, 8, 8)}, mean_square


@add("interpolation of every mode")
def _() -> Any:
    def forward(parts: Any, x: Tensor) -> Tensor:
        y = parts["conv"](x)
        each = [
            functional.interpolate(y, scale_factor=1.5, mode=mode)
            for mode in ("nearest", "nearest-exact", "area")
        ]
        each += [
            functional.interpolate(y, size=(12, 12), mode=mode, align_corners=False)
            for mode in ("bilinear", "bicubic")
        ]
        each += [
            functional.interpolate(y, scale_factor=(1.5, 1.5), mode="bilinear", antialias=True)
        ]
        return torch.stack(each).sum(0)

    return images(forward, conv=nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"))


@add("interpolation to the size of another input")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (
                functional.interpolate(
                    self.conv(x), size=y.shape[-2:], mode="bilinear", align_corners=True
                )
                * y
            )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"], batch["y"])
        return out.square().mean()

    return Model(), {"x": torch.randn(ROWS, 3, 8, 8), "y": torch.randn(ROWS, 1, 12, 10)}, loss


@add("grid_sample of every mode")
def _() -> Any:
    def forward(parts: Any, x: Tensor) -> Tensor:
        y = parts["conv"](x)
        grid = y[:, :2].permute(0, 2, 3, 1).tanh() * 1.3
        modes = [
            ("bilinear", "border"),
            ("bicubic", "zeros"),
            ("nearest", "reflection"),
            ("bilinear", "reflection"),
        ]
        return torch.stack(
            [functional.grid_sample(y, grid, m, p, align_corners=m == "bicubic") for m, p in modes]
        ).sum(0)

    return images(forward, conv=nn.Conv2d(3, 4, 3, padding=1))


@add("pooling with places, and back")
def _() -> Any:
    def forward(parts: Any, x: Tensor) -> Tensor:
        y = parts["conv"](x)
        values, places = functional.max_pool2d(y, 2, return_indices=True)
        up = functional.max_unpool2d(values, places, [2, 2])
        lp = functional.lp_pool2d(y.abs() + 0.1, 2.0, 2)
        return (
            up
            + functional.adaptive_max_pool2d(y, 1)
            + functional.adaptive_avg_pool2d(y, (3, 5)).mean((2, 3), True)
            + lp.mean((1, 2, 3), True)
        )

    return images(forward, conv=nn.Conv2d(3, 4, 3, padding=1))


@add("three-dimensional affine_grid, corners aligned")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Linear(27, 12)

        def forward(self, x: Tensor) -> Tensor:
            grid = functional.affine_grid(
                self.theta(x.flatten(1)).view(-1, 3, 4), list(x.shape), align_corners=True
            )
            return functional.grid_sample(x, grid, align_corners=True)

    return Model(), {"x": torch.randn(ROWS, 1, 3, 3, 3)}, mean_square


# Random draws.


@add("mixup by a Beta distribution", mixes_rows=True)
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"]
        share = torch.distributions.Beta(0.4, 0.4).sample((x.shape[0], 1))
        return mean_square(model, {"x": share * x + (1 - share) * x.roll(1, 0)})

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add("a shuffle of the batch's rows", mixes_rows=True)
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"]
        other = x[torch.randperm(x.shape[0])]
        return mean_square(model, {"x": x + 0.1 * other})

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add("Poisson rates of many sizes")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        rates = x.detach().abs() * torch.tensor([0.0, 0.1, 1.0, 3.0, 10.0, 20.0, 30.0, 40.0])
        return x * torch.poisson(rates) if model.training else x

    return small(middle)


@add("a relaxed categorical and its straight-through form")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        if not model.training:
            return x.softmax(-1)
        soft = torch.distributions.RelaxedOneHotCategorical(torch.tensor(0.7), logits=x).rsample()
        hard = functional.one_hot(soft.argmax(-1), WIDTH).to(x.dtype)
        return hard + soft - soft.detach()

    return small(middle)


@add(
    "an adaptive softmax",
    gap="each cluster's rows are chosen by nonzero, and an empty choice is a Python branch",
)
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [4, 10])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.loss(x, y).loss
            return out

    return (
        Model(),
        {"x": torch.randn(ROWS, WIDTH), "y": torch.tensor([0, 5, 12, 19])},
        lambda m, b: m(b["x"], b["y"]),
    )


@add("pad_sequence of slices")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        parts = [x[:, :3].t(), x[:, 3:].t()]
        padded = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=0.5)
        return padded.sum(0).t().repeat(1, 2)[:, :WIDTH]

    return small(middle)


@add("EmbeddingBag with offsets and weights")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, WIDTH, mode="sum", include_last_offset=False)

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            offsets = torch.arange(x.shape[0]) * x.shape[1]
            out: Tensor = self.bag(x.flatten(), offsets, per_sample_weights=w.flatten())
            return out

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_square(lambda _: model(batch["x"], batch["w"]), {"x": batch["x"]})  # type: ignore[arg-type]  # called alone

    return Model(), {"x": torch.randint(0, 20, (ROWS, 5)), "w": torch.rand(ROWS, 5)}, loss
