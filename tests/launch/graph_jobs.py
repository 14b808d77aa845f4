"""Jobs with several graphs, and the plain training loop whose results each must reproduce."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.shared import frozen_once
from torch import Tensor, nn, optim
from torch.nn import functional

import trainload
from trainload import Graph, Loss, Turn
from trainload.launching.data.sampler import rows
from trainload.packaging.package import Package

ROWS = 16
STEPS = 8
SEED = 5
SIZE = 90


@functools.cache
def digits() -> dict[str, Tensor]:
    """Return a part of scikit-learn's digits, and noise for a generator.

    image: (90, 64) in [0, 1]. label: (90,). noise: (90, 8).
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # takes seconds

    found = load_digits()
    generator = torch.Generator().manual_seed(1)
    images = torch.from_numpy(found.images[:SIZE]).float().flatten(1) / 16
    return {
        "image": images,
        "label": torch.from_numpy(found.target[:SIZE]),
        "noise": torch.randn(SIZE, 8, generator=generator),
    }


def write_digits(path: Path, names: set[str]) -> Path:
    """Write the columns `names` of `digits` as npz."""
    np.savez(path, **{name: value.numpy() for name, value in digits().items() if name in names})  # type: ignore[arg-type]  # arrays, not flags
    return path


def frozen(factory: pytest.TempPathFactory, name: str) -> Package:
    """Return a job of JOBS, frozen once per test session. Tests must not change it."""
    return frozen_once(factory, name, JOBS[name])


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def made(kind: Callable[[], nn.Module], names: set[str], **options: Any) -> trainload.Job:
    """Return a job on the digits, always with the same initial weights."""
    torch.manual_seed(0)
    batch = {name: value[:4] for name, value in digits().items() if name in names}
    given: dict[str, Any] = {"steps": STEPS, "global_batch": ROWS, "seed": SEED, **options}
    return trainload.Job(model=kind(), batch=batch, **given)


