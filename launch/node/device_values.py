"""Values of the host on a rank's device, without waiting for it.

`torch.tensor(..., device="cuda")` and `.to("cuda")` of ordinary memory copy synchronously: the host
waits for everything that the device still has to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scalar_on(device: torch.device, value: float, dtype: torch.dtype) -> Tensor:
    """Return a 0-dim tensor, which the device fills by itself."""
    return torch.full((), value, dtype=dtype, device=device)


def vector_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return a 1-dim tensor."""
    return moved_to(device, torch.tensor(values, dtype=dtype))


def moved_to(device: torch.device, value: Tensor) -> Tensor:
    """Return a tensor of the host on the device; on a CPU it is the same tensor.

    It is copied to pinned memory first, which torch keeps until the device has read it.
    """
    if device.type == "cpu":
        return value
    return value.pin_memory().to(device, non_blocking=True)
