"""Regions of grad mode and autocast, nested in each other and around operators with bodies."""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import Batch, Family, mean_square, small
from torch import Tensor, nn
from torch._higher_order_ops import map, scan
from torch.nn import functional

FAMILY = Family("control flow")
add = FAMILY.add


@add("no_grad")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = model.first(x).tanh()
        return x + shift

    return small(middle)


@add("enable_grad inside no_grad")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = x.tanh()
            with torch.enable_grad():
                inner = model.first(shift).relu()
        return x + inner

    return small(middle)


@add("set_grad_enabled by a setting")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        for on in (False, True, False):
            with torch.set_grad_enabled(on):
                x = x + model.first(x).sin()
        return x

    return small(middle)


@add("set_grad_enabled as a call")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        shift = model.first(x).cos()
        torch.set_grad_enabled(True)
        return x * shift

    return small(middle)


@add("no_grad as a decorator")
def _() -> Any:
    @torch.no_grad()
    def scale(x: Tensor) -> Tensor:
        return x.square().mean(-1, keepdim=True).rsqrt()

    return small(lambda _, x: x * scale(x))


@add("inference_mode")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            shift = model.first(x.detach()).argmax(-1, keepdim=True).float()
        return x + shift.clone()

    return small(middle)


@add("detach of a branch")
def _() -> Any:
    return small(lambda model, x: x - model.first(x).detach() * x.detach().sigmoid())


@add("no_grad around cond", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))
        return x + shift

    return small(middle)


@add("no_grad around map")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = map(lambda row, w: (row * w).tanh(), x, model.first.weight[0])
        return x * shift

    return small(middle)


@add("no_grad around scan")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            _, sums = scan(
                lambda carry, t: ((carry + t).tanh(), carry * 1.0),
                torch.zeros_like(x[:, 0]),
                x.t().contiguous(),
            )
        return x + sums.t()

    return small(middle)


@add("no_grad inside autocast")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                shift = model.first(x)
            return model.first(x) + shift

    return small(lambda m, x: middle(m, x).float())


@add("autocast inside no_grad")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            shift = model.first(x)
        return x + shift.float()

    return small(middle)


@add("autocast to bfloat16")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.gelu(model.first(x)) @ model.first.weight

    return small(lambda m, x: middle(m, x).float())


@add("autocast to float16")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model.first(x).relu()

    return small(lambda m, x: middle(m, x).float())


@add("autocast off inside on")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model.first(x)
            with torch.autocast("cpu", enabled=False):
                z = model.first(y.float())
            return model.first(z).float()

    return small(middle)


@add("autocast over the whole loss")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean_square(model, batch)

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss
