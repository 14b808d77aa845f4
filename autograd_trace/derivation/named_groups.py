"""Process groups under the logical names that the collectives of graphs use.

Tested with torch 2.13.0. Private names used:
`torch._C._distributed_c10d._register_process_group` and its siblings,
`torch._C._distributed_c10d._create_work_from_future`, `ProcessGroupGloo._Options`,
`ProcessGroup._allgather_base`, `ProcessGroup._reduce_scatter_base`.
"""

from __future__ import annotations

import contextlib
import datetime
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
        return _done([])

    def broadcast(self, tensors: list[Tensor], *_: Any) -> Any:
        return _done(tensors)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        if options is None or options.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self.size())
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self.allreduce(tensors, options)

    def _allgather_base(self, output: Tensor, part: Tensor, *_: Any) -> Any:
        output.view(self.size(), -1).copy_(part.reshape(1, -1))
        return _done([output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], parts: list[Tensor], *_: Any
    ) -> Any:
        for output, part in zip(outputs, parts, strict=True):
            self._allgather_base(output, part)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        output.copy_(whole.reshape(self.size(), *output.shape)[self.rank()])
        return self.allreduce([output], options)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], wholes: list[Tensor], options: Any = None
    ) -> Any:
        for output, whole in zip(outputs, wholes, strict=True):
            self._reduce_scatter_base(output, whole, options)
        return _done(outputs)


def _done(result: list[Tensor]) -> Any:
    """Return the work of a collective that has ended."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _C10D._create_work_from_future(future)


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
