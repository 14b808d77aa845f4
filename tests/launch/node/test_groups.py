"""A process leaves its process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from trainload.launching.node.process_groups import gathered, leave_groups


@pytest.fixture
def others() -> set[str]:
    """Threads of groups that earlier tests in this process left."""
    return gloos_threads()


@pytest.fixture
def alone(others: set[str], tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    if dist.is_initialized():
        leave_groups()


def gloos_threads() -> set[str]:
    found = set()
    for each in Path("/proc/self/task").iterdir():
        # a thread that has ended meanwhile
        with suppress(FileNotFoundError, ProcessLookupError):
            if "gloo" in (each / "comm").read_text():
                found.add(each.name)
    return found


def raise_with(control: dist.ProcessGroup | None) -> None:
    errors = [ValueError(str(control))]
    raise errors[0]  # a cycle: its frame refers to it, and to the group


@pytest.mark.slow
def test_no_thread_of_a_group_is_left_that_garbage_holds(alone: None, others: set[str]) -> None:
    with pytest.raises(ValueError, match="ProcessGroup"):
        raise_with(dist.group.WORLD)
    assert gloos_threads() - others
    leave_groups()
    assert gloos_threads() - others == set()


def test_what_one_rank_has_is_gathered_without_a_group() -> None:
    assert gathered("a", None) == ["a"]


def test_what_a_group_of_one_rank_has_is_gathered(alone: None) -> None:
    assert gathered("a", dist.group.WORLD) == ["a"]
