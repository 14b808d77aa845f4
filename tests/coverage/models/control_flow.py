"""Control flow: cond, loops, map, scan, vmap and Python branches."""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, small
from tests.coverage.models import grad_mode_regions
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

FAMILY = Family("control flow")
FAMILY.cases += grad_mode_regions.FAMILY.cases
add = FAMILY.add
_NO_SOUND = "the graph would hold one way through the code, and the data decide which one is right"


# Branches on data, and loops.


@add("cond", mixes_rows=True)
def _() -> Any:
    return small(
        lambda _, x: torch.cond(x.mean() > 0, lambda t: t.sin(), lambda t: t.cos() * 2, (x,))
    )


@add("cond over parameters of a closure")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        return torch.cond(
            x.mean() > 100, lambda t: model.first(t), lambda t: model.other(t).relu(), (x,)
        )

    return small(middle, other=nn.Linear(WIDTH, WIDTH))


@add("cond after autocast", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model.first(x)
        return x * torch.cond(
            y.float().sum() > 0, lambda t: model.first(t), lambda t: t * 2, (y.float(),)
        )

    return small(middle)


@add("cond between autocast and no_grad", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model.first(x).float()
        z = torch.cond(y.sum() > 0, lambda t: model.first(t), lambda t: t * 2, (y,))
        with torch.no_grad():
            shift = model.first(z)
        return torch.cond(shift.sum() > 0, lambda t, s: t * s, lambda t, s: t - s, (z, shift))

    return small(middle)


@add("cond inside cond", mixes_rows=True)
def _() -> Any:
    def inner(t: Tensor) -> Tensor:
        return torch.cond(t.amax() > 0.5, lambda u: u * 2, lambda u: u * u, (t,))

    return small(lambda _, x: torch.cond(x.mean() > -100, inner, lambda t: t - 1, (x,)))


@add("cond on a size", mixes_rows=True)
def _() -> Any:
    """The predicate is known for each number of rows."""
    return small(
        lambda _, x: torch.cond(
            torch.tensor(x.shape[0]) > 6, lambda t: t.sin(), lambda t: t.cos(), (x,)
        )
    )


@add("cond with several outputs", mixes_rows=True)
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        a, b = torch.cond(x.sum() > 0, lambda t: (t.sin(), t * 2), lambda t: (t.cos(), t * 3), (x,))
        return a * b

    return small(middle)


@add("while_loop of a fixed number of rounds")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        def more(i: Tensor, t: Tensor) -> Tensor:
            return i < 3

        def body(i: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, (t * 1.1).sin()

        return while_loop(more, body, (torch.zeros((), dtype=torch.int64), x))[1]

    return small(middle)


@add("while_loop until the data say so", mixes_rows=True)
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        def more(t: Tensor) -> Tensor:
            return t.abs().sum() > 1.0

        return while_loop(more, lambda t: (t * 0.5,), (x,))[0] + x

    return small(middle)


@add("while_loop without gradient", mixes_rows=True)
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            count, _scaled = while_loop(
                lambda i, t: t.abs().sum() > 1.0,
                lambda i, t: (i + 1, t * 0.5),
                (torch.zeros((), dtype=torch.int64), x.detach()),
            )
        return x * count

    return small(middle)


@add("map")
def _() -> Any:
    return small(lambda model, x: map(lambda row, w: (w @ row).relu(), x, model.first.weight))


@add("map over a pytree")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        out = map(
            lambda pair, w: {"sum": pair[0] + pair[1] * w, "product": pair[0] * pair[1]},
            (x, x.cos()),
            torch.tensor(0.5),
        )
        return out["sum"] + out["product"]

    return small(middle)


@add("scan")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        def step(carry: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            carry = torch.tanh(carry * 0.5 + t)
            return carry, carry * 2.0

        _, out = scan(step, torch.zeros(x.shape[0]), x.t().contiguous())
        return out.t()

    return small(middle)


@add("scan over parameters of a closure")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        def step(carry: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            carry = torch.tanh(carry @ model.first.weight + t.unsqueeze(-1))
            return carry, carry.mean(-1)

        _, out = scan(step, torch.zeros_like(x), x.t().contiguous())
        return out.t()

    return small(middle)


@add("scan with dropout outside")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.25, model.training)
        _, out = scan(
            lambda c, t: ((c + t).tanh(), c + t), torch.zeros_like(x[:, 0]), x.t().contiguous()
        )
        return out.t()

    return small(middle)


@add("associative_scan")
def _() -> Any:
    return small(
        lambda _, x: associative_scan(lambda a, b: a + b, x.sigmoid(), 1, combine_mode="generic")
    )


@add("vmap")
def _() -> Any:
    return small(lambda model, x: torch.func.vmap(lambda row: (model.first.weight @ row).tanh())(x))


@add("vmap with dims")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda column, w: column * w, in_dims=(1, 0), out_dims=1)(
            x, model.first.weight[0]
        )

    return small(middle)


@add("torch.func.grad in forward")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: model.first(t).square().sum())(x)

    return small(middle)


@add("vmap of grad")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: model.first(row).tanh().sum()))(x)

    return small(middle)


