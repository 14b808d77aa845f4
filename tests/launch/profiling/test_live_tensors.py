"""Memory of the tensors that are alive."""

from __future__ import annotations

import torch

from trainload.launching.profiling.live_tensors import LiveTensors, Origin
from trainload.launching.profiling.profile_result import Kind

CPU = torch.device("cpu")
ONE = Origin(Kind.ACTIVATIONS, "one")
TWO = Origin(Kind.OTHER, "two")
BYTES = 400


def test_views_count_once() -> None:
    live, tensor = LiveTensors(CPU), torch.zeros(100)
    view = tensor[3:].view(97, 1)
    live.see(tensor, ONE)
    live.see(view, TWO)
    live.see(tensor, ONE)
    assert live.bytes == BYTES


def test_a_view_keeps_the_storage() -> None:
    live, tensor = LiveTensors(CPU), torch.zeros(100)
    view = tensor[3:]
    live.see(tensor, ONE)
    live.see(view, ONE)
    del tensor
    assert live.bytes == BYTES
    del view
    assert live.bytes == 0


def test_the_most_of_a_kind_is_remembered() -> None:
    live, tensor = LiveTensors(CPU), torch.zeros(100)
    live.see(tensor, ONE)
    del tensor
    other = torch.zeros(50)
    live.see(other, TWO)
    assert (live.peak, live.bytes) == (BYTES, BYTES // 2)
    assert (live.most[ONE.kind], live.most[TWO.kind]) == (BYTES, BYTES // 2)


def test_the_snapshot_is_of_the_peak() -> None:
    def use(live: LiveTensors) -> None:
        first, second = torch.zeros(100), torch.zeros(50)
        live.see(first, ONE)
        live.see(second, TWO)
        del first
        third = torch.zeros(20)
        live.see(third, ONE)

    found = LiveTensors(CPU)
    use(found)
    again = LiveTensors(CPU, found.peak_at)
    use(again)
    assert dict(again.snapshot) == {ONE: BYTES, TWO: BYTES // 2}


def test_other_devices_and_empty_tensors_do_not_count() -> None:
    live = LiveTensors(CPU)
    live.see(torch.empty(5, device="meta"), ONE)
    live.see(torch.zeros(0), ONE)
    assert (live.seen, live.bytes) == (0, 0)
