"""Rare forms of hooks, grad modes, control flow with closures, and derivatives in the loss."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# torch's apply, register_hook and decorators have no types.
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, Small, mean_square, small
from torch import Tensor, nn
from torch._higher_order_ops import map, while_loop
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint

FAMILY = Family("derivatives")
add = FAMILY.add


_jvp: Any = jvp
_vjp: Any = vjp


# Hooks.


@add("hook that converts a value of forward")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda g: g * x.to(g.dtype).contiguous())
        return y * x

    return small(middle)


@add("hook removed before it acts")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            handle = x.register_hook(lambda g: g * 3)
            handle.remove()
        return x.sin()

    return small(middle)


@add("two hooks on one tensor")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda g: g + 1)
            y.register_hook(lambda g: g * 2)
        return y

    return small(middle)


@add("hook on a tensor that is written to afterwards")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda g: g * 3)
        y.add_(1).mul_(x.detach())
        return y

    return small(middle)


@add("hook on a view of a tensor")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x * 2
        part = y[:, :4]
        if part.requires_grad:
            part.register_hook(lambda g: g * 3)
        return torch.cat([part.sin(), y[:, 4:]], 1) + y

    return small(middle)


@add("hook on the batch's gradient inside the loss")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"])
        if out.requires_grad:
            out.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return out.square().mean()

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add("forward hooks that change outputs, with pre-hooks on keywords")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)
            self.part.register_forward_hook(
                lambda module, args, kwargs, out: out * kwargs["input"].mean(1, True),
                with_kwargs=True,
            )
            self.part.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {"input": kwargs["input"] * 2}),
                with_kwargs=True,
            )

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.part(input=x)
            return out

    return Model(), {"x": torch.randn(ROWS, WIDTH)}, mean_square


@add("backward pre-hook and backward hook of one module, both changing")
def _() -> Any:
    model, batch, loss = small(lambda model, x: model.part(x).tanh(), part=nn.Linear(WIDTH, WIDTH))
    part = model.get_submodule("part")
    part.register_full_backward_pre_hook(lambda module, outer: (cast(Any, outer)[0] * 2,))
    part.register_full_backward_hook(lambda module, inner, outer: (cast(Any, inner)[0] + 0.1,))
    return model, batch, loss


@add("backward hook of a module with several inputs")
def _() -> Any:
    model, batch, loss = small(
        lambda model, x: model.part(x.sin(), x.cos()), part=nn.Bilinear(WIDTH, WIDTH, WIDTH)
    )
    model.get_submodule("part").register_full_backward_hook(
        lambda module, inner, outer: tuple(cast(Any, inner)[i] * (2 + i) for i in (0, 1))
    )
    return model, batch, loss


@add("retain_grad and a gradient read in the same step")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.retain_grad()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True) if y.requires_grad else (x.cos(),)
        return y + g

    return small(middle)


# Grad modes and detached values.


@add("detach_ in forward")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        y = model.first(x).sin()
        y.detach_()
        return x + y

    return small(middle)


@add("requires_grad_ on a detached value")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(y.square().sum(), y)
        return x * g

    return small(middle)


@add("requires_grad_(False) on an activation")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        y = y.requires_grad_(False)
        return x + y.sin()

    return small(middle)


@add("no_grad as a generator")
def _() -> Any:
    @torch.no_grad()
    def shifts(x: Tensor) -> Iterator[Tensor]:
        for factor in (1.0, 2.0):
            yield x * factor

    return small(lambda _, x: x + sum(shifts(x), torch.zeros(())))


@add("no_grad as a decorator of a class's method, with autocast")
def _() -> Any:
    class Teacher(nn.Linear):
        @torch.no_grad()
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    return small(
        lambda model, x: x + model.part(x).float() * x,
        part=Teacher(WIDTH, WIDTH).requires_grad_(False),
    )


@add("grad mode set by hand and put back")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        y = x.sin()
        torch.set_grad_enabled(before)
        return y * x

    return small(middle)


@add("autocast without its cache")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            y = model.first(model.first(x))
        return y.float()

    return small(middle)


@add("exponential moving average of the model itself", mixes_rows=True)
def _() -> Any:
    """A teacher whose weights are buffers, moved in forward."""

    class Model(Small):
        def __init__(self) -> None:
            super().__init__(lambda _, x: x)
            self.teacher = nn.Buffer(self.first.weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.teacher.lerp_(self.first.weight, 0.1)
            student = self.first(x)
            with torch.no_grad():
                target = nn.functional.linear(x, self.teacher)
            out: Tensor = self.last(student) + (student - target).square()
            return out

    return Model(), {"x": torch.randn(ROWS, WIDTH)}, mean_square


# In-place writes.


@add("writes to views before and after their use")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x * 1.5
        left = y[:, :4]
        used = left * 2
        left.add_(x[:, 4:])
        y[:, 4:] = used
        y.view(-1, 2, 4)[:, 1].add_(x[:, :4])
        return y + left.repeat(1, 2)

    return small(middle)


@add("index_fill, masked_fill and scatter in place")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x * 1.0
        y.masked_fill_(x > 1, 0.5).index_fill_(1, torch.tensor([2]), 0.0)
        y.scatter_(1, torch.tensor([[0, 1]]).expand(x.shape[0], 2), x[:, 2:4])
        y[:, 5] += x[:, 1] ** 2
        return y

    return small(middle)


# Control flow.


@add("cond after a checkpoint", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        y = checkpoint(model.first, x, use_reentrant=False)
        return torch.cond(y.sum() > 0, lambda t: model.first(t), lambda t: model.last(t) * 2, (y,))

    return small(middle)


@add("dropout inside cond", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        return torch.cond(
            x.sum() > 0,
            lambda t: nn.functional.dropout(t, 0.3, model.training),
            lambda t: t.sin(),
            (x,),
        )

    return small(middle)


@add("map over rows with a closure over parameters")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        def one(row: Any, *_: Any) -> Any:
            return (model.first.weight @ row).sigmoid() * model.first.bias

        out: Tensor = map(one, x)
        return out

    return small(middle)


@add("while_loop with a closure over a parameter")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Any:
        _, y = while_loop(
            lambda i, _: i < 3,
            lambda i, t: (i + 1, (t @ model.first.weight).tanh()),
            (torch.tensor(0), x),
        )
        return y + x

    return small(middle)


@add(
    "a branch of cond that writes to its operand",
    refused="a branch may not write to what it is given",
    mixes_rows=True,
)
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda t: t.mul_(2), lambda t: t.sin(), (x.clone(),))

    return small(middle)


# Derivatives of derivatives.


@add("gradient penalty with several inputs")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Any:
        with torch.enable_grad():
            a, b = batch["x"].clone().requires_grad_(), batch["y"].clone().requires_grad_()
            out = model(a * b.sin()).sum(1)
            by_a, by_b = torch.autograd.grad(out.sum(), (a, b), create_graph=True)
        return out.mean() + (by_a.norm(dim=1) - 1).square().mean() + by_b.square().mean()

    model, batch, _ = small(lambda _, x: x.tanh())
    return model, {**batch, "y": torch.randn(ROWS, WIDTH)}, loss


@add("gradient penalty with grad_outputs and an unused input")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Any:
        with torch.enable_grad():
            a, b = batch["x"].clone().requires_grad_(), torch.zeros(3).requires_grad_()
            out = model(a)
            by_a, _ = torch.autograd.grad(
                out, (a, b), torch.ones_like(out) * 0.5, create_graph=True, allow_unused=True
            )
        return out.mean() + by_a.square().mean()

    model, batch, _ = small(lambda _, x: x.tanh())
    return model, batch, loss


@add("jvp of the model along the batch, in the loss")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Any:
        out, along = _jvp(model, (batch["x"],), (batch["v"],))
        return (out + along).square().mean(1).mean()

    model, batch, _ = small(lambda _, x: x.tanh())
    return model, {**batch, "v": torch.randn(ROWS, WIDTH)}, loss


@add("vjp with several outputs, pulled back twice")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Any:
        (a, b), pull = _vjp(lambda t: (t.sin(), t.square()), x)
        (first,) = pull((torch.ones_like(a), b))
        (second,) = pull((a, torch.zeros_like(b)))
        return a + first + second

    return small(middle)


@add("hessian in the loss")
def _() -> Any:
    """A Laplacian for each row, as in physics-informed networks."""

    def loss(model: nn.Module, batch: Batch) -> Any:
        second = vmap(hessian(lambda row: model(row).sum()))(batch["x"])
        return (
            (second.diagonal(dim1=-2, dim2=-1).sum(-1) - model(batch["x"]).sum(1)).square().mean()
        )

    model, batch, _ = small(lambda _, x: x.tanh())
    return model, batch, loss


@add("jacfwd of jacrev by hand")
def _() -> Any:
    return small(
        lambda _, x: (
            x + vmap(jacfwd(jacrev(lambda row: (row**3).sum())))(x).diagonal(dim1=-2, dim2=-1)
        )
    )


@add("per-row gradients by parameters")
def _() -> Any:
    """As in differential privacy: each row's gradient of the parameters has a norm."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        parameters: dict[str, Any] = dict(model.named_parameters())

        def one(weights: dict[str, Tensor], row: Tensor) -> Tensor:
            out: Tensor = functional_call(model, weights, (row.unsqueeze(0),))
            return out.square().mean()

        each = vmap(torch.func.grad(one), (None, 0))(parameters, batch["x"])
        return sum((g.flatten(1).square().sum(1) for g in each.values()), torch.zeros(())).mean()

    model, batch, _ = small(lambda _, x: x.tanh())
    return model, batch, loss


