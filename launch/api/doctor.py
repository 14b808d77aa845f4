"""Check this machine, or the nodes of a Ray cluster, for what runs need.

report = trainload.doctor("10.0.0.1:6379", store="s3://bucket/runs")
for node in report.nodes:
    for check in node.checks:
        print(node.node, check.name, check.status, check.found)
"""

from __future__ import annotations

from trainload.launching.doctor.check_results import DoctorReport
from trainload.launching.doctor.machine_checks import examine_machine


def doctor(address: str | None = None, *, store: str | None = None) -> DoctorReport:
    """Check this machine, or each node of a cluster and the links between them.

    Nothing is changed, except that small files are written and removed again: in the node's cache,
    among the temporary files, and below probes/ of the storage. A cluster's links are measured,
    which takes bandwidth from its runs for a moment.

    Args:
        address: HOST:PORT of a Ray cluster, or "auto"; None for this machine alone.
        store: path or URL of a storage that the machines must reach.

    Returns:
        The results. Failed checks raise nothing.

    Raises:
        ClusterError: the cluster is not reachable, or rejects this process's token.

    Example:
        report = trainload.doctor()
        for node in report.nodes:
            for check in node.checks:
                if check.status != "ok":
                    print(node.node, check.name, check.status, check.found, check.hint)
    """
    if address is None:
        return DoctorReport((examine_machine(store),))
    # Ray is an extra, which is not needed for this machine alone
    from trainload.launching.cluster.connection import connected

    with connected(address, with_ranks=False):
        from trainload.launching.doctor.cluster_checks import examine_cluster

        return examine_cluster(store)