@add("jvp")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        value, tangent = torch.func.jvp(
            lambda t: model.first(t).tanh(), (x,), (torch.ones_like(x),)
        )
        return value + tangent

    return small(middle)


@add("vjp")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        value, pull = torch.func.vjp(lambda t: model.first(t).tanh(), x)
        return pull(value)[0]

    return small(middle)


@add("jacrev")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(lambda row: (model.first.weight @ row).tanh()))(
            x
        ).sum(-1)

    return small(middle)


@add("functional_call")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        doubled = {name: p * 2 for name, p in model.first.named_parameters()}
        out: Tensor = torch.func.functional_call(model.first, doubled, (x,))
        return out

    return small(middle)


# Python control flow.


@add("a loop over a Python range")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        for power in range(1, 4):
            x = x + model.first(x).sin() / power
        return x

    return small(middle)


@add("a loop over layers with early layers skipped by a setting")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        for index, layer in enumerate(model.layers):
            if index % 2 == 0 or model.training:
                x = x + layer(x).relu()
        return x

    return small(middle, layers=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


@add("a branch on the mode")
def _() -> Any:
    return small(lambda model, x: x.relu() if model.training else x.sigmoid())


@add("a generator and a comprehension")
def _() -> Any:
    return small(
        lambda model, x: sum((head(x) for head in model.heads), torch.zeros(())),
        heads=nn.ModuleList([nn.Linear(WIDTH, WIDTH)] * 2),
    )


@add("a loop over the time steps of a fixed length")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for column in x.unbind(1):
            state = model.cell(column.unsqueeze(1), state)
        return state

    return small(middle, cell=nn.GRUCell(1, WIDTH))


@add("if on a value of the batch", refused=_NO_SOUND)
def _() -> Any:
    return small(lambda _, x: x.sin() if x.sum() > 0 else x.cos())


@add(
    "for over a count in the batch",
    refused="the number of rounds is known only when the batch is there",
)
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch)
        return out.square().mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Linear(WIDTH, WIDTH)

        def forward(self, batch: Batch) -> Tensor:
            x = batch["x"]
            for _ in range(int(batch["count"].max())):
                x = self.step(x).tanh()
            return x

    return Model(), {"x": torch.randn(ROWS, WIDTH), "count": torch.tensor([1, 2, 3, 2])}, loss


@add("while on a value", refused="the number of rounds is known only when the batch is there")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        while x.abs().amax() > 0.5:
            x = x * 0.5
        return x

    return small(middle)


@add("try and except around a check of values", refused=_NO_SOUND)
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        try:
            if bool((x > 100).any()):
                raise ValueError
            return x.sin()
        except ValueError:
            return x.cos()

    return small(middle)


@add(
    "a branch on the number of rows",
    refused="one graph holds one of the branches, and the number of rows may change",
)
def _() -> Any:
    return small(lambda _, x: x.sin() if x.shape[0] > 4 else x.cos())


@add(
    "a Python counter in forward",
    refused="the number lives outside of the state that a package carries",
)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        model.calls = getattr(model, "calls", 0) + 1
        return x * (1.0 / model.calls)

    return small(middle)


@add(
    "stochastic depth by Python's random",
    refused="Python's generator is not a part of the graph: every step would take the same layers",
)
def _() -> Any:
    import random

    generator = random.Random(1)

    def middle(model: Any, x: Tensor) -> Tensor:
        for _ in range(8):
            if generator.random() < 0.5:
                x = x + model.first(x).sin()
        return x

    return small(middle)


@add("stochastic depth by a mask")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        if not model.training:
            return x + model.first(x)
        keep = torch.rand(x.shape[0], 1) < 0.8
        return x + torch.where(keep, model.first(x), torch.zeros(())) / 0.8

    return small(middle)


@add("batch norm inside cond", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        return torch.cond(model.first.bias.sum() > -100, model.norm, lambda t: t.sin(), (x,))

    return small(middle, norm=nn.BatchNorm1d(WIDTH))


@add("a buffer that a branch of cond assigns anew", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        def averaged(t: Tensor) -> Tensor:
            model.mean = 0.9 * model.mean + 0.1 * t.detach().mean(0)
            return t - model.mean

        return torch.cond(x.sum() > -100, averaged, lambda t: t * model.mean, (x,))

    return small(middle, mean=torch.zeros(WIDTH))


@add("checkpoint inside cond")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        def deep(t: Tensor) -> Tensor:
            out: Tensor = checkpoint(lambda u: model.first(u).tanh(), t, use_reentrant=False)
            return out

        return torch.cond(x.sum() > -100, deep, lambda t: t.sin(), (x,))

    return small(middle)


@add("nonzero", mixes_rows=True)
def _() -> Any:
    """A value whose size depends on the data."""
    return small(lambda _, x: x + x[torch.nonzero(x[:, 0] > 0).squeeze(-1)].sum(0))


@add("masked_select")
def _() -> Any:
    """A value whose size depends on the data."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        return torch.masked_select(out, batch["x"] > 0).square().sum() / out.shape[0]

    model, batch, _ = small(lambda _, x: x.tanh())
    return model, batch, loss


@add("where instead of a branch", mixes_rows=True)
def _() -> Any:
    return small(lambda _, x: torch.where(x.sum() > 0, x.sin(), x.cos()))
