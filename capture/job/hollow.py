"""Replaces a model's tensors without values by ordinary CPU tensors that take no memory.

Each is mapped from one sparse file that is never read: a trace needs only shapes, strides and
dtypes. So the graphs equal those of a model with values, and a model of any size fits. A model on
the meta device, in contrast, would put "meta" into its graphs (factory calls, autocast).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from trainload.capture.job.tensor_classes import has_values
from trainload.core.errors import StorageError


@contextmanager
def hollow(model: nn.Module) -> Iterator[None]:
    """Replace the model's parameters and buffers without values inside the block; ties are kept.

    Raises:
        StorageError: if the folder for temporary files cannot hold a sparse file.
    """
    registries: list[dict[str, Any]] = [
        slots for module in model.modules() for slots in (module._parameters, module._buffers)
    ]
    replaced = [
        (registry, name, value)
        for registry in registries
        for name, value in registry.items()
        if value is not None and not has_values(value)
    ]
    largest = max((value.numel() * value.dtype.itemsize for _, _, value in replaced), default=0)
    plain_tensors: dict[int, Tensor] = {}
    with _sparse_file(largest) as path:
        for _, _, value in replaced:
            if id(value) not in plain_tensors:
                plain_tensors[id(value)] = _map_file(value, path)
    try:
        for registry, name, value in replaced:
            registry[name] = plain_tensors[id(value)]
        yield
    finally:
        for registry, name, value in replaced:
            registry[name] = value


def _map_file(value: Tensor, path: str) -> Tensor:
    if value.numel() == 0:
        plain = torch.empty(value.shape, dtype=value.dtype)
    else:
        plain = torch.from_file(path, shared=True, size=value.numel(), dtype=value.dtype).view(
            value.shape
        )
    return (
        nn.Parameter(plain, requires_grad=value.requires_grad)
        if isinstance(value, nn.Parameter)
        else plain
    )


@contextmanager
def _sparse_file(size: int) -> Iterator[str]:
    """Yield the path of a sparse file of this many bytes.

    Mappings of it remain valid after it is removed.
    """
    try:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            os.truncate(file.fileno(), size)
    except OSError as error:
        raise StorageError(
            f"cannot create a sparse file of {size:,} bytes: {error.strerror}",
            where=tempfile.gettempdir(),
            hint="Set TMPDIR to another folder.",
        ) from error
    try:
        yield file.name
    finally:
        with suppress(OSError):
            os.unlink(file.name)
