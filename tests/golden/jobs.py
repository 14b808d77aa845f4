"""Jobs of the golden packages, which together use all that the current format can contain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import trainload
from trainload import Ema, Graph, Loss, LossScaling, Turn
from trainload.core.user_code import load_module

SEED = 11


@dataclass(frozen=True)
class Case:
    """A golden to create.

    Attributes:
        make: returns the job, always with the same weights.
        parts: columns of each part of the data; one part: an npz file, several: a mixture of them.
        reduced: for an abstract package, returns the job that is compared in its place. Then there
            is no data.
        recorded: True if the construction of the jobs is recorded.
        freeze: further options of the freeze.
        trained: settings of the two steps that train the frozen package before it is stored.
    """

    make: Callable[[], trainload.Job]
    parts: tuple[Callable[[], dict[str, Tensor]], ...] = ()
    reduced: Callable[[], trainload.Job] | None = None
    recorded: bool = False
    freeze: dict[str, Any] = field(default_factory=dict)
    trained: trainload.Overrides | None = None


class Plain(nn.Module):
    """(rows, 5) tokens -> (rows, 16) logits.

    It has tied and frozen weights, dropout, a bfloat16 region, cond, constants and both kinds of
    buffers.
    """

    calls: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.lin = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.9), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([1.0, 0.5] * 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x).mean(1)
        h = h + torch.cond(h.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (self.shift,))
        with torch.autocast("cpu", torch.bfloat16):
            h = self.lin(h)
        h = self.norm(h.float()) * self.mask * self.scale
        with torch.no_grad():
            self.calls.add_(1)
        logits: Tensor = self.head(self.drop(h) + torch.tensor([0.5] * 8))
        return logits


def plain() -> trainload.Job:
    torch.manual_seed(SEED)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        logits = model(batch["x"])
        with torch.no_grad():
            hits = (logits.argmax(-1) == batch["y"]).float().mean()
        return Loss(functional.cross_entropy(logits, batch["y"]), metrics={"accuracy": hits})

    def optimizer(model: nn.Module) -> optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors},
        ]
        return optim.AdamW(groups, lr=0.05, weight_decay=0.0)

    def predict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["x"])
        return logits

    return trainload.Job(
        model=Plain(),
        batch=tokens(4),
        loss=loss,
        optimizer=optimizer,
        schedule=lambda step: 1 / (1 + step),
        predict=predict,
        predict_inputs=["x"],
        steps=2,
        global_batch=8,
        clip_norm=0.5,
        seed=SEED,
        assets={"LICENCE": str(Path(__file__).with_name("LICENCE"))},
    )


def tokens(rows: int = 24) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randint(0, 16, (rows, 5), generator=generator),
        "y": torch.randint(0, 16, (rows,), generator=generator),
    }


def turns() -> trainload.Job:
    """Return a job of two alternating losses, each with its own optimizer and running means.

    One optimizer, Muon, takes whole matrices; the other one clips gradients elementwise.
    """
    torch.manual_seed(SEED)

    def generator(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.softplus(
            -model.get_submodule("judge")(model.get_submodule("maker")(batch["noise"]))
        ).mean()

    def judge(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made = model.get_submodule("maker")(batch["noise"]).detach()
        real, fake = (model.get_submodule("judge")(x) for x in (batch["x"], made))
        return (functional.softplus(-real) + functional.softplus(fake)).mean()

    def muon(model: nn.Module) -> list[optim.Optimizer]:
        parameters = list(model.get_submodule("maker").parameters())
        rest = optim.SGD([p for p in parameters if p.ndim < 2], lr=0.2, momentum=0.9)
        return [optim.Muon([p for p in parameters if p.ndim > 1], lr=0.1), rest]

    graphs = {
        "generator": Graph(loss=generator, inputs=["noise"], optimizer=muon, ema=Ema(0.8)),
        "judge": Graph(
            loss=judge,
            optimizer=lambda m: optim.SGD(m.get_submodule("judge").parameters(), lr=0.2),
            schedule=lambda step: 1 / (1 + 0.3 * step),
            clip_value=0.05,
            ema=Ema(0.5),
        ),
    }
    return trainload.Job(
        model=nn.ModuleDict(
            {
                "maker": nn.Linear(4, 6),
                "judge": nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)),
            }
        ),
        batch={name: column[:4] for name, column in noise().items()},
        graphs=graphs,
        loop=[Turn("judge", times=2, fresh=True), "generator"],
        steps=2,
        global_batch=6,
        seed=SEED,
    )


def noise() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "noise": torch.randn(30, 4, generator=generator),
        "x": torch.randn(30, 6, generator=generator),
    }


class Either(nn.Module):
    """Mean squared error with or without a hint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.hint = nn.Linear(2, 3)

    def forward(self, x: Tensor, y: Tensor, hint: Tensor | None = None) -> Tensor:
        found = self.layer(x)
        return functional.mse_loss(found if hint is None else found + self.hint(hint), y)


