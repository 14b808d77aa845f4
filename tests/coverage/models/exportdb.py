"""The examples of torch.export's own collection (ExportDB) as models that can be trained.

Each has parameters and a scalar loss. The names are those of the collection. Examples that it lists
as unsupported are included.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, make_job, mean_square, small
from torch import Tensor, nn
from torch._higher_order_ops import map
from torch.export import Dim

FAMILY = Family("ExportDB")
add = FAMILY.add


@add("assume_constant_result", refused="a number is read out of the batch and used as a size")
def _() -> Any:
    return small(
        lambda _, x: (
            x[:, : int(x.detach().abs().amax().clamp(1, 2).item())].sum(1, keepdim=True) + x
        )
    )


@add("autograd_function")
def _() -> Any:
    class Cloned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Tensor:
            out: Tensor = gradients[0] + 1
            return out

    return small(lambda _, x: Cloned.apply(x))


@add("class_method")
def _() -> Any:
    class Model(nn.Module):
        @classmethod
        def doubled(cls, x: Tensor) -> Tensor:
            return x + 1

        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.part(x)
            return self.doubled(x) * self.__class__.doubled(x) * type(self).doubled(x)

    return Model(), {"x": torch.randn(ROWS, WIDTH)}, mean_square


@add("cond_branch_class_method")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)

        def cosine(self, x: Tensor) -> Tensor:
            return self.part(x).cos()

        def sine(self, x: Tensor) -> Tensor:
            return self.part(x).sin()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(torch.tensor(x.shape[1] > 4), self.cosine, self.sine, [x])

    return Model(), {"x": torch.randn(ROWS, WIDTH)}, mean_square


@add("cond_branch_nested_function", mixes_rows=True)
def _() -> Any:
    def true_function(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return x + y

        return inner(x * 2)

    def false_function(x: Tensor) -> Tensor:
        return x - x.sin()

    return small(lambda _, x: torch.cond(x.sum() < 4, true_function, false_function, [x]))


@add("cond_branch_nonlocal_variables", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        tensor, number = x + 100, 3.14
        return torch.cond(
            x.sum() < 4, lambda t, u: t + u + number, lambda t, u: t - u - number, [x, tensor]
        )

    return small(middle)


@add("cond_closed_over_variable", mixes_rows=True)
def _() -> Any:
    return small(
        lambda model, x: torch.cond(x.sum() > 0, lambda t: t * x.cos(), lambda t: t - x, [x + 1])
    )


@add("cond_operands")
def _() -> Any:
    return small(
        lambda _, x: torch.cond(
            torch.tensor(x.shape[0] > 2), lambda a, b: a + b, lambda a, b: a - b, (x, x.sin())
        )
    )


@add("cond_predicate")
def _() -> Any:
    return small(
        lambda _, x: torch.cond(
            torch.tensor(x.dim() == 2 and x.shape[1] > 6), lambda t: t.sin(), lambda t: t.cos(), [x]
        )
    )


@add("constrain_as_size_example", mixes_rows=True)
def _() -> Any:
    """A number of the batch is used as a size, within bounds that the code states."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        size = batch["n"].amax().item()
        torch._check(size >= 0)
        torch._check(size <= 5)
        return (
            mean_square(model, batch)
            + torch.ones(size, 5).sum() * model.get_parameter("first.bias").sum()
        )  # type: ignore[arg-type]  # an int

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch | {"n": torch.tensor([1, 2, 3, 4])}, loss


@add("constrain_as_value_example", refused="a Python branch on a number of the batch")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = batch["n"].amax().item()
        torch._check(value >= 0)
        torch._check(value <= 5)
        return mean_square(model, batch) * (2.0 if value > 3 else 1.0)

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch | {"n": torch.tensor([1, 2, 3, 4])}, loss


@add("decorator")
def _() -> Any:
    def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def wrapper(*given: Any) -> Tensor:
            return function(*given) + 1

        return wrapper

    return small(doubled(lambda _, x: x + x.sin()))


@add("dictionary")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        elements: dict[Any, Tensor] = {}
        elements["x2"] = x * x
        elements[3] = elements["x2"] * x
        return x + elements["x2"] + elements[3]

    return small(middle)


@add("dynamic_shape_assert")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        assert x.shape[1] > 2, "more than two features"
        assert x.shape[0] > 0
        return x.tanh()

    return small(middle)


@add("dynamic_shape_constructor")
def _() -> Any:
    return small(lambda _, x: x + torch.zeros(x.shape[0] * 2)[: x.shape[0]].unsqueeze(1))


@add("dynamic_shape_if_guard")
def _() -> Any:
    return small(lambda _, x: x.cos() if x.shape[1] == WIDTH else x.sin())


@add("dynamic_shape_map")
def _() -> Any:
    return small(lambda model, x: map(lambda row, w: row + w, x, model.first.bias))


@add(
    "dynamic_shape_round",
    gap="torch.export takes no rounding of a size that changes",
    mixes_rows=True,
)
def _() -> Any:
    return small(lambda _, x: x[: round(x.shape[0] / 2)].mean(0) + x)


@add(
    "dynamic_shape_slicing",
    gap="torch.export cannot say for which sizes a slice that ends two rows early holds",
    mixes_rows=True,
)
def _() -> Any:
    model, batch, loss = small(
        lambda _, x: x + x[: x.shape[0] - 2, x.shape[1] - 1 :: 2].sum() / x.shape[0]
    )
    return make_job(model, batch, loss, dynamic={"x": {0: Dim("batch", min=3)}})


@add("dynamic_shape_view")
def _() -> Any:
    return small(
        lambda _, x: x.view(x.shape[0], 2, 2, 2).permute(0, 2, 1, 3).reshape(x.shape[0], WIDTH)
    )


@add("fn_with_kwargs")
def _() -> Any:
    def call(model: Any, x: Tensor, *many: Tensor, scale: float, **named: Tensor) -> Tensor:
        return sum(many, x) * scale + sum(named.values(), torch.zeros(()))

    return small(lambda model, x: call(model, x, x.sin(), x.cos(), scale=0.5, y=x, z=x * x))


@add("list_contains")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        assert x.size(-1) in [6, WIDTH]
        assert "monkey" not in ["cow", "pig"]
        return x + x

    return small(middle)


@add("list_unpack")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        a, *rest = [x, x.sin(), x.cos()]
        return a + rest[0] * rest[1]

    return small(middle)


@add(
    "model_attr_mutation",
    refused="an attribute that forward changes lives outside of the state that a package carries",
)
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)
            self.many = [torch.ones(WIDTH), torch.ones(WIDTH)]

        def forward(self, x: Tensor) -> Tensor:
            self.many = [t * 2 for t in self.many]
            return self.part(x) + self.many[0] * self.many[1]

    return Model(), {"x": torch.randn(ROWS, WIDTH)}, mean_square


@add("nested_function")
def _() -> Any:
    def middle(_: Any, a: Tensor) -> Tensor:
        x, y = a + 1, a - 1
        z = 1

        def closure(t: Tensor) -> Tensor:
            nonlocal z
            z += 1
            return t * z + x - y

        return closure(a) + closure(a)

    return small(middle)


@add("null_context_manager")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        with contextlib.nullcontext():
            return x.sin() + x.cos()

    return small(middle)


@add("a context manager of one's own")
def _() -> Any:
    @contextlib.contextmanager
    def noted() -> Iterator[float]:
        yield 0.5

    def middle(_: Any, x: Tensor) -> Tensor:
        with noted() as factor:
            return x * factor

    return small(middle)


@add("optional_input")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            out: Tensor = self.part(x if y is None else x + y)
            return out

    return Model(), {"x": torch.randn(ROWS, WIDTH)}, mean_square


@add("pytree_flatten")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        leaves, _spec = torch.utils._pytree.tree_flatten({1: x, 2: {"a": x.sin()}})
        out: Tensor = leaves[0] * leaves[1]
        return out

    return small(middle)


@add("scalar_output", refused="the loss would be a size, which has no gradient")
def _() -> Any:
    model, batch, _ = small(lambda _, x: x.relu())
    return make_job(model, batch, lambda m, b: b["x"].shape[1] + 1)


@add("specialized_attribute")
def _() -> Any:
    class Animal(Enum):
        COW = "moo"

    def middle(model: Any, x: Tensor) -> Tensor:
        if model.animal == Animal.COW.value:
            return x * x + model.number
        raise ValueError("bad")

    model, batch, loss = small(middle)
    vars(model).update(animal="moo", number=4)
    return model, batch, loss


@add("static_for_loop")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        parts = [x * i for i in range(3)]
        return torch.stack(parts).sum(0)

    return small(middle)


@add("static_if")
def _() -> Any:
    return small(lambda _, x: torch.ones_like(x) + x if len(x.shape) == 2 else x)


@add("tensor_setattr")
def _() -> Any:
    """An attribute of a tensor, which a graph does not need."""

    def middle(_: Any, x: Tensor) -> Tensor:
        setattr(x, "attr", 3)  # noqa: B010 - the example is about setattr
        return x + 4

    return small(middle)


@add("torch_sym_min")
def _() -> Any:
    return small(lambda _, x: x * (1.0 + 0.0 * torch.sym_min(x.shape[0], 10)))


@add("type_reflection_method")
def _() -> Any:
    class A:
        @classmethod
        def function(cls, x: Tensor) -> Tensor:
            return 1 + x

    return small(lambda _, x: type(A()).function(x))


@add("unsupported_operator")
def _() -> Any:
    """torch.sym_min of sizes is the collection's example; it is supported now."""
    return small(lambda _, x: x * torch.sym_max(x.shape[1], 3))


@add("user_input_mutation")
def _() -> Any:
    """Forward writes to its input."""
    return small(lambda _, x: x.mul_(2).cos())


@add(
    "input mutation of the batch",
    gap="a step that writes to its own batch is refused: write batch[name] * 2 to a new name",
)
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        batch["x"].mul_(2)
        return mean_square(model, batch)

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add(
    "dynamic_value_example",
    refused="the shape of a value is computed from the batch by a Python list",
)
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        sizes = batch["n"].tolist()
        parts = torch.split(batch["x"], sizes)
        return sum((mean_square(model, {"x": p}) for p in parts), torch.zeros(()))

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch | {"n": torch.tensor([1, 1, 1, 1])}, loss
