"""Trainers of the step benchmark: torch's own strategies from a job's source, and trainload.

trainload trains from a package. Each trainer runs in a process of its own, as one of two ranks of a
gloo group.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from measure import see_example
from systems import Place, System
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

see_example()

import job as example  # noqa: E402

import trainload  # noqa: E402
from trainload.freezing.load_job import load_job  # noqa: E402

CLIP_NORM = 1.0
"""Maximum norm of the gradient in the example's job."""
Batch = dict[str, Tensor]


class Trainer(Protocol):
    """Interface of a trainer of one rank."""

    def step(self, number: int, batch: Batch) -> float:
        """Do one optimizer update on this rank's rows.

        Returns a loss: peers return that of their own rows, trainload that of all rows.
        """
        ...


class Training(nn.Module):
    """A model with its loss, by default the example's: batch -> loss, and metrics if it has any."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.model, self.loss = model, loss or example.loss

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        result = self.loss(self.model, batch)
        if isinstance(result, trainload.Loss):
            return result.value, *result.metrics.values()
        return (result,)


class Peer:
    """Eager autograd with a job's optimizer, in torch's fused form, its clipping and schedule."""

    def __init__(self, job: trainload.Job, module: Callable[[Batch], tuple[Tensor, ...]]) -> None:
        self._module, self._clip_norm = module, job.clip_norm
        self._parameters = list(job.model.parameters())
        assert job.optimizer is not None
        optimizer = job.optimizer(job.model)
        assert isinstance(optimizer, torch.optim.Optimizer)
        self._optimizer = optimizer
        for group in self._optimizer.param_groups:
            group["fused"] = True
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._schedule: Any = job.schedule

    def step(self, number: int, batch: Batch) -> float:
        loss, *metrics = self._module(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        if self._schedule is not None:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._schedule(number)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for metric in metrics:
            metric.item()
        return float(loss.detach())


def ddp(job: trainload.Job, compiled: bool) -> Peer:
    """Return DistributedDataParallel with gradients as views of its buckets.

    If compiled, the whole wrapper is, so that torch splits the graph at buckets.
    """
    wrapped = DistributedDataParallel(Training(job.model, job.loss), gradient_as_bucket_view=True)
    return Peer(job, torch.compile(wrapped) if compiled else wrapped)


def fsdp2(job: trainload.Job, compiled: bool, world_size: int) -> Peer:
    """Return FSDP2 with `fully_shard` on each block and on the rest.

    If compiled, each block is compiled before it is sharded; the head with the loss stays eager.
    """
    training = Training(job.model, job.loss)
    mesh = init_device_mesh("cpu", (world_size,))
    for block in blocks_of(job.model):
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(training, mesh=mesh)
    return Peer(job, training)


def blocks_of(model: nn.Module) -> Iterable[nn.Module]:
    """Return the repeated layers of a model: the modules of its longest list."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return max(lists, key=len)


class Trainload:
    """trainload's engine in this process, configured as in a worker of `trainload launch`."""

    def __init__(self, place: Place, strategy: str, flat: bool) -> None:
        from trainload.autograd_trace.derivation.named_groups import bind_groups
        from trainload.launching.node.build import compile_build, load_build
        from trainload.launching.node.determinism import deterministic
        from trainload.launching.worker.engine import Engine
        from trainload.packaging.package import open_package
        from trainload.sharding.plans.plan import Plan

        package = open_package(place.package)
        plan = Plan.model_validate_json((place.plans / f"{strategy}.json").read_bytes())
        bind_groups(plan.groups())
        device = torch.device("cpu")
        # in a process of its own, as in a launch: the compiler's memory is not a rank's
        if place.rank == 0:
            subprocess.run(
                [
                    *(sys.executable, Path(__file__).with_name("compile_package.py")),
                    *(place.package, place.plans / f"{strategy}.json", place.cache),
                    *(["--flat"] if flat else []),
                ],
                check=True,
            )
        dist.barrier()
        folder = compile_build(package, plan, device, place.cache, lambda *_: None)
        self._engine = Engine(
            package, plan, place.rank, device, load_build(folder, package, plan, place.cache)
        )
        self._engine.held.load_package()
        self._mode = deterministic  # as in every worker
        self._first_row = place.rank * plan.rows_per_call

    def step(self, number: int, batch: Batch) -> float:
        from trainload.launching.worker.calls import Microbatch
        from trainload.launching.worker.engine import Draw

        with self._mode():
            return self._engine.step(number, [Draw([Microbatch(batch, self._first_row)])]).loss


def make_trainer(system: System, place: Place) -> Trainer:
    """Build one rank's trainer; the process group must be initialized."""
    if system.kind == "trainload":
        return Trainload(place, system.strategy, system.flat)
    job = load_job(place.job)
    if system.kind == "ddp":
        return ddp(job, system.compiled)
    return fsdp2(job, system.compiled, place.world_size)
