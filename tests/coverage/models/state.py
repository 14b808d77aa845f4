"""State of models: parameters, buffers and normalization."""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, Small, mean_square, small
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

FAMILY = Family("state")
add = FAMILY.add


def images(*layers: nn.Module, channels: int = 3, size: int = 8) -> tuple[nn.Module, Batch, Any]:
    """Return (model, batch, loss) of a stack of layers over images (rows, channels, size, size)."""
    return nn.Sequential(*layers), {"x": torch.randn(ROWS, channels, size, size)}, _image_loss


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return mean_square(model, batch)


@add("BatchNorm2d", mixes_rows=True)
def _() -> Any:
    return images(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())


@add("BatchNorm1d with momentum=None", mixes_rows=True)
def _() -> Any:
    """The running mean is over all steps: its factor is a number that depends on a counter."""
    return small(lambda model, x: model.norm(x), norm=nn.BatchNorm1d(WIDTH, momentum=None))


@add("BatchNorm without running statistics", mixes_rows=True)
def _() -> Any:
    return small(
        lambda model, x: model.norm(x), norm=nn.BatchNorm1d(WIDTH, track_running_stats=False)
    )


@add("BatchNorm in evaluation mode inside a model that trains")
def _() -> Any:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Frozen:
            super().train(False)
            return self

    return small(lambda model, x: model.norm(x), norm=Frozen(WIDTH))


@add("GroupNorm, LayerNorm, InstanceNorm")
def _() -> Any:
    return images(
        nn.Conv2d(3, 6, 3),
        nn.GroupNorm(3, 6),
        nn.LayerNorm([6, 6, 6]),
        nn.InstanceNorm2d(6, affine=True),
    )


@add("RMSNorm")
def _() -> Any:
    return small(lambda model, x: model.norm(x), norm=nn.RMSNorm(WIDTH))


@add("buffer updated in place", mixes_rows=True)
def _() -> Any:
    """An exponential moving average of an activation."""

    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - model.average

    return small(middle, average=torch.zeros(WIDTH))


@add("buffer updated by copy_", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        model.average.copy_(0.9 * model.average + 0.1 * x.detach().mean(0))
        return x - model.average

    return small(middle, average=torch.zeros(WIDTH))


@add("buffer updated by assignment", mixes_rows=True)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        model.average = 0.9 * model.average + 0.1 * x.detach().mean(0)
        return x - model.average

    return small(middle, average=torch.zeros(WIDTH))


@add("integer counter in a buffer")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        model.calls.add_(1)
        return x / model.calls

    return small(middle, calls=torch.zeros((), dtype=torch.int64))


@add("queue of features in a buffer", mixes_rows=True)
def _() -> Any:
    """As in momentum contrast."""

    def middle(model: Any, x: Tensor) -> Tensor:
        queue = model.queue.clone()
        out = x + (x @ queue.t()).softmax(-1) @ queue
        with torch.no_grad():
            model.queue.copy_(torch.cat([model.queue, x.detach()])[-6:])
        return out

    return small(middle, queue=torch.randn(6, WIDTH))


@add("non-persistent buffer")
def _() -> Any:
    class Table(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.linspace(-1, 1, WIDTH), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table

    return small(lambda model, x: model.part(x), part=Table())


@add("tensor made in forward")
def _() -> Any:
    return small(lambda _, x: x * torch.tensor([0.5, 1.0] * (WIDTH // 2)))


@add("tensor that is an attribute")
def _() -> Any:
    """Neither a buffer nor a parameter: a constant of the graph."""
    model, batch, loss = small(lambda model, x: x * model.shift)
    model.shift = torch.linspace(0, 1, WIDTH)
    return model, batch, loss


@add("tensor in a closure of the loss")
def _() -> Any:
    model, batch, _ = small(lambda _, x: x.relu())
    weights = torch.rand(WIDTH)
    return model, batch, lambda m, b: (m(b["x"]).square() * weights).mean(1).mean()


@add(
    "trained tensor outside the model",
    refused="the tensor is no part of Job.model, so no package would carry it or train it",
)
def _() -> Any:
    model, batch, _ = small(lambda _, x: x.relu())
    weights = torch.rand(WIDTH, requires_grad=True)
    return model, batch, lambda m, b: (m(b["x"]).square() * weights).mean(1).mean()


@add("frozen parameters")
def _() -> Any:
    model, batch, loss = small(lambda model, x: model.part(x).tanh(), part=nn.Linear(WIDTH, WIDTH))
    model.get_submodule("part").requires_grad_(False)
    return model, batch, loss


@add("parameter that the loss does not reach")
def _() -> Any:
    return small(lambda _, x: x.tanh(), part=nn.Linear(WIDTH, WIDTH))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(tokens)).relu())
        return logits


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"])
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


@add("tied parameters")
def _() -> Any:
    return _Tied(), {"tokens": torch.randint(0, 20, (ROWS, 5))}, _next_token


@add("partly tied parameters")
def _() -> Any:
    """The head uses a part of the embedding, by slicing in forward."""

    class Partly(_Tied):
        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.body(self.embedding(tokens)).relu()
            return functional.linear(hidden, torch.cat([self.embedding.weight[:10], self.extra]))

        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.randn(10, WIDTH))

    return Partly(), {"tokens": torch.randint(0, 20, (ROWS, 5))}, _next_token


@add(
    "parameters as views of one memory",
    refused="training them apart would untie them, and as one parameter they have no name",
)
def _() -> Any:
    model, batch, loss = small(lambda model, x: model.part(x), part=nn.Linear(WIDTH, WIDTH))
    model.get_submodule("part").weight = nn.Parameter(model.get_parameter("first.weight").detach())
    return model, batch, loss


@add("one module used twice")
def _() -> Any:
    return small(lambda model, x: model.part(model.part(x).tanh()), part=nn.Linear(WIDTH, WIDTH))


@add("ParameterList and ParameterDict")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        for parameter in model.many:
            x = x * parameter
        return x + model.named["shift"]

    return small(
        middle,
        many=nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(3)]),
        named=nn.ParameterDict({"shift": nn.Parameter(torch.rand(WIDTH))}),
    )


