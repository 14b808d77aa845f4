"""Contents of a batch, and ways to call a model with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, make_job, mean_square, small
from torch import Tensor, nn
from torch.export import Dim

from trainload.capture.job.definition import Loss

FAMILY = Family("inputs")
add = FAMILY.add


class Two(nn.Module):
    """One linear layer on the result of `pick` for the batch."""

    def __init__(self, pick: Any) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)
        self.pick = pick

    def forward(self, *given: Any, **named: Any) -> Tensor:
        out: Tensor = self.part(self.pick(*given, **named))
        return out


def two(pick: Any, call: Any, **options: Any) -> Any:
    """Return a job over the columns a and b, whose loss calls the model by `call(model, batch)`."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = call(model, batch).square().mean(1).mean()
        return out

    return make_job(
        Two(pick), {"a": torch.randn(ROWS, WIDTH), "b": torch.randn(ROWS, WIDTH)}, loss, **options
    )


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Record:
    a: Tensor
    b: Tensor


@add("model called with a dict")
def _() -> Any:
    return two(lambda d: d["a"] + d["b"], lambda m, b: m({"a": b["a"], "b": b["b"]}))


@add("model called with a tuple inside a list")
def _() -> Any:
    return two(lambda d: d[0][0] + d[0][1], lambda m, b: m([(b["a"], b["b"])]))


@add("model called with a named tuple")
def _() -> Any:
    return two(lambda d: d.a * d.b, lambda m, b: m(Pair(b["a"], b["b"])))


@add("model called with a dataclass")
def _() -> Any:
    return two(lambda d: d.a * d.b, lambda m, b: m(Record(b["a"], b["b"])))


@add("model that returns a dataclass")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Record:
            return Record(self.part(x), x)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        difference: Tensor = (out.a - out.b).square().mean(1).mean()
        return difference

    return Model(), {"x": torch.randn(ROWS, WIDTH)}, loss


@add("model called with keywords, some left out")
def _() -> Any:
    def pick(a: Tensor, b: Tensor | None = None, scale: float = 0.5) -> Tensor:
        return a * scale if b is None else a + b

    return two(pick, lambda m, b: m(b["a"]) + m(b["a"], b=b["b"]))


@add("numbers, strings and flags given by the loss")
def _() -> Any:
    """They stand in the loss, not in the batch."""

    def pick(a: Tensor, b: Tensor, power: int, mode: str, on: bool) -> Tensor:
        return (a**power if mode == "power" else a) + (b if on else 0)

    return two(pick, lambda m, b: m(b["a"], b["b"], 2, "power", True))


@add("column that the loss does not read")
def _() -> Any:
    return two(lambda a: a, lambda m, b: m(b["a"]))


@add("no loss function: the model returns the loss")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.part(x), y)

    return Model(), {"x": torch.randn(ROWS, WIDTH), "y": torch.tensor([0, 1, 2, 3])}, None


@add("a number in the batch")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    return make_job(model, {**batch, "scale": 0.5}, lambda m, b: loss(m, b) * b["scale"])  # type: ignore[dict-item]  # what is tried


@add("a string in the batch")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    return make_job(
        model,
        {**batch, "mode": "mean"},  # type: ignore[dict-item]  # what is tried
        lambda m, b: loss(m, b) if b["mode"] == "mean" else loss(m, b) * 2,
    )


@add("a flag in the batch")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    return make_job(model, {**batch, "on": True}, lambda m, b: loss(m, b) * (2 if b["on"] else 1))  # type: ignore[dict-item]  # what is tried


@add("None in the batch")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    return make_job(model, {**batch, "mask": None}, loss)  # type: ignore[dict-item]  # what is tried


@add("nested mappings in the batch")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    return make_job(model, {"inputs": batch}, lambda m, b: loss(m, b["inputs"]))  # type: ignore[dict-item, arg-type]  # what is tried


@add("a 0-dim tensor that all rows share")
def _() -> Any:
    model, batch, loss = small(lambda _, x: x.relu())
    return make_job(
        model,
        {**batch, "scale": torch.tensor(0.5)},
        lambda m, b: loss(m, b) * b["scale"],
        shared=["scale"],
    )


