"""Models that change or use the backward pass.

They have autograd.Function, hooks, checkpoints, or gradients in the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, Small, mean_square, small
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

FAMILY = Family("autograd")
add = FAMILY.add
Context = Any


def applied(function: Any) -> Callable[[Any, Tensor], Tensor]:
    """Return a middle for `Small` that applies an autograd.Function to the hidden values."""
    return lambda _, x: function.apply(x)


class Halved(torch.autograd.Function):
    """Identity whose gradient is halved."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Tensor:
        out: Tensor = gradients[0] * 0.5
        return out


class Rounded(torch.autograd.Function):
    """Straight-through estimator: rounds, and passes the gradient through."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Tensor:
        out: Tensor = gradients[0]
        return out


class Clipped(torch.autograd.Function):
    """Clamp that saves its input, with a leaky gradient outside."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, most: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.most = most
        return x.clamp(-most, most)

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= ctx.most, gradients[0], gradients[0] * 0.1), None


class Linear(torch.autograd.Function):
    """x @ w.T with both gradients written out, scaled differently from autograd's."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 0.9 * gradients[0] @ w, 1.1 * gradients[0].t() @ x


class Split(torch.autograd.Function):
    """Two outputs with custom gradients."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Tensor:
        out: Tensor = gradients[0] * 2 - gradients[1]
        return out


class Ignoring(torch.autograd.Function):
    """x * y with no gradient for y."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradients[0] * y, None


class TopValue(torch.autograd.Function):
    """The largest value and its index, which is marked as not differentiable."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> tuple[Tensor, Tensor]:
        value, place = x.max(-1)
        ctx.mark_non_differentiable(place)
        ctx.save_for_backward(place)
        ctx.width = x.shape[-1]
        return value, place

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Tensor:
        (place,) = ctx.saved_tensors
        return 3.0 * functional.one_hot(place, ctx.width) * gradients[0].unsqueeze(-1)


class SetUp(torch.autograd.Function):
    """The newer form, with setup_context."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:  # type: ignore[override]  # the form that has setup_context
        return x * factor

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor * 0.25, None


class Outer(torch.autograd.Function):
    """Applies another Function in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        out: Tensor = Halved.apply(x) * 2
        return out

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Tensor:
        out: Tensor = Halved.apply(gradients[0]) * 3
        return out


class Reversed(torch.autograd.Function):
    """Gradient reversal, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class Unset(torch.autograd.Function):
    """Has an unused output, whose gradient is None with set_materialize_grads(False)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Tensor | None:
        first, second = gradients
        return first * 5 if second is None else first + second


@add("Function: scaled gradient")
def _() -> Any:
    return small(applied(Halved))


@add("Function: straight-through estimator")
def _() -> Any:
    return small(applied(Rounded))


@add("Function: saved tensors and a number")
def _() -> Any:
    return small(lambda _, x: Clipped.apply(x, 0.3))


@add("Function: gradients of two inputs")
def _() -> Any:
    return small(lambda model, x: Linear.apply(x, model.first.weight))


@add("Function: several outputs")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        a, b = Split.apply(x)
        return a * 2 + b

    return small(middle)


@add("Function: an input without gradient")
def _() -> Any:
    return small(lambda model, x: Ignoring.apply(x, model.first.weight[0]))


@add("Function: an output that is not differentiable")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        value, place = TopValue.apply(x)
        return x + (value * place).unsqueeze(-1)

    return small(middle)


@add("Function: setup_context")
def _() -> Any:
    return small(lambda _, x: SetUp.apply(x, 1.5))


@add("Function: nested")
def _() -> Any:
    return small(applied(Outer))


@add("Function: gradient reversal")
def _() -> Any:
    return small(lambda model, x: x + model.first(Reversed.apply(x, 0.7)))


@add("Function: a gradient that is None")
def _() -> Any:
    return small(lambda _, x: Unset.apply(x)[0])


@add("Function inside no_grad")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = Halved.apply(x)
        return x + shift

    return small(middle)


@add("Function inside a checkpoint")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            lambda t: Halved.apply(model.first(t)).tanh(), x, use_reentrant=False
        )
        return out

    return small(middle)


@add("Function inside autocast")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return Halved.apply(model.first(x))

    return small(lambda m, x: middle(m, x).float())


@add("Function: applied twice")
def _() -> Any:
    return small(lambda model, x: Halved.apply(model.first(Halved.apply(x)).tanh()))


# Hooks.


@add("tensor hook")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g * 0.5)
        return x.tanh()

    return small(middle)


@add("tensor hook that clamps")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return y * x

    return small(middle)


@add("parameter hook")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    model.get_parameter("first.weight").register_hook(lambda g: g * 0.25)
    return model, batch, loss


@add("parameter hook that masks")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    mask = (torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 2).float()
    model.get_parameter("last.weight").register_hook(lambda g: g * mask)
    return model, batch, loss


@add(
    "hook after a gradient is accumulated",
    refused=(
        "it runs after the step's gradients are there, and may change parameters: no graph of the"
        " step has a place for it"
    ),
)
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 0.5

    model.get_parameter("last.weight").register_post_accumulate_grad_hook(halve)
    return model, batch, loss


@add("module forward pre-hook")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    model.get_submodule("last").register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    return model, batch, loss


@add("module forward hook")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    model.get_submodule("first").register_forward_hook(lambda _, __, out: out.sin())
    return model, batch, loss


