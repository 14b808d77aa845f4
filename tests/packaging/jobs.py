"""A small job that is captured by hand.

It has dropout, an autocast region, a no_grad metric, cond, tied weights and both kinds of buffers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.export import Dim, ExportedProgram, export

from trainload.autograd_trace.graphs import GroupRecipe, Recipe, StateSpec, UpdateGraph
from trainload.capture.job.synthesise import with_quantiles
from trainload.capture.program import (
    BufferSpec,
    GraphCapture,
    InputSpec,
    OutputRole,
    OutputSpec,
    ParameterSpec,
    Program,
)

Batch = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """A model that exports in a second, with everything that a graph file must store."""

    ema: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.1)
        self.lin = torch.nn.Linear(8, 8)
        self.frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x).mean(1)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.lin(h)
        h = self.norm(h.float()) * self.mask * self.frozen
        with torch.no_grad():
            self.ema.mul_(0.9).add_(h.mean(0) * 0.1)
        h = torch.cond(h.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (h,))
        h = self.drop(h) + torch.tensor([1.0])
        return self.head(h)  # type: ignore[no-any-return]


class RevisedModel(Model):
    """The model after a day's changes.

    It has a wider layer and an additional one, another dropout, another branch and another
    constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(8, 12)
        self.out = torch.nn.Linear(12, 8)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x).mean(1)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.lin(h)
        h = self.out(torch.relu(h.float()))
        h = self.norm(h) * self.mask * self.frozen
        with torch.no_grad():
            self.ema.mul_(0.9).add_(h.mean(0) * 0.1)
        h = torch.cond(h.sum() > 0, lambda t: t.sin(), lambda t: t.tanh(), (h,))
        h = self.drop(h) + torch.tensor([2.0])
        return self.head(h)  # type: ignore[no-any-return]


class Wrapped(torch.nn.Module):
    """The model in this project's calling convention for torch.export.

    Its forward takes one dict and returns one flat tuple.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self.model = [model]  # in a list, so that names have no prefix
        self.body = type(model).forward
        self.frozen = model.frozen
        self.register_buffer("ema", model.ema)
        self.register_buffer("mask", model.mask, persistent=False)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.body(self, batch["x"])  # type: ignore[arg-type]
        loss = torch.nn.functional.cross_entropy(out, batch["y"])
        with torch.no_grad():
            accuracy = (out.argmax(-1) == batch["y"]).float().mean()
        return loss, accuracy


def batch_of(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randint(0, 16, (rows, 5), generator=generator),
        "y": torch.randint(0, 16, (rows,), generator=generator),
    }


@dataclass(frozen=True)
class Job:
    """Arguments of `write_package`."""

    program: Program
    updates: tuple[UpdateGraph, ...]
    recipe: Recipe


def exported(
    module: torch.nn.Module, args: tuple[object, ...], dynamic_shapes: object = None
) -> ExportedProgram:
    """Call torch.export.export without the warnings that its own tracing of control flow causes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export(module, args, dynamic_shapes=dynamic_shapes, strict=False)  # type: ignore[arg-type]


def _capture(name: str, module: torch.nn.Module) -> GraphCapture:
    rows = Dim("batch", min=2)
    graph = exported(module, (batch_of(4),), ({"x": {0: rows}, "y": {0: rows}},))
    inputs = (InputSpec("x", "int64", ("batch", 5)), InputSpec("y", "int64", ("batch",)))
    outputs = (OutputSpec("loss", OutputRole.LOSS), OutputSpec("accuracy", OutputRole.METRIC))
    return GraphCapture(name, graph, inputs, outputs)


class _Momentum(torch.nn.Module):
    def forward(
        self, param: torch.Tensor, grad: torch.Tensor, lr: torch.Tensor, velocity: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        velocity = 0.9 * velocity + grad
        return param - lr * velocity, velocity


class _FirstMomentum(torch.nn.Module):
    def forward(
        self, param: torch.Tensor, grad: torch.Tensor, lr: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return param - lr * grad, grad.clone()


def update_graph(group: str) -> UpdateGraph:
    length = Dim("length", min=2)

    def captured(module: torch.nn.Module, vectors: Sequence[bool]) -> ExportedProgram:
        arguments = tuple(torch.randn(6) if vector else torch.tensor(0.1) for vector in vectors)
        return exported(
            module, arguments, tuple({0: length} if vector else None for vector in vectors)
        )

    first, following = (
        captured(_FirstMomentum(), (True, True, False)),
        captured(_Momentum(), (True, True, False, True)),
    )
    return UpdateGraph(group, first, following, (StateSpec("velocity", "float32", True),))


def make_job(seed: int = 0, model: type[Model] = Model) -> Job:
    torch.manual_seed(seed)
    module = Wrapped(model())
    train = _capture("train", module.train())
    evaluate = _capture("eval", module.eval())
    parameters = tuple(
        ParameterSpec(
            n,
            "float32",
            tuple(p.shape),
            p.requires_grad,
            "emb.weight" if n == "head.weight" else None,
        )
        for n, p in module.named_parameters(remove_duplicate=False)
    )
    persistent = set(module.state_dict())
    buffers = tuple(
        BufferSpec(n, str(b.dtype).removeprefix("torch."), tuple(b.shape), n in persistent)
        for n, b in module.named_buffers()
    )
    state = {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}
    constants = {
        f"{graph.name}/{name}": tensor
        for graph in (train, evaluate)
        for name, tensor in graph.exported.constants.items()
        if isinstance(tensor, torch.Tensor) and name not in state
    }
    trained = tuple(p.name for p in parameters if p.trainable and p.alias_of is None)
    recipe = Recipe(
        optimizer="SGD",
        groups=(
            GroupRecipe(name="matrices", parameters=trained[:2], learning_rates=(0.1, 0.05)),
            GroupRecipe(name="rest", parameters=trained[2:], learning_rates=(0.1,)),
        ),
        steps=2,
        global_batch=4,
    )
    program = with_quantiles(
        Program({"train": train, "eval": evaluate}, parameters, buffers, state, constants),
        dict.fromkeys(("train", "eval"), batch_of(4)),
    )
    return Job(program, (update_graph("matrices"), update_graph("rest")), recipe)
