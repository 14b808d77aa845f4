"""Batch norm with cumulative statistics (momentum=None), in a form that torch.export traces.

torch reads the number of batches as a Python number and passes its inverse to the operator. Here
the operator computes the statistics of the batch, and a tensor updates the running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH_NORM: Any = nn.BatchNorm1d.__mro__[1]
"""Base class of all batch norms of torch."""


def counted_average(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return batch norm's forward with a tensor factor for cumulative statistics.

    It calls `original` in all other cases.
    """

    def forward(module: Any, x: Tensor) -> Tensor:
        if (
            module.momentum is not None
            or not module.training
            or not module.track_running_stats
            or module.num_batches_tracked is None
        ):
            return original(module, x)
        module._check_input_dim(x)
        mean, variance = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
        result = functional.batch_norm(
            x, mean, variance, module.weight, module.bias, True, 1.0, module.eps
        )
        with torch.no_grad():
            module.num_batches_tracked.add_(1)
            factor = 1.0 / module.num_batches_tracked.to(mean.dtype)
            module.running_mean.copy_(module.running_mean * (1 - factor) + mean * factor)
            module.running_var.copy_(module.running_var * (1 - factor) + variance * factor)
        return result

    return forward
