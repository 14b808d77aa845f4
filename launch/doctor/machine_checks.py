"""All checks of one machine, in the order in which they are shown. This module imports neither Ray
nor torch.
"""

from __future__ import annotations

import socket

from trainload.launching.doctor.accelerators import examine_gpus, examine_triton
from trainload.launching.doctor.check_results import NodeReport
from trainload.launching.doctor.installed_software import (
    examine_extras,
    examine_packages,
    examine_python,
    examine_ray,
    examine_torch,
    own_versions,
)
from trainload.launching.doctor.local_network import examine_host_name, examine_proxies
from trainload.launching.doctor.machine_limits import (
    examine_cache,
    examine_disk,
    examine_memory,
    examine_open_files,
    examine_processors,
    examine_shared_memory,
    examine_temporary_files,
)
from trainload.launching.doctor.storage_checks import examine_store
from trainload.launching.doctor.working_compiler import examine_compiler


def examine_machine(
    store: str | None = None, address: str = "", *, has_peers: bool = False
) -> NodeReport:
    """Run all checks of this machine.

    Args:
        store: path or URL of a storage that it must reach; None for none.
        address: its address in a cluster; "" outside of one.
        has_peers: True if other machines connect to it.
    """
    torch, facts = examine_torch()
    checks = [
        examine_python(),
        examine_packages(),
        torch,
        examine_ray(needed=bool(address)),
        examine_extras(),
        examine_compiler(),
        examine_gpus(facts),
        examine_triton(facts),
        examine_processors(),
        examine_memory(),
        examine_shared_memory(0 if facts is None else len(facts.gpus)),
        examine_open_files(),
        examine_disk(),
        examine_temporary_files(),
        examine_cache(),
        examine_proxies(),
        examine_host_name(has_peers=has_peers),
    ]
    if store is not None:
        checks += examine_store(store)
    return NodeReport(socket.gethostname(), address, own_versions(), tuple(checks))