def gan(**options: Any) -> trainload.Job:
    """Return a job with two losses and two optimizers, which update disjoint parameters.

    The discriminator trains for two steps, the generator for one.
    """

    def generator(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        fake = torch.sigmoid(model.get_submodule("generator")(batch["noise"]))
        return functional.softplus(-model.get_submodule("discriminator")(fake)).mean()

    def discriminator(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        fake = torch.sigmoid(model.get_submodule("generator")(batch["noise"]))
        real, judged = (model.get_submodule("discriminator")(x) for x in (batch["image"], fake))
        accuracy = 0.5 * ((real > 0).float().mean() + (judged < 0).float().mean())
        return Loss(
            (functional.softplus(-real) + functional.softplus(judged)).mean(),
            metrics={"accuracy": accuracy},
        )

    graphs = {
        "generator": Graph(
            loss=generator,
            inputs=["noise"],
            optimizer=lambda m: optim.Adam(
                m.get_submodule("generator").parameters(), lr=2e-3, betas=(0.5, 0.9), eps=1e-3
            ),
        ),
        "discriminator": Graph(
            loss=discriminator,
            optimizer=lambda m: optim.AdamW(m.get_submodule("discriminator").parameters(), lr=1e-3),
            schedule=lambda step: 1 / (1 + 0.1 * step),
            clip_norm=0.5,
        ),
    }
    loop = [Turn("discriminator", times=2, fresh=True), "generator"]
    return made(
        lambda: nn.ModuleDict({"generator": mlp(8, 32, 64), "discriminator": mlp(64, 32, 1)}),
        {"image", "noise"},
        graphs=graphs,
        loop=loop,
        **options,
    )


def distillation() -> trainload.Job:
    """Return a job with a teacher graph that feeds a student, and trains every other round."""

    def teach(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": model.get_submodule("teacher")(batch["image"])}

    def student(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model.get_submodule("student")(batch["image"])
        return functional.kl_div(
            logits.log_softmax(-1), batch["wanted"].softmax(-1), reduction="batchmean"
        )

    def teacher(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(
            model.get_submodule("teacher")(batch["image"]), batch["label"]
        )

    graphs = {
        "teach": Graph(compute=teach, inputs=["image"]),
        "student": Graph(
            loss=student,
            inputs=["image"],
            feeds={"wanted": "teach.logits"},
            optimizer=lambda m: optim.SGD(m.get_submodule("student").parameters(), 0.1),
        ),
        "teacher": Graph(
            loss=teacher,
            optimizer=lambda m: optim.Adam(m.get_submodule("teacher").parameters(), 0.01),
        ),
    }
    loop = ["teach", Turn("student", times=2), Turn("teacher", every=2, start=1)]
    return made(
        lambda: nn.ModuleDict({"teacher": mlp(64, 32, 10), "student": mlp(64, 16, 10)}),
        {"image", "label"},
        graphs=graphs,
        loop=loop,
    )


def actor_critic() -> trainload.Job:
    """Return a job with a torso that two optimizers train, each with its own loss.

    The critic's advantage is an input of the actor.
    """

    def critic(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        value = model.get_submodule("value")(model.get_submodule("torso")(batch["image"])).squeeze(
            -1
        )
        reward = batch["label"].float() / 10
        return Loss((value - reward).square().mean(), outputs={"advantage": reward - value})

    def actor(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model.get_submodule("policy")(
            model.get_submodule("torso")(batch["image"])
        ).log_softmax(-1)
        taken: Tensor = scores.gather(-1, batch["label"].unsqueeze(-1)).squeeze(-1)
        return -(taken * batch["advantage"]).mean()

    def over(head: str) -> Callable[[nn.Module], optim.Optimizer]:
        return lambda m: optim.SGD(
            [*m.get_submodule("torso").parameters(), *m.get_submodule(head).parameters()],
            lr=0.05,
            momentum=0.9,
            weight_decay=0.1,
        )

    graphs = {
        "critic": Graph(loss=critic, optimizer=over("value")),
        "actor": Graph(
            loss=actor, feeds={"advantage": "critic.advantage"}, optimizer=over("policy")
        ),
    }
    return made(
        lambda: nn.ModuleDict(
            {"torso": mlp(64, 24, 16), "value": nn.Linear(16, 1), "policy": nn.Linear(16, 10)}
        ),
        {"image", "label"},
        graphs=graphs,
    )


def tasks() -> trainload.Job:
    """Return a job with two losses under one optimizer with momentum and weight decay.

    Each loss has its own head; a step of one loss does not update the other's head.
    """

    def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(
            model.get_submodule("classes")(model.get_submodule("torso")(batch["image"])),
            batch["label"],
        )

    def rebuild(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(
            model.get_submodule("pixels")(model.get_submodule("torso")(batch["image"])),
            batch["image"],
        )

    return made(
        lambda: nn.ModuleDict(
            {"torso": mlp(64, 16, 16), "classes": nn.Linear(16, 10), "pixels": nn.Linear(16, 64)}
        ),
        {"image", "label"},
        graphs={"classify": Graph(loss=classify), "rebuild": Graph(loss=rebuild, inputs=["image"])},
        loop=["classify", Turn("rebuild", fresh=True)],
        optimizer=lambda m: optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
        schedule=lambda step: 1 - 0.03 * step,
    )


JOBS: dict[str, Callable[[], trainload.Job]] = {
    "gan": gan,
    "distillation": distillation,
    "actor_critic": actor_critic,
    "tasks": tasks,
}


@dataclass(frozen=True)
class Eager:
    """Results of the plain loop: the last loss of every graph in each round, and the model."""

    losses: list[dict[str, float]]
    model: nn.Module


def eager(job: trainload.Job) -> Eager:
    """Run the plain loop over a job's graphs, using only PyTorch."""
    model, whole = job.model, {n: t for n, t in digits().items() if n in job.batch}
    optimizers: dict[str, Any] = {}
    shared = None if job.optimizer is None else job.optimizer(model)
    for name, graph in job.graphs.items():
        if graph.loss is not None:
            optimizers[name] = shared if graph.optimizer is None else graph.optimizer(model)
    schedules = {
        id(optimizers[n]): g.schedule or job.schedule
        for n, g in job.graphs.items()
        if g.loss is not None
    }
    rates = {
        key: [group["lr"] for group in o.param_groups]
        for o in optimizers.values()
        for key in [id(o)]
    }
    updates = dict.fromkeys(rates, 0)
    drawn, losses = 0, []
    turns = [Turn(turn) if isinstance(turn, str) else turn for turn in job.loop or list(job.graphs)]

    def draw() -> dict[str, Tensor]:
        nonlocal drawn
        chosen = torch.from_numpy(rows(SEED, SIZE, drawn * ROWS, ROWS))
        drawn += 1
        return {name: tensor[chosen] for name, tensor in whole.items()}

    for number in range(job.steps):
        fed: dict[str, Tensor] = {}
        found: dict[str, float] = {}
        common = draw() if any(not turn.fresh for turn in turns) else {}
        for turn in turns:
            if number < turn.start or (number - turn.start) % turn.every:
                continue
            graph = job.graphs[turn.graph]
            for _ in range(turn.times):
                batch: dict[str, Any] = {**(draw() if turn.fresh else common)}
                batch = {
                    n: t for n, t in batch.items() if graph.inputs is None or n in graph.inputs
                }
                batch |= {entry: fed[source] for entry, source in graph.feeds.items()}
                if graph.compute is not None:
                    model.eval()
                    with torch.no_grad():
                        fed |= {
                            f"{turn.graph}.{n}": t for n, t in graph.compute(model, batch).items()
                        }
                    continue
                model.train()
                assert graph.loss is not None
                result = graph.loss(model, batch)
                loss = result if isinstance(result, Loss) else Loss(result)
                optimizer = optimizers[turn.graph]
                key = id(optimizer)
                for parameter in model.parameters():
                    parameter.grad = None
                loss.value.backward()  # type: ignore[no-untyped-call]  # torch's own
                own = [
                    p
                    for group in optimizer.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
                if graph.clip_norm is not None:
                    nn.utils.clip_grad_norm_(own, graph.clip_norm)
                schedule: Any = schedules[key]
                for group, rate in zip(optimizer.param_groups, rates[key], strict=True):
                    group["lr"] = rate if schedule is None else rate * schedule(updates[key])
                optimizer.step()
                updates[key] += 1
                fed |= {f"{turn.graph}.{n}": t.detach() for n, t in loss.outputs.items()}
                found[turn.graph] = loss.value.item()
        losses.append(found)
    return Eager(losses, model)
