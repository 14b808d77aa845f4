"""Models that torch.export alone would reject or give wrong gradients.

Each has a name and a function that builds it.
"""

# mypy: allow-untyped-calls
# torch's apply and register_hook have no types.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.capture.jobs import Model
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODELS[build.__name__] = build
    return build


class Scaled(torch.autograd.Function):
    """The identity with a custom gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = gradient * 3.0 * torch.sigmoid(x)
        return result


class Several(torch.autograd.Function):
    """Has three outputs, one of them not differentiable, and an argument that is not a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.factor = factor
        y = x.tanh()
        ctx.save_for_backward(y)
        return y, x.argmax(-1), x * 2

    @staticmethod
    def backward(ctx: Any, first: Tensor, _: Tensor, last: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return first * y * ctx.factor + last, None


class Straight(torch.autograd.Function):
    """The straight-through estimator, with a `setup_context`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result: Tensor = Scaled.apply(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        result: Tensor = Scaled.apply(gradient)
        return result * 2


scaled = Scaled.apply


def linear(**parts: Any) -> dict[str, Any]:
    return {"part": nn.Linear(8, 8), **parts}


@model
def function_under_a_bound_name() -> nn.Module:
    return Model(lambda _, x: scaled(x))


@model
def function_that_the_module_holds() -> nn.Module:
    built = Model(lambda m, x: m.kept(x))
    built.kept = Scaled.apply  # type: ignore[assignment]  # a plain attribute
    return built


class Holds(nn.Module):
    """Has an `apply` as a class attribute."""

    kept = Scaled.apply

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.kept(x)
        return result


@model
def function_that_a_class_holds() -> nn.Module:
    return Model(lambda m, x: m.part(x), part=Holds())


class Powered(torch.autograd.Function):
    """Has an argument with a default, and a gradient that is not that of the product."""

    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor**2, None


@model
def function_with_a_default() -> nn.Module:
    return Model(lambda _, x: Powered.apply(x) + Powered.apply(x, 3.0))


@model
def function_with_several_outputs() -> nn.Module:
    def middle(_: Any, x: Tensor) -> Tensor:
        y, place, z = Several.apply(x, 2.0)
        total: Tensor = y + z + place[:, None]
        return total

    return Model(middle)


@model
def function_followed_by_a_write_in_place() -> nn.Module:
    return Model(lambda _, x: Straight.apply(x).relu_())


@model
def function_that_is_once_differentiable() -> nn.Module:
    return Model(lambda _, x: Once.apply(x))


@model
def function_that_uses_a_function() -> nn.Module:
    return Model(lambda _, x: Nested.apply(x))


@model
def function_in_no_grad() -> nn.Module:
    def middle(_: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = Scaled.apply(x)
        return x * y

    return Model(middle)


@model
def function_in_autocast() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = Scaled.apply(m.part(x))
        return y.float()

    return Model(middle, **linear())


@model
def function_in_a_checkpoint() -> nn.Module:
    return Model(
        lambda m, x: checkpoint(lambda y: Scaled.apply(m.part(y)).relu(), x, use_reentrant=False),
        **linear(),
    )


@model
def tensor_hook() -> nn.Module:
    def middle(_: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        return x.tanh() * x

    return Model(middle)


@model
def tensor_hook_after_a_use() -> nn.Module:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        z = y * y
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return z + y

    return Model(middle)


@model
def parameter_hooks() -> nn.Module:
    built = Model()
    built.first.weight.register_hook(lambda gradient: gradient * 0.5)
    built.last.bias.register_hook(torch.sign)
    return built


@model
def full_backward_hook() -> nn.Module:
    built = Model(lambda m, x: m.part(x).relu(), **linear())
    built.get_submodule("part").register_full_backward_hook(
        lambda _, gradients, __: (gradients[0] * 2,)  # type: ignore[index]
    )
    return built


@model
def full_backward_pre_hook() -> nn.Module:
    built = Model(lambda m, x: m.part(x).relu(), **linear())
    built.get_submodule("part").register_full_backward_pre_hook(
        lambda _, gradients: (gradients[0] * 2,)  # type: ignore[index]
    )
    return built


@model
def checkpoint_with_dropout() -> nn.Module:
    return Model(
        lambda m, x: checkpoint(
            lambda y: F.dropout(m.part(y).relu(), 0.3, m.training), x, use_reentrant=False
        ),
        **linear(),
    )


@model
def reentrant_checkpoint() -> nn.Module:
    return Model(
        lambda m, x: checkpoint(lambda y: m.part(y).relu(), x, use_reentrant=True), **linear()
    )


@model
def nested_checkpoints() -> nn.Module:
    def inner(m: Any, y: Tensor) -> Tensor:
        return checkpoint(lambda z: m.part(z).relu(), y, use_reentrant=False) * 2  # type: ignore[no-any-return]  # torch's own is untyped

    return Model(lambda m, x: checkpoint(inner, m, x, use_reentrant=False), **linear())


@model
def no_grad_in_a_checkpoint() -> nn.Module:
    def inner(m: Any, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale: Tensor = m.part(y)
        return scale * y

    return Model(lambda m, x: checkpoint(inner, m, x, use_reentrant=False), **linear())


@model
def no_grad_around_cond() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = torch.cond(x.sum() > 0, lambda z: m.part(z), lambda z: z * 2, (x,))
        return x * y

    return Model(middle, **linear())


@model
def autocast_before_cond() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.part(x)
        y = y.float()
        z: Tensor = torch.cond(y.sum() > 0, lambda z: m.part(z), lambda z: z * 2, (y,))
        return x * z

    return Model(middle, **linear())


@model
def no_grad_and_autocast_before_cond() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = m.part(x)
        z: Tensor = torch.cond(y.sum() > 0, lambda z: m.part(z), lambda z: z * 2, (x,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            w = m.part(z)
        v: Tensor = torch.cond(w.sum() > 0, lambda z: m.part(z), lambda z: z * 2, (w.float(),))
        return x * z + v

    return Model(middle, **linear())


@model
def no_grad_around_autocast() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = m.part(x)
        return x * y

    return Model(middle, **linear())


@model
def modes_in_autocast() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                y = m.part(x)
            z = m.part(x)
            with torch.autocast("cpu", enabled=False):
                z = m.part(z.float())
        result: Tensor = x * y + z
        return result

    return Model(middle, **linear())


@model
def enable_grad_in_no_grad() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = m.part(x)
            with torch.enable_grad():
                z = m.part(x) * y
            w = y * 2
        result: Tensor = x * y + z + w
        return result

    return Model(middle, **linear())


@model
def set_grad_enabled_as_a_call() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        y: Tensor = m.part(x)
        torch.set_grad_enabled(before)
        return x * y

    return Model(middle, **linear())


@model
def inference_mode() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = m.part(x)
        result: Tensor = x * y.clone()
        return result

    return Model(middle, **linear())


@model
def gradient_penalty() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        point = (0.3 * x + 0.7 * x.flip(0)).detach().requires_grad_(True)
        value = m.part(point).tanh().sum()
        (gradient,) = torch.autograd.grad(
            outputs=value, inputs=point, create_graph=True, retain_graph=True, only_inputs=True
        )
        result: Tensor = x * ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        return result

    return Model(middle, **linear())


@model
def gradient_penalty_of_a_function() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        value = Scaled.apply(m.part(x)).tanh().sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return x * gradient

    return Model(middle, **linear())


@model
def gradient_penalty_with_noise() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        share = torch.rand(x.shape[0], 1)
        point = (share * x + (1 - share) * x.flip(0)).detach()
        point.requires_grad = True
        (gradient,) = torch.autograd.grad(m.part(point).tanh().sum(), point, create_graph=True)
        return x + gradient

    return Model(middle, **linear())


@model
def func_grad() -> nn.Module:
    return Model(lambda m, x: grad(lambda y: m.part(y).tanh().sum())(x), **linear())


@model
def func_grad_of_func_grad() -> nn.Module:
    def inner(m: Any, y: Tensor) -> Tensor:
        return grad(lambda z: m.part(z).tanh().sum())(y).square().sum()  # type: ignore[no-any-return]  # torch's own is untyped

    return Model(lambda m, x: grad(lambda y: inner(m, y))(x), **linear())


@model
def func_vjp() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        value, pull_back = torch.func.vjp(lambda y: m.part(y).tanh(), x)  # type: ignore[misc]  # its type has a third, of has_aux
        result: Tensor = pull_back(value)[0]
        return result

    return Model(middle, **linear())


@model
def func_jvp() -> nn.Module:
    return Model(
        lambda m, x: torch.func.jvp(lambda y: m.part(y).tanh(), (x,), (x * 2,))[1], **linear()
    )


@model
def func_vmap() -> nn.Module:
    return Model(lambda m, x: vmap(lambda row: m.part(row).tanh())(x), **linear())


@model
def func_vmap_of_grad() -> nn.Module:
    return Model(lambda m, x: vmap(grad(lambda row: m.part(row).tanh().sum()))(x), **linear())


@model
def buffer_assigned_anew() -> nn.Module:
    def middle(m: Any, x: Tensor) -> Tensor:
        if m.training:
            m.average = 0.9 * m.average + 0.1 * x.detach().mean(0)
        result: Tensor = x - m.average
        return result

    return Model(middle, average=torch.zeros(8))
