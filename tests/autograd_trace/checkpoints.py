"""Models with checkpoints, each in two versions: with checkpoints, and with plain calls instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tests.capture.jobs import Model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

Around = Callable[..., Any]
"""Type of a function that calls its first argument on the others, in a checkpoint or not."""
MODELS: dict[str, Callable[[Around], nn.Module]] = {}


def checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def keeping(policy: Any) -> Around:
    """Return a function that calls another one in a selective checkpoint."""

    def around(function: Callable[..., Any], *args: Any) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

    return around


def model(build: Callable[[Around], nn.Module]) -> Callable[[Around], nn.Module]:
    MODELS[build.__name__] = build
    return build


def block(width: int = 8, hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Blocks(nn.Module):
    """Residual blocks, each in its own checkpoint."""

    def __init__(self, around: Around, count: int = 3, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width, hidden) for _ in range(count))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for part in self.blocks:
            x = x + self.around(part, x)
        return x


@model
def several(around: Around) -> nn.Module:
    return Blocks(around)


@model
def nested(around: Around) -> nn.Module:
    def outer(m: Any, x: Tensor) -> Tensor:
        inside: Tensor = around(lambda y: m.part(y).tanh().sin(), x.cos())
        return inside.exp()

    return Model(lambda m, x: around(outer, m, x), part=nn.Linear(8, 8))


@model
def dropout(around: Around) -> nn.Module:
    return Model(
        lambda m, x: around(lambda y: F.dropout(m.part(y).tanh(), 0.3, m.training), x) * x,
        part=nn.Linear(8, 8),
    )


@model
def batch_norm(around: Around) -> nn.Module:
    return Model(lambda m, x: around(lambda y: m.norm(y).tanh(), x), norm=nn.BatchNorm1d(8))


@model
def autocast_inside(around: Around) -> nn.Module:
    def low(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = m.part(x).tanh()
        return y.float()

    return Model(lambda m, x: around(low, m, x), part=block())


@model
def inside_autocast(around: Around) -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = around(lambda z: m.part(z).tanh(), x)
        return y.float()

    return Model(middle, part=block())


@model
def in_no_grad(around: Around) -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = around(lambda z: m.part(z).tanh(), x)
        return y * x

    return Model(middle, part=nn.Linear(8, 8))


@model
def no_grad_inside(around: Around) -> nn.Module:
    def inside(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale: Tensor = m.part(x).tanh()
        return scale * x.sin()

    return Model(lambda m, x: around(inside, m, x), part=nn.Linear(8, 8))


@model
def looped(around: Around) -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = around(lambda y: m.part(y).tanh(), x)
        return x

    return Model(middle, part=nn.Linear(8, 8))


@model
def tied_weights(around: Around) -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        y: Tensor = around(lambda z: F.linear(z, m.part.weight).tanh(), x)
        last: Tensor = around(lambda z: F.linear(z, m.part.weight.t()).tanh(), y)
        return last

    return Model(middle, part=nn.Linear(8, 8, bias=False))


@model
def result_used_outside(around: Around) -> nn.Module:
    return Model(lambda m, x: around(lambda y: m.part(y).tanh(), x) * x, part=nn.Linear(8, 8))


@model
def several_results(around: Around) -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        a, b = around(lambda y, z: (m.part(y).tanh(), (y * z).sin()), x, x.cos())
        together: Tensor = a * b
        return together

    return Model(middle, part=nn.Linear(8, 8))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


@model
def function_inside(around: Around) -> nn.Module:
    return Model(
        lambda m, x: around(lambda y: _Scaled.apply(m.part(y).tanh()).relu(), x),  # type: ignore[no-untyped-call]  # torch's own
        part=nn.Linear(8, 8),
    )


@model
def attention(around: Around) -> nn.Module:
    def inside(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.part(x).view(x.shape[0], 4, 2, 3).permute(3, 0, 2, 1).unsqueeze(-1).unbind()
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)

    return Model(lambda m, x: x + around(inside, m, x), part=nn.Linear(8, 24))


@model
def convolution(around: Around) -> nn.Module:
    return Model(
        lambda m, x: around(lambda y: m.part(y.view(-1, 2, 2, 2)).relu().flatten(1), x),
        part=nn.Conv2d(2, 2, 3, padding=1),
    )


@model
def control_flow_inside(around: Around) -> nn.Module:
    def inside(m: Any, x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (m.part(x),))
        return y.tanh()

    return Model(lambda m, x: around(inside, m, x), part=nn.Linear(8, 8))


@model
def in_sequence(around: Around) -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        if around is plainly:
            return m.part(x)  # type: ignore[no-any-return]  # the module's
        return checkpoint_sequential(m.part, 2, x, use_reentrant=False)  # type: ignore[no-any-return, no-untyped-call]  # torch's own

    return Model(middle, part=nn.Sequential(block(), nn.Tanh(), block(), nn.Tanh()))
