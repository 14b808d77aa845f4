"""Record sketches of all values of a step, to compare them with those of another execution."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from trainload.autograd_trace.graphs import Role
from trainload.capture.operators import is_view
from trainload.core.atomic import create_file
from trainload.core.canonical_json import parse_json
from trainload.core.errors import StorageError, first_line
from trainload.launching.debugging.activation_sums import sites_of
from trainload.launching.debugging.node_origins import backward_begins, line_of, module_of
from trainload.launching.debugging.precise_graphs import Precise
from trainload.launching.debugging.value_sketch import WIDTH, sketch_of
from trainload.launching.node.built_graphs import Built, BuiltGraph, Call
from trainload.launching.verification.rounding import Rounding
from trainload.sharding.plans.parameters_within import parameters_within
from trainload.sharding.plans.plan import Plan

_FORMAT = "trainload-values-1"


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """Origin of a recorded value.

    Attributes:
        call: number of the call of a graph within the step, from 0.
        node: name of the node that computed it, unique in the call.
        operator: the operator; "" for the gradient of a parameter.
        module: path of the user's module.
        line: line of the user's code.
        part: "forward" or "backward".
        sites: what it is in the user's terms, which does not depend on torch's version or on the
            device: "result of layers.3", "gradient of layers.3.weight"; outer modules first; () for
            other values.
        dtype: its dtype, without "torch.".
    """

    call: int
    node: str
    operator: str
    module: str
    line: str
    part: str
    sites: tuple[str, ...]
    dtype: str


@dataclass(slots=True)
class RecordedValues:
    """Values of a step, in the order in which they were computed.

    Attributes:
        origins: origin of each value.
        norms: L2 norm of each value.
        sketches: sketch of each value (`sketch_of`).
        where: description of the machine.
    """

    origins: list[ValueOrigin] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    sketches: list[Tensor] = field(default_factory=list)
    where: str = ""

    def add(self, origin: ValueOrigin, value: Tensor) -> None:
        """Add a real value."""
        self.origins.append(origin)
        self.norms.append(float(value.detach().double().norm()))
        self.sketches.append(sketch_of(value))

    def save(self, path: Path) -> None:
        """Write the record to a new file.

        Raises:
            StorageError: the file exists, or cannot be written.
        """
        tensors = {
            "norms": torch.tensor(self.norms, dtype=torch.float64),
            "sketches": torch.stack(self.sketches),
        }
        origins = json.dumps([asdict(each) for each in self.origins])
        metadata = {"format": _FORMAT, "where": self.where, "origins": origins}
        try:
            # a file with the same bytes would count as the new one
            is_new = not path.exists() and create_file(path, save(tensors, metadata))
        except OSError as error:
            raise StorageError(
                f"the values cannot be recorded: {error.strerror}", where=str(path)
            ) from error
        if not is_new:
            raise StorageError("the file exists already", where=str(path))

    @classmethod
    def load(cls, path: Path) -> RecordedValues:
        """Read a record that `save` wrote.

        Raises:
            StorageError: there is no such file, or it is none.
        """
        try:
            with safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
                norms, sketches = file.get_tensor("norms"), file.get_tensor("sketches")
            if metadata["format"] != _FORMAT:
                raise ValueError(f"format {metadata['format']}")
            origins = [
                ValueOrigin(**{**each, "sites": tuple(each["sites"])})
                for each in parse_json(metadata["origins"])
            ]
            if sketches.shape != (len(norms), WIDTH) or len(origins) != len(norms):
                raise ValueError("its parts differ in length")
            return cls(origins, norms.tolist(), list(sketches.double()), metadata["where"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"the recorded values cannot be read: {first_line(error)}",
                where=str(path),
                expected="a file of `trainload debug --record`",
                hint="Record them again.",
            ) from error


class _Recording(Interpreter):
    """Part of an interpreter that records the values of a graph."""

    record: RecordedValues
    called: _Called

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            self.called.add_gradients(self.record, value)
        elif (origin := self.called.origins.get(n)) is not None and _is_real(value):
            self.record.add(origin, value)
        return value


class _Plain(_Recording, Interpreter):
    pass


class _InFloat64(_Recording, Precise):
    pass


class _Rounded(_Recording, Rounding):
    pass


class _Called:
    """A call of a graph whose values are recorded."""

    def __init__(self, graph: BuiltGraph, plan: Plan, number: int) -> None:
        module: Any = graph.call
        assert isinstance(module, GraphModule), "the build is interpreted"
        self._graph, self._plan, self._number = graph, plan, number
        nodes = list(module.graph.nodes)
        backward = backward_begins(module, graph.inputs)
        sites = sites_of(nodes[:backward])
        self.origins: Mapping[Node, ValueOrigin] = {
            node: ValueOrigin(
                number,
                node.name,
                str(node.target),
                module_of(node),
                line_of(node),
                "forward" if position < backward else "backward",
                tuple(
                    f"result of {path}"
                    for path in sorted(
                        (s.module for s in sites.get(node, ()) if not s.operator), key=len
                    )
                ),
                str(node.meta["val"].dtype).removeprefix("torch."),
            )
            for position, node in enumerate(nodes)
            if node.op == "call_function"
            and _is_real(node.meta.get("val"))
            and (node in sites or not is_view(node))
        }

    def add_gradients(self, record: RecordedValues, values: Sequence[Any]) -> None:
        """Add the gradients of the parameters."""
        buckets = {bucket.name: bucket for bucket in self._plan.buckets}
        for port, value in zip(self._graph.outputs, values, strict=True):
            if port.role is not Role.BUCKET_GRADIENT:
                continue
            for name, low, high in parameters_within(self._plan, 0, buckets[port.name], len(value)):
                site, module = f"gradient of {name}", name.rpartition(".")[0]
                dtype = str(value.dtype).removeprefix("torch.")
                origin = ValueOrigin(self._number, site, "", module, "", "backward", (site,), dtype)
                record.add(origin, value[low:high])


class Way(Enum):
    """Arithmetic of an execution of a step."""

    OWN = "in the graph's own dtypes"
    FLOAT64 = "in float64"
    ROUNDED = "with an error of one unit in the last place of every result"


class Recorder:
    """Recorder of the values of a step's calls, in one process.

    Args:
        plan: plan of the process.
        way: how the values are computed.
        seed: seed of rounding errors.

    Attributes:
        record: the values.
    """

    def __init__(self, plan: Plan, way: Way, seed: int = 0) -> None:
        self._plan, self._way, self._seed = plan, way, seed
        self._calls = 0
        self.record = RecordedValues()

    def recording(self, built: Built) -> Built:
        """Return an interpreted build, whose graphs know their source lines, with recorded
        calls.
        """

        def call_of(graph: BuiltGraph) -> Call:
            return graph.call if not graph.outputs else partial(self._call, graph)

        return built.replaced(call_of)

    def _call(self, graph: BuiltGraph, *arguments: Tensor) -> Sequence[Tensor]:
        module: Any = graph.call
        interpreter: _Recording
        match self._way:
            case Way.OWN:
                interpreter = _Plain(module)
            case Way.FLOAT64:
                interpreter = _InFloat64(module)
            case Way.ROUNDED:
                interpreter = _Rounded(module, self._seed)
        interpreter.record = self.record
        interpreter.called = _Called(graph, self._plan, self._calls)
        self._calls += 1
        with torch.no_grad():
            results: Sequence[Tensor] = interpreter.run(*arguments)
        return results


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
