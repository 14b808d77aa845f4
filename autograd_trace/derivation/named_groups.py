"""Process groups under the logical names that the collectives of graphs use.

Tested with torch 2.13.0. Private names used:
`torch._C._distributed_c10d._register_process_group` and its siblings,
`torch._C._distributed_c10d.Work`, `ProcessGroupGloo._Options`, `ProcessGroup._allgather_base`,
`ProcessGroup._reduce_scatter_base`.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# its stubs type names as a NewType that not every supported torch has
_C10D: Any = torch._C._distributed_c10d


def bind_groups(groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Make process groups under the logical names that rewritten graphs use.

    With gloo all of them carry out one collective after another: on gloo's usual two threads
    functional all-gathers beside other collectives in flight corrupt the heap.

    Args:
        groups: name -> the ranks of its groups. A rank is in at most one group of each name.
    """
    # gloo corrupts the heap if functional all-gathers are in flight beside other collectives on its
    # usual two threads: a ZeRO-3 rank died within a thousand steps, and so did forty lines of plain
    # torch. With one thread it does not. Nor does `all_gather_into_tensor_out` crash, but Inductor
    # then moves a step's gathers to its beginning, and ZeRO-3 no longer saves memory.
    serial = dist.get_backend() == dist.Backend.GLOO
    if serial and not hasattr(dist.Backend, _SERIAL_GLOO.upper()):
        dist.Backend.register_backend(_SERIAL_GLOO, _serial_gloo, devices=["cpu"])
    backend = _SERIAL_GLOO if serial else dist.get_backend()
    for name, parts in groups.items():
        if len(parts) == 1 and len(parts[0]) == dist.get_world_size() and not serial:
            _C10D._register_process_group(name, dist.group.WORLD)
            continue
        for ranks in parts:
            group = dist.new_group(list(ranks), backend=backend)
            if dist.get_rank() in ranks:
                _C10D._register_process_group(name, group)


def unbind_groups(names: Iterable[str]) -> None:
    """Remove the bindings of names that `bind_groups` has bound, before the groups are destroyed.

    Names without a group of this rank are left out.
    """
    for name in names:
        with contextlib.suppress(RuntimeError):  # as in `bound_groups`
            group_named(name)
            _C10D._unregister_process_group(name)


@contextlib.contextmanager
def alone_of(rank: int, world: int) -> Iterator[None]:
    """Make this process a rank of a default process group whose other ranks do not exist.

    Collectives then return what they would if all ranks had this rank's data. Use it to try out a
    rank's calls.
    """
    if not hasattr(dist.Backend, _MIRRORED.upper()):
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(_MIRRORED, _MirroredGroup, devices=devices)
    dist.init_process_group(_MIRRORED, rank=rank, world_size=world, store=_C10D.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


_MIRRORED = "trainload_mirrored"


_AnyGroup: Any = dist.ProcessGroup
"""torch's stubs declare overloads that a subclass in Python need not have."""


class _MirroredGroup(_AnyGroup):  # type: ignore[misc]  # its class is Any
    """A process group whose other ranks have the same data as this one.

    A collective reads its operands and writes its results when it is waited for, and leaves the
    results undefined until then, as a backend may that works in the background.

    Args:
        store, timeout: unused; torch passes them.
        rank: rank of this process.
        size: number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return _MIRRORED

    def barrier(self, *_: Any) -> Any:
        return _MirroredWork(lambda: None)

    def broadcast(self, tensors: list[Tensor], *_: Any) -> Any:
        return self._begin(tensors, tensors, lambda value: value)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._begin(tensors, tensors, lambda value: value * self._factor(options))

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self.allreduce(tensors, options)

    def _allgather_base(self, output: Tensor, part: Tensor, options: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [part], options)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], parts: list[Tensor], *_: Any
    ) -> Any:
        return self._begin(outputs, parts, lambda part: torch.cat([part.flatten()] * self.size()))

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [whole], options)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], wholes: list[Tensor], options: Any = None
    ) -> Any:
        def own_part(whole: Tensor) -> Tensor:
            return whole.reshape(self.size(), -1)[self.rank()] * self._factor(options)

        return self._begin(outputs, wholes, own_part)

    def _factor(self, options: Any) -> int:
        """Return what the reduction of equal values is, divided by one of them."""
        return self.size() if options is None or options.reduceOp == dist.ReduceOp.SUM else 1

    def _begin(
        self, outputs: list[Tensor], operands: list[Tensor], result: Callable[[Tensor], Tensor]
    ) -> Any:
        """Begin a collective: `result` computes each output from its operand."""
        kept = [
            operand.clone() if output is operand else operand
            for output, operand in zip(outputs, operands, strict=True)
        ]
        for output in outputs:
            output.fill_(math.nan if output.is_floating_point() else 0)

        def end() -> None:
            for output, operand in zip(outputs, kept, strict=True):
                output.copy_(result(operand).view_as(output))

        return _MirroredWork(end)


_AnyWork: Any = _C10D.Work


class _MirroredWork(_AnyWork):  # type: ignore[misc]  # its class is Any
    """A collective that ends when it is waited for."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def wait(self, *_: Any) -> bool:
        self._end()
        self._end = lambda: None
        return True


def begun_collectives(names: Iterable[str]) -> Callable[[], dict[str, int]]:
    """Return a function that counts the collectives that this rank has begun, by group name.

    Names of groups without this rank are left out. Any thread may call it at any time.
    """
    backends: dict[str, Any] = {}
    for name in names:
        with contextlib.suppress(RuntimeError):  # this rank is in no group of that name
            group: Any = _C10D._resolve_process_group(name)
            # a group with our own gloo does not count, its backend does
            backends[name] = group._get_backend(group._device_types[0])
    return lambda: {
        name: int(backend._get_sequence_number_for_group()) for name, backend in backends.items()
    }


def bound_groups(names: Iterable[str]) -> list[ProcessGroup]:
    """Return this rank's process groups that are bound to logical names."""
    groups = []
    for name in names:
        with contextlib.suppress(RuntimeError):  # this rank is in no group of that name
            groups.append(group_named(name))
    return groups


def group_named(name: str) -> ProcessGroup:
    """Return this rank's process group that is bound to a logical name."""
    group: ProcessGroup = _C10D._resolve_process_group(name)
    return group


@contextlib.contextmanager
def stand_ins(groups: Mapping[str, int]) -> Iterator[None]:
    """Register process groups without members under names that have none yet.

    Inductor asks for a group's size while it compiles, before groups exist, and calls nothing else.
    """
    stand_in_groups: dict[str, ProcessGroup] = {}  # the registry itself holds weak references
    for name, size in groups.items():
        try:
            torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # a NewType of str
        except RuntimeError:
            stand_in_groups[name] = _C10D.ProcessGroup(0, size)
            torch._C._distributed_c10d._register_process_group(name, stand_in_groups[name])  # type: ignore[arg-type]  # as above
    try:
        yield
    finally:
        for name in stand_in_groups:
            torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]  # as above


_SERIAL_GLOO = "trainload_gloo"


def _serial_gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> dist.Backend:
    """Return a gloo backend with one thread, on the network interfaces that torch would choose."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name) for name in names] or [
        gloo.create_default_device()
    ]
    options._threads = 1
    options._timeout = timeout
    backend: dist.Backend = gloo(store, rank, size, options)
    return backend
