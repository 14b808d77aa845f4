"""Statistics of a step by module: activations, gradients, and updates over parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from trainload.autograd_trace.graphs import TANGENT
from trainload.capture.operators import is_overload
from trainload.launching.debugging.node_origins import line_of, module_of
from trainload.packaging.format.source_map import modules_of
from trainload.sharding.plans.parameters_within import parameters_within
from trainload.sharding.plans.plan import Plan

aten = torch.ops.aten
_ZEROS = frozenset({aten.relu, aten.threshold, aten.hardtanh, aten.leaky_relu})
"""Activation functions whose result may be zero everywhere."""
_SATURATED: Mapping[Any, float] = {aten.sigmoid: 0.0, aten.tanh: -1.0}
"""Activation functions with a result between this number and 1."""
_NEAR = 0.01
"""Distance from an end of its range at which a value is saturated, relative to the range."""
_MANY = 0.9
"""Fraction of dead units, or of saturated values, from which a note says so."""
_LARGE_UPDATE = 0.1
"""Norm of a matrix's update over its own norm from which a note says so."""


@dataclass(frozen=True, slots=True)
class ActivationStatistics:
    """The result of a module, or of an activation function in it, over the batches of a step.

    Attributes:
        module: path of the user's module; "" for the model itself and the loss.
        operator: the activation function; "" for the result of the module.
        line: line of the user's code.
        rms: root mean square.
        greatest: greatest magnitude.
        zeros: fraction of values that are zero.
        dead: fraction of the units, the elements of the last dim, that are zero in every row and
            position.
        saturated: fraction of values within 1 % of an end of the function's range; None if it has
            no such range.
    """

    module: str
    operator: str
    line: str
    rms: float
    greatest: float
    zeros: float
    dead: float
    saturated: float | None

    @property
    def note(self) -> str:
        """A remark on values that train badly; "" for none."""
        if self.operator and self.dead >= _MANY:
            return f"{100 * self.dead:.0f} % of its units are dead"
        if self.saturated is not None and self.saturated >= _MANY:
            return f"{100 * self.saturated:.0f} % saturated"
        return ""


@dataclass(frozen=True, slots=True)
class ParameterStatistics:
    """A parameter before a step, and what the step did to it.

    Attributes:
        parameter: name of the parameter.
        norm: its L2 norm before the step.
        gradient: norm of its gradient, before clipping; None if it is unknown: it is not finite, or
            the job has several graphs.
        update: norm of the change that the step made.
        is_matrix: True if it has two dims or more.
    """

    parameter: str
    norm: float
    gradient: float | None
    update: float
    is_matrix: bool

    @property
    def ratio(self) -> float | None:
        """Norm of the update over that of the parameter; None if that is 0."""
        return self.update / self.norm if self.norm else None

    @property
    def note(self) -> str:
        """A remark on an update that is too large; "" for none."""
        if not self.is_matrix or self.ratio is None or self.ratio < _LARGE_UPDATE:
            return ""
        return f"the update is {100 * self.ratio:.0f} % of the parameter"


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a step.

    Attributes:
        activations: by module, in the order in which they are computed.
        parameters: in the order of the package.
    """

    activations: tuple[ActivationStatistics, ...]
    parameters: tuple[ParameterStatistics, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "activations": [{**asdict(each), "note": each.note} for each in self.activations],
            "parameters": [
                {**asdict(each), "ratio": each.ratio, "note": each.note} for each in self.parameters
            ],
        }


class _Key(NamedTuple):
    """A module's result (`operator` is ""), or the n-th call of an activation function in it."""

    module: str
    operator: str = ""
    number: int = 0


@dataclass(slots=True)
class _Sums:
    line: str
    count: int = 0
    squares: float = 0.0
    greatest: float = 0.0
    zeros: int = 0
    saturated: int | None = None
    alive: Tensor | None = None


