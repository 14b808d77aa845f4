"""Operators that copy values from a device to the host's memory and back, while it computes.

    host = offload(value)                     # begins to copy
    ...
    copied = offloaded([host], [value])       # the device waits; `value` can be freed now
    ...
    again = reload(host, copied, device)      # begins to copy back
    ...
    again = wait_tensor(again)                # the device waits

On GPUs, copies run on two streams of their own, one for each direction, and use pinned memory. No
operator makes the host wait. On CPUs they are plain copies.

`wait_tensor` is the one of functional collectives, because compilers know that its operand must
not be reused before.

Tested with torch 2.13.0. Private names used: `torch._C._distributed_c10d._register_work`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch.distributed.distributed_c10d import Work


@torch.library.custom_op("trainload::offload", mutates_args=())
def offload(value: Tensor) -> Tensor:
    """Begin to copy a value to the host, where it has the same shape and strides.

    `value` must exist until `offloaded`.
    """
    host = _empty_like(value, torch.device("cpu"))
    if value.device.type == "cpu":
        return host.copy_(value)
    copied = _copied(host, value, _streams(value.device)[0])
    _to_host[host.data_ptr()] = copied
    return host


@torch.library.custom_op("trainload::offloaded", mutates_args=())
def offloaded(hosts: list[Tensor], values: list[Tensor]) -> Tensor:
    """Make the device wait until values have been copied to the host.

    Returns:
        An empty tensor, which `reload` reads so that it follows this operator.
    """
    for host, value in zip(hosts, values, strict=True):
        if value.device.type != "cpu":
            torch.cuda.current_stream(value.device).wait_event(_to_host.pop(host.data_ptr()))
    return torch.empty(0)


@torch.library.custom_op("trainload::reload", mutates_args=())
def reload(host: Tensor, copied: Tensor, device: torch.device) -> Tensor:
    """Begin to copy a value back to a device. `wait_tensor` must precede the result's use."""
    value = _empty_like(host, device)
    if device.type == "cpu":
        return value.copy_(host)
    _register_work(value, _Copy(_copied(value, host, _streams(device)[1])))
    return value


@offload.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


@offloaded.register_fake
def _(hosts: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.empty(0, device="cpu")


@reload.register_fake
def _(host: Tensor, copied: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


OFFLOAD: Callable[..., Any] = torch.ops.trainload.offload.default
OFFLOADED: Callable[..., Any] = torch.ops.trainload.offloaded.default
RELOAD: Callable[..., Any] = torch.ops.trainload.reload.default

_to_host: dict[int, torch.cuda.Event] = {}
"""Address of a value on the host -> event after its copy, until `offloaded`."""


class _Copy(Work):
    """A copy to a device, for which `wait_tensor` waits as it does for a collective."""

    def __init__(self, copied: torch.cuda.Event) -> None:
        super().__init__()
        self._copied = copied

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait."""
        torch.cuda.current_stream().wait_event(self._copied)
        return True


def _empty_like(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(
        value.shape,
        value.stride(),
        dtype=value.dtype,
        device=device,
        pin_memory=device.type == "cpu" and value.device.type != "cpu",
    )


def _copied(to: Tensor, value: Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Copy on a stream, after what the device has to do now. Return an event after the copy."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        to.copy_(value, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return event


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams that copy to the host and to a device."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
