"""An actor of one node that measures the node's clock and its links to other nodes."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from trainload.core.errors import first_line
from trainload.launching.doctor.check_results import NodeReport
from trainload.launching.doctor.machine_checks import examine_machine

BYTES = 32 * 2**20
"""Size of the tensor that is sent and reduced."""
_CONNECT_SECONDS = 5.0
_ROUNDS = 3


class NodeProbe:
    """Checks and measurements of one node, in a process of it.

    Args:
        address: the node's address in the cluster.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._listeners = ExitStack()

    def examine(self, store: str | None, has_peers: bool) -> NodeReport:
        """Run the checks of this machine (`examine_machine`)."""
        return examine_machine(store, self._address, has_peers=has_peers)

    def now(self) -> float:
        """Return this machine's time, in seconds since 1970."""
        return time.time()

    def listen(self) -> int:
        """Listen on a free port of the node's address. Returns the port.

        The system completes connections, so nothing has to accept them.
        """
        listener = self._listeners.enter_context(socket.socket(_family(self._address)))
        listener.bind((self._address, 0))
        listener.listen(socket.SOMAXCONN)
        port: int = listener.getsockname()[1]
        return port

    def unreachable(self, peers: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Connect to ports of other nodes.

        Args:
            peers: name -> address and port.

        Returns:
            Name -> error, of those to which there is no connection.
        """
        errors = {}
        for name, place in peers.items():
            try:
                socket.create_connection(place, _CONNECT_SECONDS).close()
            except OSError as error:
                errors[name] = f"{place[0]}:{place[1]}: {first_line(error)}"
        return errors

    def free_url(self) -> str:
        """Return a URL for the rendezvous of process groups: this node's address, a free port."""
        with socket.socket(_family(self._address)) as one:
            one.bind((self._address, 0))
            port = one.getsockname()[1]
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"tcp://{host}:{port}"

    def measure(
        self, backend: str, url: str, rank: int, world: int, rounds: Sequence[Mapping[int, int]]
    ) -> dict[str, Any]:
        """Join a process group, reduce a tensor over all ranks, and send one to another rank.

        All ranks must call it.

        Args:
            backend: "gloo" or "nccl".
            url: URL of the rendezvous.
            rank: this rank.
            world: number of ranks.
            rounds: the sending ranks of each round, with their receivers.

        Returns:
            "all_reduce": seconds; "sent": receiver -> seconds until it has confirmed the tensor.
        """
        import torch
        import torch.distributed as dist

        from trainload.launching.node.process_groups import leave_groups

        device = torch.device("cuda" if backend == "nccl" else "cpu")
        seconds = timedelta(seconds=60)
        dist.init_process_group(
            backend, init_method=url, rank=rank, world_size=world, timeout=seconds
        )
        try:
            tensor = torch.ones(BYTES // 4, device=device)
            confirmation = torch.zeros(1, device=device)

            def reduce() -> None:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
                float(tensor[0])  # waits for a GPU

            reduce()
            took = [_timed(reduce) for _ in range(_ROUNDS)]
            sent = {}
            for pairs in rounds:
                for _ in range(2):  # the first one connects
                    if rank in pairs:
                        receiver = pairs[rank]

                        def send(receiver: int = receiver) -> None:
                            dist.send(tensor, receiver)
                            dist.recv(confirmation, receiver)
                            float(confirmation[0])

                        sent[receiver] = _timed(send)
                    elif rank in pairs.values():
                        sender = next(one for one, other in pairs.items() if other == rank)
                        dist.recv(tensor, sender)
                        dist.send(confirmation, sender)
                dist.barrier()
            return {"all_reduce": min(took), "sent": sent}
        finally:
            leave_groups()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
