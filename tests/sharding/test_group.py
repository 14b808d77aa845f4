"""The process group that rewritten graphs use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainload.autograd_trace.derivation.named_groups import bind_groups

NAME = "a group of tests"


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]  # public, though not in __all__
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_gloo_carries_out_one_collective_after_another() -> None:
    bind_groups({NAME: [[0]]})
    registry: Any = torch.distributed.distributed_c10d
    group = registry._resolve_process_group(NAME)
    assert group is not dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).options._threads == 1


@pytest.mark.usefixtures("world_of_one")
def test_its_name_works_in_functional_collectives() -> None:
    bind_groups({NAME: [[0]]})
    ops = torch.ops._c10d_functional
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(torch.arange(3.0), 1, NAME))
    torch.testing.assert_close(gathered, torch.arange(3.0))
