"""Trainers of the step benchmark: torch's own strategies from the example's source, and trainload.

trainload trains from a package. Each trainer runs in a process of its own, as one of two ranks of a
gloo group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from measure import note, see_example
from systems import Place, System
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

see_example()

import job as example  # noqa: E402
from model import GPT, Config  # noqa: E402

CLIP_NORM = 1.0


class Trainer(Protocol):
    """Interface of a trainer of one rank."""

    def step(self, number: int, tokens: Tensor) -> float:
        """Do one optimizer update on this rank's rows, uint8 (rows, context + 1).

        Returns a loss: peers return that of their own rows, trainload that of all rows.
        """
        ...


class Training(nn.Module):
    """The example's model with its loss: (rows, context + 1) tokens -> (loss, accuracy)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        result = example.loss(self.model, {"tokens": tokens})
        return result.value, result.metrics["accuracy"]


class Peer:
    """Eager autograd with torch's fused AdamW, gradient clipping and the example's schedule."""

    def __init__(
        self, module: Callable[[Tensor], tuple[Tensor, Tensor]], parameters: list[nn.Parameter]
    ) -> None:
        self._module = module
        self._parameters = parameters
        groups = [
            {
                "params": [p for p in parameters if p.ndim >= 2],
                "weight_decay": example.WEIGHT_DECAY,
            },
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=example.PEAK_RATE, betas=(0.9, 0.95), fused=True
        )

    def step(self, number: int, tokens: Tensor) -> float:
        loss, accuracy = self._module(tokens)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = example.PEAK_RATE * example.schedule(number)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        accuracy.item()
        return float(loss.detach())


def ddp(place: Place, compiled: bool) -> Peer:
    """Return DistributedDataParallel with gradients as views of its buckets.

    If compiled, the whole wrapper is, so that torch splits the graph at buckets.
    """
    wrapped = DistributedDataParallel(Training(model_of(place)), gradient_as_bucket_view=True)
    parameters = list(wrapped.parameters())
    return Peer(torch.compile(wrapped) if compiled else wrapped, parameters)


def fsdp2(place: Place, compiled: bool) -> Peer:
    """Return FSDP2 with `fully_shard` on each block and on the rest.

    If compiled, each block is compiled before it is sharded; the head with the loss stays eager.
    """
    model = model_of(place)
    training = Training(model)
    mesh = init_device_mesh("cpu", (place.world_size,))
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(training, mesh=mesh)
    return Peer(training, list(training.parameters()))


def model_of(place: Place) -> GPT:
    """Build the example's model with the same weights as its job."""
    torch.manual_seed(0)
    return GPT(Config(autocast=place.precision == "bf16"))


class Trainload:
    """trainload's engine in this process, configured as in a worker of `trainload launch`."""

    def __init__(self, place: Place, strategy: str) -> None:
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
        folder = compile_build(
            package,
            plan,
            device,
            place.cache,
            lambda stage, seconds: note(f"  {stage}: {seconds:.1f} s"),
        )
        dist.barrier()
        self._engine = Engine(
            package, plan, place.rank, device, load_build(folder, package, plan, place.cache)
        )
        self._engine.held.load_package()
        self._mode = deterministic  # as in every worker
        self._first_row = place.rank * plan.rows_per_call

    def step(self, number: int, tokens: Tensor) -> float:
        from trainload.launching.worker.calls import Microbatch
        from trainload.launching.worker.engine import Draw

        with self._mode():
            return self._engine.step(
                number, [Draw([Microbatch({"tokens": tokens}, self._first_row)])]
            ).loss


def make_trainer(system: System, place: Place) -> Trainer:
    """Build one rank's trainer; the process group must be initialized."""
    if system.kind == "trainload":
        return Trainload(place, system.strategy)
    return (ddp if system.kind == "ddp" else fsdp2)(place, system.compiled)
