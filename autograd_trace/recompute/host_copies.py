"""Operators that copy values from a device to the host's memory and back, while it computes.

    host = offload(value)                     # begins to copy
    ...
    copied = offloaded([host], [value])       # the device waits; `value` can be freed now
    ...
    handle = reload(host, copied, device)     # begins to copy back
    ...
    again = reloaded(handle, host, device)    # the device waits

On GPUs, copies run on two streams of their own, one for each direction, and use pinned memory. No
operator makes the host wait. On CPUs they are plain copies.

Compilers know nothing of the streams. Therefore `offloaded` reads the value, so that its memory is
not used again before, and `reload` returns a handle in place of the memory that it writes to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LAYOUT = (torch.Tag.flexible_layout,)
"""Compilers may choose the layout of a value. Otherwise they would give each of the operators a
copy of its own, in the layout of the traced graph, and free it at once.
"""


@torch.library.custom_op("trainload::offload", mutates_args=(), tags=_LAYOUT)
def offload(value: Tensor) -> Tensor:
    """Begin to copy a value to the host, where it has the same shape and strides.

    `value` must exist until `offloaded`.
    """
    host = _empty_like(value, torch.device("cpu"))
    if value.numel():
        _to_host[host.data_ptr()] = (value.data_ptr(), _copied(host, value, _TO_HOST))
    return host


@torch.library.custom_op("trainload::offloaded", mutates_args=(), tags=_LAYOUT)
def offloaded(hosts: list[Tensor], values: list[Tensor]) -> Tensor:
    """Make the device wait until values have been copied to the host.

    Returns:
        An empty tensor, which `reload` reads so that it follows this operator.

    Raises:
        RuntimeError: a value is not in the memory that is copied, which may have been overwritten.
    """
    for host, value in zip(hosts, values, strict=True):
        if value.numel():
            place, copied = _to_host.pop(host.data_ptr(), (None, None))
            if place != value.data_ptr():
                raise RuntimeError("the memory of an offloaded value was freed during its copy")
            _wait(copied, value.device)
    return torch.empty(0)


@torch.library.custom_op("trainload::reload", mutates_args=(), tags=_LAYOUT)
def reload(host: Tensor, copied: Tensor, device: torch.device) -> Tensor:
    """Begin to copy a value back to a device, and return a handle for `reloaded`: (1,) on the
    CPU.
    """
    handle, value = torch.zeros(1), _empty_like(host, device)
    event = _copied(value, host, _TO_DEVICE) if value.numel() else None
    _to_device[handle.data_ptr()] = (value, event)
    return handle


@torch.library.custom_op("trainload::reloaded", mutates_args=(), tags=_LAYOUT)
def reloaded(handle: Tensor, host: Tensor, device: torch.device) -> Tensor:
    """Make the device wait until a value has been copied back, and return the value."""
    value, copied = _to_device.pop(handle.data_ptr())
    _wait(copied, device)
    return value


@offload.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


@offloaded.register_fake
def _(hosts: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.empty(0, device="cpu")


@reload.register_fake
def _(host: Tensor, copied: Tensor, device: torch.device) -> Tensor:
    return torch.empty(1, device="cpu")


@reloaded.register_fake
def _(handle: Tensor, host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


OFFLOAD: Callable[..., Any] = torch.ops.trainload.offload.default
OFFLOADED: Callable[..., Any] = torch.ops.trainload.offloaded.default
RELOAD: Callable[..., Any] = torch.ops.trainload.reload.default
RELOADED: Callable[..., Any] = torch.ops.trainload.reloaded.default

_to_host: dict[int, tuple[int, torch.cuda.Event | None]] = {}
"""Address of a value on the host -> its address on the device, and the event after its copy, until
`offloaded`.
"""
_to_device: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}
"""Address of a handle -> the value on the device and the event after its copy, until `reloaded`."""
_TO_HOST, _TO_DEVICE = 0, 1


def _empty_like(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(
        value.shape,
        value.stride(),
        dtype=value.dtype,
        device=device,
        pin_memory=device.type == "cpu" and value.device.type != "cpu",
    )


def _copied(to: Tensor, value: Tensor, direction: int) -> torch.cuda.Event | None:
    """Copy, on the stream of a direction, after what the device has to do now. Return an event
    after the copy; None on CPUs, where it is done.
    """
    device = max(to.device, value.device, key=lambda each: each.type != "cpu")
    if device.type == "cpu":
        _memory(to).copy_(_memory(value))
        return None
    stream = _streams(device)[direction]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _memory(to).copy_(_memory(value), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return event


def _memory(value: Tensor) -> Tensor:
    """Return the memory of a tensor, of whatever strides, so that it is copied in one piece."""
    strides = zip(value.shape, value.stride(), strict=True)
    return value.as_strided((1 + sum((size - 1) * stride for size, stride in strides),), (1,))


def _wait(copied: torch.cuda.Event | None, device: torch.device) -> None:
    if copied is not None:
        torch.cuda.current_stream(device).wait_event(copied)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams that copy to the host and to a device."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
