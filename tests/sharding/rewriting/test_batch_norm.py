"""Batch norms over the rows of two ranks compute what one process computes for all rows.

This holds for outputs, gradients and running statistics.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.capture.jobs import job
from tests.ranks import on_ranks
from tests.sharding.given import value
from torch import Tensor, nn

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.named_groups import bind_groups
from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.sharding.plans.plan import DATA
from trainload.sharding.rewriting.batch_norm import BACKWARD, FORWARD, synchronised

WORLD, ROWS = 2, 8
DTYPES = (torch.float32, torch.bfloat16)


class Net(nn.Module):
    """Batch norms of images and of features: (rows, 3, 6, 6) -> (rows, 4).

    One of them has no weights and tracks no statistics.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm2d(8),
                nn.BatchNorm2d(8, affine=False, track_running_stats=False),
                nn.BatchNorm1d(16),
            ]
        )
        self.wide, self.out = nn.Linear(128, 16), nn.Linear(16, 4)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.first(x).to(self.dtype)).float())
        x = torch.relu(self.norms[1](self.second(x)))
        found: Tensor = self.out(self.norms[2](self.wide(x.flatten(1))))
        return found


def job_of(dtype: torch.dtype) -> Job:
    torch.manual_seed(0)
    return job(Net(dtype), batch={"x": 3 * torch.randn(ROWS, 3, 6, 6) + 1})


@functools.cache
def step_of(dtype: torch.dtype) -> tuple[Job, Program, StepGraph]:
    of = job_of(dtype)
    program = capture(of)
    return of, program, derive(program, "train", torch.device("cpu"))


def prepare(_folder: Path) -> None:
    for dtype in DTYPES:
        step_of(dtype)


def rank_main(rank: int, world: int, folder: Path) -> None:
    bind_groups({DATA: (tuple(range(world)),)})
    for dtype in DTYPES:
        of, program, step = step_of(dtype)
        local = synchronised(step, world, DATA)
        found: dict[str, Tensor] = {}
        for kind, graph in (("whole", step), ("local", local)):
            rows = of.batch if graph is step else {"x": of.batch["x"].chunk(world)[rank]}
            mine = replace(of, batch=rows)
            given = [
                value(port, mine, dict(program.state), program.constants) for port in graph.inputs
            ]
            results = graph.module(*given)
            found |= {
                f"{kind}/{p.role.value}/{p.name}": r.contiguous()
                for p, r in zip(graph.outputs, results, strict=True)
            }
        save_file(found, folder / f"{dtype}-{rank}.safetensors")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(WORLD, rank_main, folder, prepare)
    return folder


def outputs(
    ranks: Path, dtype: torch.dtype, rank: int
) -> tuple[dict[Port, Tensor], dict[Port, Tensor]]:
    """Return the outputs of the whole graph, and those of this rank."""
    found: dict[str, dict[Port, Tensor]] = {"whole": {}, "local": {}}
    for key, tensor in load_file(ranks / f"{dtype}-{rank}.safetensors").items():
        kind, role, name = key.split("/")
        found[kind][Port(Role(role), name)] = tensor
    return found["whole"], found["local"]


def test_the_loss_of_two_ranks_is_that_of_one(ranks: Path) -> None:
    (whole, first), (_, second) = (outputs(ranks, torch.float32, rank) for rank in range(WORLD))
    port = Port(Role.LOSS, "loss")
    assert torch.allclose((first[port] + second[port]) / WORLD, whole[port], rtol=1e-6)


def test_the_gradients_of_two_ranks_make_those_of_one(ranks: Path) -> None:
    (whole, first), (_, second) = (outputs(ranks, torch.float32, rank) for rank in range(WORLD))
    ports = [port for port in whole if port.role is Role.GRADIENT]
    assert len(ports) == 12
    for port in ports:
        assert torch.allclose(first[port] + second[port], whole[port], rtol=1e-5, atol=1e-6), port


@pytest.mark.parametrize("rank", range(WORLD))
def test_running_statistics_are_those_of_all_rows(ranks: Path, rank: int) -> None:
    whole, local = outputs(ranks, torch.float32, rank)
    ports = [port for port in whole if port.role is Role.BUFFER]
    assert len(ports) == 6
    for port in ports:
        assert torch.allclose(local[port].double(), whole[port].double(), rtol=1e-6, atol=1e-7), (
            port
        )


def test_low_precision_is_reckoned_in_float32(ranks: Path) -> None:
    (whole, first), (_, second) = (outputs(ranks, torch.bfloat16, rank) for rank in range(WORLD))
    for port, value_of_all in whole.items():
        if port.role is Role.GRADIENT:
            together = first[port] + second[port]
            # a bias before a norm has a gradient of zero
            assert (together - value_of_all).norm() <= 0.02 * value_of_all.norm() + 1e-4, port


@pytest.mark.slow
def test_every_batch_norm_is_replaced() -> None:
    _, _, step = step_of(torch.float32)
    assert sum(node.target in FORWARD for node in step.module.graph.nodes) == 3
    made = synchronised(step, WORLD, DATA)
    assert not [node for node in made.module.graph.nodes if node.target in (*FORWARD, BACKWARD)]


def test_what_normalises_rows_by_themselves_is_left_alone() -> None:
    torch.manual_seed(0)
    of = job(
        nn.Sequential(nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten()),
        batch={"x": torch.randn(4, 4, 5, 5)},
    )
    step = derive(capture(of), "train", torch.device("cpu"))
    assert synchronised(step, WORLD, DATA) is step