@add("weight_norm, the older form")
def _() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = weight_norm(nn.Linear(WIDTH, WIDTH))
    return small(lambda model, x: model.part(x), part=part)


@add("weight_norm by parametrization")
def _() -> Any:
    return small(
        lambda model, x: model.part(x), part=parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    )


@add("spectral_norm by parametrization")
def _() -> Any:
    """Power iteration changes buffers in forward."""
    return small(
        lambda model, x: model.part(x), part=parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    )


@add("spectral_norm, the older form")
def _() -> Any:
    return small(lambda model, x: model.part(x), part=spectral_norm(nn.Linear(WIDTH, WIDTH)))


@add("orthogonal parametrization")
def _() -> Any:
    return small(
        lambda model, x: model.part(x),
        part=parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley"),
    )


@add("a parametrization of one's own")
def _() -> Any:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    part = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(part, "weight", Symmetric())
    return small(lambda model, x: model.part(x), part=part)


@add("a parameter of bfloat16")
def _() -> Any:
    part = nn.Linear(WIDTH, WIDTH).bfloat16()
    return small(lambda model, x: model.part(x.bfloat16()).float(), part=part)


@add("a parameter of float64")
def _() -> Any:
    return small(
        lambda model, x: model.part(x.double()).float(), part=nn.Linear(WIDTH, WIDTH).double()
    )


@add(
    "a complex parameter",
    gap="a plan's buckets hold floating-point parameters; with one worker's step graph it is right",
)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) * model.phase).abs()

    return small(middle, phase=nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)))


@add("a 0-dim parameter")
def _() -> Any:
    return small(lambda model, x: x * model.scale, scale=nn.Parameter(torch.tensor(1.5)))


@add("a lazy module that has run")
def _() -> Any:
    part = nn.LazyLinear(WIDTH)
    part(torch.zeros(2, WIDTH))
    return small(lambda model, x: model.part(x), part=part)


@add("a model inside a model")
def _() -> Any:
    return small(lambda model, x: model.inner(x), inner=Small(lambda _, x: x.relu()))


@add(
    "a write to a parameter in forward",
    refused="the step would change a parameter beside the optimizer",
)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.first.weight.clamp_(-1, 1)
        return x

    return small(middle)


@add(
    "a value that requires a gradient in a buffer",
    refused="the graph of one step would reach into the next",
)
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        model.last_hidden = x.mean(0)
        return x + model.last_hidden

    return small(middle, last_hidden=torch.zeros(WIDTH))