@add("class weights that all rows share")
def _() -> Any:
    model, _, _ = small(lambda _, x: x.relu())
    batch = {
        "x": torch.randn(ROWS, WIDTH),
        "y": torch.randint(0, WIDTH, (ROWS,)),
        "weight": torch.rand(WIDTH) + 0.5,
    }

    def loss(model: nn.Module, b: Batch) -> Loss:
        return Loss(
            nn.functional.cross_entropy(model(b["x"]), b["y"], b["weight"]),
            weight=b["weight"][b["y"]].sum(),
        )

    return make_job(model, batch, loss, shared=["weight"])


@add("a recurrent state with its rows in dim 1")
def _() -> Any:
    model = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
    batch = {"x": torch.randn(ROWS, 5, WIDTH), "state": torch.randn(2, ROWS, WIDTH)}
    return make_job(
        model,
        batch,
        lambda m, b: m(b["x"], b["state"])[0].square().mean(),
        dynamic={"state": {1: Dim("batch")}},
    )


@add("time before rows")
def _() -> Any:
    model = nn.LSTM(WIDTH, WIDTH)
    batch = {"x": torch.randn(5, ROWS, WIDTH)}
    return make_job(
        model, batch, lambda m, b: m(b["x"])[0].square().mean(), dynamic={"x": {1: Dim("batch")}}
    )


@add("inputs of every dtype")
def _() -> Any:
    dtypes = {
        "u": torch.uint8,
        "i": torch.int16,
        "l": torch.int32,
        "d": torch.float64,
        "h": torch.bfloat16,
        "f": torch.float16,
    }
    batch = {name: torch.randint(0, 5, (ROWS, WIDTH)).to(dtype) for name, dtype in dtypes.items()}
    batch["m"] = torch.rand(ROWS, WIDTH) < 0.5

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return mean_square(model, {"x": sum((v.float() for v in b.values()), torch.zeros(()))})

    model, _, _ = small(lambda _, x: x.tanh())
    return model, batch, loss


@add("columns that are views")
def _() -> Any:
    """Neither contiguous nor of one memory each."""
    model, _, loss = small(lambda _, x: x.relu())
    whole = torch.randn(WIDTH, ROWS, 2)
    return (
        model,
        {"x": whole[..., 0].t(), "y": whole[..., 1].t()},
        lambda m, b: loss(m, b) + (b["x"].view(-1) * b["y"].view(-1)).mean(),
    )


@add("images of bytes")
def _() -> Any:
    stack = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    return (
        stack,
        {"x": torch.randint(0, 255, (ROWS, 3, 8, 8), dtype=torch.uint8)},
        lambda m, b: mean_square(m, {"x": b["x"].float() / 255}),
    )


@add("a second dynamic dim")
def _() -> Any:
    """The time dim may change from call to call as well."""
    stack = nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH))
    return make_job(
        stack,
        {"x": torch.randint(0, 20, (ROWS, 6))},
        mean_square,
        dynamic={"x": {1: Dim("time", min=2, max=64)}},
    )


@add("a fixed batch size")
def _() -> Any:
    model, batch, loss = small(lambda model, x: model.part(x), part=nn.Dropout(0.2))
    return make_job(model, batch, loss, dynamic={"x": {0: Dim.STATIC}})


@add("a reshape by the number of rows")
def _() -> Any:
    return small(lambda _, x: x.view(x.shape[0], 2, -1).transpose(1, 2).reshape(x.shape[0], -1))


@add("len of a tensor")
def _() -> Any:
    return small(lambda _, x: x.view(x.shape[0], 2, -1).transpose(1, 2).reshape(len(x), -1))


@add("arithmetic with sizes")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        position = torch.arange(x.size(0) * 2, dtype=x.dtype)[: x.shape[0]].unsqueeze(1)
        return x + (position * 0.0) + x.new_ones(x.size()) * (1.0 / x.shape[1])

    return small(middle)


@add(
    "two halves of the rows",
    gap="torch.export does not see that the halves of any number of rows make up all of them",
)
def _() -> Any:
    return small(lambda _, x: torch.cat([x[: x.shape[0] // 2], x[x.shape[0] // 2 :]]))


@add(
    "an example of one row",
    refused="torch treats sizes 0 and 1 as special, so that the graph would hold for one row only",
)
def _() -> Any:
    model, _, loss = small(lambda _, x: x.relu())
    return make_job(model, {"x": torch.randn(1, WIDTH)}, loss)