@add("an ensemble by stack_module_state")
def _() -> Any:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            stacked = {
                name: torch.stack([dict(m.named_parameters())[name] for m in self.members])
                for name in ("weight", "bias")
            }
            out: Tensor = (
                vmap(lambda w: functional_call(self.members[0], w, (x,)))(stacked).tanh().mean(0)
            )
            return out

    return Ensemble(), {"x": torch.randn(ROWS, WIDTH)}, mean_square


@add(
    "stack_module_state in forward",
    refused="torch copies the parameters there, so that no gradient reaches the model's",
)
def _() -> Any:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            stacked, _ = stack_module_state(list(self.members))
            out: Tensor = vmap(lambda w: functional_call(self.members[0], w, (x,)))(stacked).mean(0)
            return out

    return Ensemble(), {"x": torch.randn(ROWS, WIDTH)}, mean_square


@add("RNG in a checkpoint, kept apart from what follows")
def _() -> Any:
    def inner(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.4, True) * torch.rand_like(x)

    def middle(model: Any, x: Tensor) -> Tensor:
        if not model.training:
            return x
        y = checkpoint(inner, x, use_reentrant=False, preserve_rng_state=True)
        return nn.functional.dropout(y, 0.4, True)

    return small(middle)


@add(
    "saved_tensors_hooks that round",
    refused="backward would be given other values than forward saved, which no graph says",
)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.dtype, t.bfloat16()), lambda kept: kept[1].to(kept[0])
        ):
            out: Tensor = model.first(x).tanh().square()
        return out

    return small(middle)


@add("saved_tensors_hooks that keep numpy arrays")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach().numpy().copy(), torch.from_numpy
        ):
            out: Tensor = model.first(x).tanh()
        return out

    return small(middle)
