"""Batch norm whose running statistics are the mean over all steps (momentum=None), as torch.export can trace it.

torch reads the count of batches as a Python number and hands its inverse to the operator. Here the operator computes the statistics of the
batch, and the running ones are moved by a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH_NORM: Any = nn.BatchNorm1d.__mro__[1]
"""The class below all batch norms of torch."""


def counted_average(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Batch norm's forward, by `original` where the factor of the running statistics is no tensor."""

    def forward(module: Any, x: Tensor) -> Tensor:
        if module.momentum is not None or not module.training or not module.track_running_stats or module.num_batches_tracked is None:
            return original(module, x)
        module._check_input_dim(x)
        mean, variance = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
        result = functional.batch_norm(x, mean, variance, module.weight, module.bias, True, 1.0, module.eps)
        with torch.no_grad():
            module.num_batches_tracked.add_(1)
            factor = 1.0 / module.num_batches_tracked.to(mean.dtype)
            module.running_mean.copy_(module.running_mean * (1 - factor) + mean * factor)
            module.running_var.copy_(module.running_var * (1 - factor) + variance * factor)
        return result

    return forward