def variants() -> trainload.Job:
    """Return a job with an optional input and a scaled loss.

    Two of its parameter groups share a table of learning rates.
    """
    torch.manual_seed(SEED)

    def optimizer(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(
            [
                {"params": model.get_submodule(name).parameters(), "lr": lr}
                for name, lr in (("layer", 0.5), ("hint", 0.1))
            ]
        )

    return trainload.Job(
        model=Either(),
        batch={name: column[:4] for name, column in without_hint().items()},
        variants={"hinted": {name: column[:4] for name, column in with_hint().items()}},
        optimizer=optimizer,
        schedule=lambda step: 1 / (1 + step),
        steps=2,
        global_batch=6,
        clip_value=0.3,
        loss_scaling=LossScaling(init_scale=8.0, growth_interval=1),
        seed=SEED,
    )


def without_hint() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(18, 5, generator=generator),
        "y": torch.randn(18, 3, generator=generator),
    }


def with_hint() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {**without_hint(), "hint": torch.randn(18, 2, generator=generator)}


class Halving(nn.Module):
    """A model that calls an operator of another library."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(torch.ops.golden_ops.halved(self.layer(x)), y)


def operators() -> trainload.Job:
    load_module(str(Path(__file__).with_name("golden_library.py")))
    torch.manual_seed(SEED)
    return trainload.Job(
        model=Halving(),
        batch={name: column[:4] for name, column in without_hint().items()},
        optimizer=lambda model: optim.SGD(model.parameters(), lr=0.5),
        steps=2,
        global_batch=6,
        seed=SEED,
    )


def layers() -> trainload.Job:
    torch.manual_seed(SEED)
    return trainload.Job(
        model=nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
        batch={name: column[:4] for name, column in without_hint().items()},
        loss=lambda model, batch: functional.mse_loss(model(batch["x"]), batch["y"]),
        optimizer=lambda model: optim.SGD(model.parameters(), lr=0.5),
        steps=2,
        global_batch=6,
        seed=SEED,
    )


def shapes(width: int = 64) -> trainload.Job:
    """Return a job without weights: its model is on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    return _shaped(model, width)


def few_shapes() -> trainload.Job:
    torch.manual_seed(SEED)
    return _shaped(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), 8)


class Initialised(nn.Module):
    """(rows, width) -> (rows, 1).

    Its first values are computed by operators that round alike on every processor.
    """

    table: Tensor
    given: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, 1)
        nn.init.normal_(self.first.weight, std=0.02)
        nn.init.trunc_normal_(self.second.weight, std=0.5, a=-1.0, b=1.0)
        self.first.weight.data[0] = 0.5
        self.register_buffer("table", 1.0 / (1.0 + torch.arange(width)), persistent=False)
        self.register_buffer("given", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x * self.table).tanh()) * self.given
        return found


def initialised() -> trainload.Job:
    return _shaped(Initialised(64), 64)


def few_initialised() -> trainload.Job:
    return _shaped(Initialised(8), 8)


def named() -> trainload.Job:
    return replace(_shaped(Initialised(48), 48), weight_names={"first.weight": "h/0"})


def _shaped(model: nn.Module, width: int) -> trainload.Job:
    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = module(batch["x"])
        return found.square().mean()

    return trainload.Job(
        model=model,
        batch={"x": torch.ones(4, width)},
        loss=loss,
        optimizer=lambda m: optim.SGD(m.parameters(), lr=0.1),
        steps=2,
    )


CASES = {
    "plain": Case(plain, (tokens,)),
    "turns": Case(turns, (noise,)),
    "variants": Case(variants, (without_hint, with_hint)),
    "operators": Case(operators, (without_hint,), freeze={"bundle_ops": True}),
    "trained": Case(
        layers,
        (without_hint,),
        trained=trainload.Overrides(
            lr=0.4, adapters=trainload.Adapters(rank=2, layers=("*.weight",))
        ),
    ),
    "shapes": Case(shapes, reduced=few_shapes),
    "initialised": Case(initialised, reduced=few_initialised, recorded=True),
    "named": Case(named, reduced=few_initialised, recorded=True, freeze={"weights_from": "init"}),
}
