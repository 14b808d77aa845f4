"""The time that a rank waits for other ranks within its steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import on_ranks
from tests.waiting import wait_until
from torch import Tensor
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.derivation.wait_time import WaitTime
from trainload.core.atomic import replace_file

c10d = torch.ops._c10d_functional
PAUSE = 0.5


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[str]:
    """A process group of one rank; its name."""
    url = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def late(rank: int, world: int, folder: Path) -> None:
    """Rank 1 begins a collective when rank 0 has waited for it for PAUSE seconds, by a clock in a
    file.
    """
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    graph = symbolic_trace(
        lambda x: c10d.wait_tensor.default(c10d.all_reduce.default(x, "sum", name))
    )
    clock, looked = folder / "clock", folder / f"looked-{rank}"
    clock.write_text("0.0")

    def now() -> float:
        looked.touch()
        return float(clock.read_text())

    waits = WaitTime()
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch, waits.measured():
        patch.setattr("time.perf_counter", now)
        if rank == 1:
            wait_until((folder / "looked-0").exists)
            replace_file(clock, str(PAUSE).encode())
        result = graph(torch.ones(2))
    torch.testing.assert_close(result, torch.full((2,), 2.0))
    (folder / f"waited-{rank}").write_text(str(waits.taken()))


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Seconds that each rank has waited."""
    folder = tmp_path_factory.mktemp("late")
    on_ranks(2, late, folder)
    return [float((folder / f"waited-{rank}").read_text()) for rank in range(2)]


def test_the_rank_that_is_early_waits(waited: list[float]) -> None:
    assert waited[0] > 0.9 * PAUSE


def test_the_rank_that_is_late_does_not(waited: list[float]) -> None:
    assert waited[1] < 0.1 * PAUSE


def test_what_is_outside_of_the_context_is_not_measured(alone: str) -> None:
    waits = WaitTime()
    with waits.measured():
        pass
    c10d.wait_tensor.default(c10d.all_reduce.default(torch.ones(2), "sum", alone))
    assert waits.taken() == 0.0


def test_seconds_are_taken_once(alone: str) -> None:
    waits = WaitTime()
    with waits.measured():
        c10d.wait_tensor.default(c10d.all_reduce.default(torch.ones(2), "sum", alone))
    assert waits.taken() > 0.0
    assert waits.taken() == 0.0


def test_the_operator_can_be_traced_while_it_is_measured(alone: str) -> None:
    def f(x: Tensor) -> Tensor:
        result: Tensor = c10d.wait_tensor.default(c10d.all_reduce.default(x, "sum", alone))
        return result

    with WaitTime().measured():
        graph = make_fx(f, tracing_mode="fake")(torch.ones(2)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        c10d.all_reduce.default,
        c10d.wait_tensor.default,
    ]
