"""Memory for tensors that are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainload.packaging.tensors.safetensors_file import DTYPES, bytes_of, to_fill

SHAPES = ((), (0,), (3, 0, 2), (5, 7), (1024, 1031, 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_written_to_the_memory_is_what_the_tensor_holds(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = to_fill(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)
    memory = bytes_of(tensor)
    memory[:] = bytes(len(memory))
    assert (
        not tensor.view(torch.uint8).any()
        if shape
        else not tensor.reshape(1).view(torch.uint8).any()
    )


def test_the_memory_of_a_large_tensor_goes_with_it() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size = 64 * 2**20
    before = mapped()
    tensor = to_fill((size,), torch.uint8)
    tensor.fill_(1)
    assert mapped() - before >= size
    del tensor
    assert mapped() - before < size // 2


def test_a_large_tensor_can_be_changed_and_trained() -> None:
    weight = torch.nn.Parameter(to_fill((2048, 1024), torch.float32).fill_(1.0))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert not weight.any()