@add("forward hook that keeps an activation")
def _() -> Any:
    model, batch, _ = small(lambda _, x: x.relu())
    kept: dict[str, Tensor] = {}
    model.get_submodule("first").register_forward_hook(lambda _, __, out: kept.update(hidden=out))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        main = mean_square(model, batch)
        return main + 0.1 * kept["hidden"].square().mean(1).mean()

    return model, batch, loss


@add("module full backward hook")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    model.get_submodule("last").register_full_backward_hook(lambda _, gi, __: (gi[0] * 0.5,))
    return model, batch, loss


@add("module full backward pre-hook")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    model.get_submodule("last").register_full_backward_pre_hook(lambda _, go: (go[0] * 2.0,))
    return model, batch, loss


@add("backward hook that only looks")
def _() -> Any:
    """A hook that returns nothing changes no gradient."""
    model, batch, loss = small(lambda _, x: x.relu())
    seen: list[float] = []
    model.get_submodule("last").register_full_backward_hook(lambda _, __, go: seen.append(0.0))
    return model, batch, loss


# Checkpointing.


def _block(model: Any, x: Tensor) -> Tensor:
    out: Tensor = functional.gelu(model.first(x)) * x
    return out


@add("checkpoint, not reentrant")
def _() -> Any:
    return small(lambda model, x: checkpoint(_block, model, x, use_reentrant=False))


@add("checkpoint, reentrant")
def _() -> Any:
    return small(lambda model, x: checkpoint(_block, model, x, use_reentrant=True))


@add("checkpoint with dropout")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            lambda t: functional.dropout(model.first(t), 0.3, model.training).tanh(),
            x,
            use_reentrant=False,
        )
        return functional.dropout(out, 0.2, model.training)

    return small(middle)


@add("reentrant checkpoint with dropout")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            lambda t: functional.dropout(model.first(t), 0.3, model.training).tanh(),
            x,
            use_reentrant=True,
        )
        return out

    return small(middle)


@add("checkpoint inside a checkpoint")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        def outer(t: Tensor) -> Tensor:
            inner: Tensor = checkpoint(lambda u: model.first(u).sin(), t.cos(), use_reentrant=False)
            return inner * t

        out: Tensor = checkpoint(outer, x, use_reentrant=False)
        return out

    return small(middle)


@add("checkpoint with keyword arguments")
def _() -> Any:
    def block(t: Tensor, *, scale: float, shift: Tensor) -> Tensor:
        return t.tanh() * scale + shift

    return small(
        lambda model, x: checkpoint(
            block, x, use_reentrant=False, scale=0.5, shift=model.first.bias
        )
    )


@add("checkpoint_sequential")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        out: Tensor = checkpoint_sequential(model.layers, 2, x, use_reentrant=False)
        return out

    return small(
        middle,
        layers=nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        ),
    )


@add("checkpoint of several tensors")
def _() -> Any:
    def block(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.sin() * b, b.cos() + a

    def middle(model: Any, x: Tensor) -> Tensor:
        a, b = checkpoint(block, x, model.first(x), use_reentrant=False)
        out: Tensor = a * b
        return out

    return small(middle)


# Gradients inside the loss.


@add("gradient penalty")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        score = model(x).tanh().sum(1)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return (
            score.square().mean()
            + 10 * (gradient.square().sum(1).add(1e-6).sqrt() - 1).square().mean()
        )

    model, batch, _ = small(lambda _, x: x.tanh())
    return model, batch, loss


@add("gradient by parameters inside the loss", mixes_rows=True)
def _() -> Any:
    """One inner step of MAML."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        first = mean_square(model, batch)
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(first, parameters, create_graph=True)
        stepped = {n: p - 0.1 * g for n, p, g in zip(names, parameters, gradients, strict=True)}
        out = torch.func.functional_call(model, stepped, (batch["x"],))
        return out.square().mean(1).mean()

    model, batch, _ = small(lambda _, x: x.tanh())
    return model, batch, loss


@add("energy and forces")
def _() -> Any:
    """The prediction itself is a gradient by the input."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        energy = model(x).sum(1)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + (forces - batch["forces"]).square().mean(1).mean()

    model, batch, _ = small(lambda _, x: functional.softplus(x))
    return model, batch | {"forces": torch.randn(ROWS, WIDTH)}, loss


@add("stop-gradient target of a second network")
def _() -> Any:
    """As in BYOL: the target network gets no gradient."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = Small(lambda _, x: x.relu())
            self.target = Small(lambda _, x: x.relu())
            self.target.requires_grad_(False)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = model.get_submodule("target")(batch["x"] * 0.9)
        return -functional.cosine_similarity(
            model.get_submodule("online")(batch["x"]), target
        ).mean()

    return Pair(), {"x": torch.randn(ROWS, WIDTH)}, loss


@add("retain_grad on an activation")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.retain_grad()
        return x.tanh()

    return small(middle)


@add("saved_tensors_hooks")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            out: Tensor = model.first(x).tanh()
        return out

    return small(middle)


@add(
    "backward inside forward",
    refused=(
        "a step that calls backward itself leaves gradients beside the loss's, which no graph"
        " returns"
    ),
)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        model.first(x.detach()).square().sum().backward()
        return x + model.first.weight.grad[0]

    return small(middle)


@add(
    "register_hook that reads a number",
    refused="the hook's Python branch depends on a gradient's value",
)
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        if y.requires_grad:
            y.register_hook(lambda g: g / g.norm() if float(g.norm()) > 1e-6 else g)
        return y

    return small(middle)
