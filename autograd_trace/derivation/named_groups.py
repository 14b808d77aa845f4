"""Process groups under the logical names that the collectives of graphs use.

Tested with torch 2.13.0. Private names used:
`torch._C._distributed_c10d._register_process_group` and its siblings, `ProcessGroupGloo._Options`,
`torch.testing._internal.distributed.fake_pg`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
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

    Collectives then return at once, with meaningless values. Use it to try out a rank's calls.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


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