@dataclass(slots=True)
class StatisticsCollector:
    """Collector of the statistics of one step, whose graphs are interpreted.

    Args:
        plan: plan of one process.
    """

    plan: Plan
    _sums: dict[_Key, _Sums] = field(default_factory=dict)
    _gradients: dict[str, Tensor] = field(default_factory=dict)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _graphs: dict[Graph, Mapping[Node, Sequence[_Key]]] = field(default_factory=dict)

    def begin(self, params: Mapping[str, Tensor]) -> None:
        """Store the parameters before the step: bucket -> flat tensor."""
        self._before = {name: value.clone() for name, value in params.items()}

    def see(self, node: Node, value: Any) -> None:
        """Take a node's value, if it is the result of a module or of an activation function."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return
        if node.graph not in self._graphs:
            self._graphs[node.graph] = _observed(node.graph)
        for key in self._graphs[node.graph].get(node, ()):
            self._add(key, node, value)

    def see_gradient(self, bucket: str, value: Tensor) -> None:
        """Take the gradient of a bucket. The last one, of the last microbatch, is the step's."""
        self._gradients[bucket] = value

    def _add(self, key: _Key, node: Node, value: Tensor) -> None:
        sums = self._sums.setdefault(key, _Sums(line_of(node)))
        value = value.detach().float()
        sums.count += value.numel()
        sums.squares += value.square().sum(dtype=torch.float64).item()
        sums.greatest = max(sums.greatest, value.abs().max().item())
        sums.zeros += int((value == 0).sum())
        units = value.reshape(-1, value.shape[-1]) if value.ndim else value.reshape(1, 1)
        alive = (units != 0).any(0)
        is_same = sums.alive is not None and sums.alive.shape == alive.shape
        sums.alive = alive | sums.alive if is_same and sums.alive is not None else alive
        packet = _function_of(node)
        if key.operator and packet in _SATURATED:
            low = _SATURATED[packet]
            near = _NEAR * (1 - low)
            saturated = int(((value <= low + near) | (value >= 1 - near)).sum())
            sums.saturated = (sums.saturated or 0) + saturated

    def statistics(self, params: Mapping[str, Tensor], gradient_norm: float | None) -> Statistics:
        """Return the statistics.

        Args:
            params: the parameters after the step.
            gradient_norm: norm of the whole gradient, before clipping; None if it is unknown.
        """
        return Statistics(
            tuple(_activation(key, sums) for key, sums in self._sums.items()),
            tuple(self._parameters(params, gradient_norm)),
        )

    def _parameters(
        self, params: Mapping[str, Tensor], gradient_norm: float | None
    ) -> Iterator[ParameterStatistics]:
        # buckets have sums over the rows, which the update divides
        summed = math.sqrt(sum(_norm(value) ** 2 for value in self._gradients.values()))
        scale = gradient_norm / summed if gradient_norm is not None and summed else None
        for bucket in self.plan.buckets:
            before, gradient = self._before[bucket.name], self._gradients.get(bucket.name)
            change = params[bucket.name] - before
            shapes = {slot.parameter: slot.shape for slot in bucket.slots}
            for name, low, high in parameters_within(self.plan, 0, bucket, len(before)):
                is_known = gradient is not None and scale is not None
                yield ParameterStatistics(
                    name,
                    _norm(before[low:high]),
                    _norm(gradient[low:high]) * scale if is_known else None,  # type: ignore[index,operator]  # it is known
                    _norm(change[low:high]),
                    len(shapes[name]) > 1,
                )


def _activation(key: _Key, sums: _Sums) -> ActivationStatistics:
    alive = 1.0 if sums.alive is None else sums.alive.float().mean().item()
    return ActivationStatistics(
        key.module,
        key.operator,
        sums.line,
        math.sqrt(sums.squares / sums.count),
        sums.greatest,
        sums.zeros / sums.count,
        1 - alive,
        None if sums.saturated is None else sums.saturated / sums.count,
    )


def _norm(value: Tensor) -> float:
    return float(value.double().norm())


def _function_of(node: Node) -> Any:
    """Return the activation function that a node calls; None if it calls none."""
    if node.op != "call_function" or not is_overload(node.target):
        return None
    packet = node.target.overloadpacket
    return packet if packet in _ZEROS or packet in _SATURATED else None


def _observed(graph: Graph) -> Mapping[Node, Sequence[_Key]]:
    """Return the nodes of a graph's forward that statistics are about, and what they are."""
    nodes = list(graph.nodes)
    end = next((at for at, node in enumerate(nodes) if node.name == TANGENT), len(nodes))
    last: dict[str, Node] = {}
    observed: dict[Node, list[_Key]] = {}
    counts: Counter[_Key] = Counter()
    for node in nodes[:end]:
        if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].is_floating_point():
            last |= dict.fromkeys(filter(None, modules_of(node)), node)
        if (packet := _function_of(node)) is not None:
            key = _Key(module_of(node), str(packet).removeprefix("aten."))
            observed.setdefault(node, []).append(key._replace(number=counts[key]))
            counts[key] += 1
    for path, node in last.items():
        observed.setdefault(node, []).insert(0, _Key(path))
    return observed
