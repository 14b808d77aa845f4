"""Results of the checks of `trainload doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "fails", "not applicable"]
STATUSES: tuple[Status, ...] = ("fails", "warning", "ok", "not applicable")
"""All statuses, the most severe first."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: name of the check, such as "compiler".
        status: "ok"; "warning": a run works, but slower or not under all conditions; "fails": a run
            fails, or will under load; "not applicable": there is nothing to check.
        found: the state that was found.
        expected: the state that is needed; "" if `found` says enough.
        hint: a way to fix it; "" if the check is ok.
    """

    name: str
    status: Status
    found: str
    expected: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The checks of one machine.

    Attributes:
        node: host name of the machine.
        address: address at which the other nodes reach it; "" outside of a cluster.
        versions: name -> version of what must be the same on all nodes.
        checks: results, in a fixed order.
    """

    node: str
    address: str
    versions: Mapping[str, str]
    checks: tuple[CheckResult, ...]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The result of `trainload.doctor`.

    Attributes:
        nodes: this machine, or each node of the cluster.
        between: checks of the nodes together: versions, clocks, ports, bandwidth.

    Example:
        report = trainload.doctor()
        problems = [check.name for check in report.results if check.status == "fails"]
    """

    nodes: tuple[NodeReport, ...]
    between: tuple[CheckResult, ...] = ()

    @property
    def results(self) -> tuple[CheckResult, ...]:
        """All results, of the nodes and between them."""
        return (*(check for node in self.nodes for check in node.checks), *self.between)

    @property
    def healthy(self) -> bool:
        """True if no check fails; there may be warnings."""
        return all(check.status != "fails" for check in self.results)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"healthy": self.healthy, **asdict(self)}
