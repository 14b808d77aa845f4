"""Autograd functions of less common forms."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# torch's apply and decorators have no types.
from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import Family, small
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

FAMILY = Family("functions")
add = FAMILY.add


class Scaled(torch.autograd.Function):
    """x * factor whose gradient is another one; maps over rows by itself."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradients[0] * y * ctx.factor, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, factor: float) -> tuple[Tensor, Any]:
        return Scaled.apply(x, factor), in_dims[0]


class Generated(torch.autograd.Function):
    """x sin(x), whose rule for vmap torch makes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = gradients[0] * (x.cos() * 2 + 1)
        return out


class Cube(torch.autograd.Function):
    """x ** 3, whose backward can be differentiated: by its own formula, which is not quite
    autograd's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = gradients[0] * 2.5 * x**2
        return out


class Once(torch.autograd.Function):
    """tanh whose backward is marked as differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (y,) = ctx.saved_tensors
        out: Tensor = gradients[0] * (1 - y * y) * 0.5
        return out


class Mixed(torch.autograd.Function):
    """Tensors, numbers, a string, a module and None as arguments; three outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, power: int, how: str, part: nn.Linear, nothing: None, w: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        ctx.power, ctx.how = power, how
        ctx.save_for_backward(x, w)
        return part(x) ** power, x @ w, power

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        first, second, _ = gradients
        assert ctx.how == "twice"
        return first * ctx.power + second @ w.t(), None, None, None, None, x.t() @ second * 0.5


class InPlace(torch.autograd.Function):
    """Doubles its input in place, with a gradient of three."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (y,) = ctx.saved_tensors
        out: Tensor = gradients[0] * y.cos() * 3
        return out


class Recomputed(torch.autograd.Function):
    """A block that backward computes again and differentiates by itself, as reversible networks
    do.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.tanh(x @ w.t())
        by_x, by_w = torch.autograd.grad(y, (x, w), gradients[0])
        return by_x, by_w


class Needed(torch.autograd.Function):
    """Asks which of its inputs need a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        by_x = gradients[0] * w * 2 if ctx.needs_input_grad[0] else None
        by_w = (gradients[0] * x).sum(0) if ctx.needs_input_grad[1] else None
        return by_x, by_w


class Broad(torch.autograd.Function):
    """Returns a gradient of more rows than the input, which autograd adds up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0] * 0.5


class Cast(torch.autograd.Function):
    """For mixed precision: torch.amp's decorators."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g = gradients[0]
        return (g @ w.to(g.dtype)).to(x.dtype), (g.t() @ x.to(g.dtype)).to(w.dtype) * 0.5


class Single(torch.autograd.Function):
    """As Cast, but casts its inputs to float32."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp().log1p()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = gradients[0] * x.sigmoid() * 0.7
        return out


class Optional(torch.autograd.Function):
    """Three outputs whose gradients may each be missing; the second input gets one only from the
    second output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * 2, x * w, x + 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        parts = [g * f for g, f in zip(gradients, (5, w, 7), strict=True) if g is not None]
        by_w = None if gradients[1] is None else (gradients[1] * x).sum(0)
        return sum(parts[1:], parts[0]) if parts else None, by_w


class Identity(torch.autograd.Function):
    """Returns its input as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        out: Tensor = gradients[0] * 0.25
        return out


class View(torch.autograd.Function):
    """Returns a view of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1, 2, 4).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        out: Tensor = gradients[0].transpose(1, 2).reshape(-1, 8) * 0.25
        return out


@add("Function with a vmap of its own, mapped")
def _() -> Any:
    return small(lambda _, x: torch.func.vmap(lambda row: Scaled.apply(row, 1.5))(x))


@add("Function with a generated rule, mapped")
def _() -> Any:
    return small(lambda _, x: torch.func.vmap(Generated.apply)(x))


@add("Function inside torch.func.grad")
def _() -> Any:
    return small(lambda _, x: torch.func.grad(lambda t: Generated.apply(t).sum())(x) + x)


@add("Function mapped inside torch.func.grad")
def _() -> Any:
    return small(
        lambda _, x: torch.func.vmap(torch.func.grad(lambda row: Generated.apply(row).sum()))(x) + x
    )


@add("Function differentiated twice")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
        return x + g

    return small(middle)


@add("Function that is differentiable once")
def _() -> Any:
    return small(lambda _, x: Once.apply(x))


@add("Function with arguments of all kinds")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        first, second, power = Mixed.apply(x, 2, "twice", model.part, None, model.first.weight)
        out: Tensor = first + second * power
        return out

    model, batch, loss = small(middle, part=nn.Linear(8, 8))
    model.get_submodule("part").requires_grad_(False)
    return model, batch, loss


@add("Function that writes to its input")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.clone()
        InPlace.apply(y)
        return y + x

    return small(middle)


@add("Function that writes to its input inside a checkpoint")
def _() -> Any:
    return small(
        lambda model, x: checkpoint(
            lambda t: InPlace.apply(model.first(t)).tanh(), x, use_reentrant=False
        )
    )


@add("Function that computes its block again and differentiates it")
def _() -> Any:
    return small(lambda model, x: Recomputed.apply(x, model.first.weight))


@add("Function that asks which gradients are needed")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        out: Tensor = (
            Needed.apply(x, model.first.weight[0])
            + Needed.apply(x.detach(), model.first.bias)
            + Needed.apply(x, x.new_ones(8))
        )
        return out

    return small(middle)


@add("Function whose gradient autograd adds up")
def _() -> Any:
    return small(lambda model, x: Broad.apply(x, model.first.bias))


@add("Function with custom_fwd and custom_bwd in autocast")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = Cast.apply(model.first(x), model.last.weight)
        return out.float()

    return small(middle)


@add("Function with cast_inputs in autocast")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = Single.apply(model.first(x))
        return out

    return small(middle)


@add("Function: gradients that are None, the second output used")
def _() -> Any:
    return small(lambda model, x: Optional.apply(x, model.first.bias)[1])


@add("Function: gradients that are None, two outputs used")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        a, _, c = Optional.apply(x, model.first.bias)
        out: Tensor = a + c.sin()
        return out

    return small(middle)


@add("Function: gradients that are None, in a checkpoint")
def _() -> Any:
    def inner(x: Tensor, bias: Tensor) -> Tensor:
        a, b, _ = Optional.apply(x, bias)
        out: Tensor = a + b.detach()
        return out

    return small(lambda model, x: checkpoint(inner, x, model.first.bias, use_reentrant=False))


@add("Function that returns its input")
def _() -> Any:
    return small(lambda _, x: Identity.apply(x) + x)


@add("Function that returns a view, written to afterwards")
def _() -> Any:
    return small(lambda _, x: View.apply(x).sin().flatten(1))


@add("Function in the branches of cond")
def _() -> Any:
    return small(
        lambda _, x: torch.cond(x.sum() > -1000, lambda t: Cube.apply(t), lambda t: t.cos(), (x,))
    )


@add("Function in a checkpoint, in autocast, in a hook")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(lambda t: Single.apply(model.first(t)), x, use_reentrant=False)
        if y.requires_grad:
            y.register_hook(lambda g: Identity.apply(g) * 2)
        out: Tensor = y.float()
        return out

    return small(middle)
