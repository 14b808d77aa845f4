"""One captured graph as a module with the inputs and outputs of a step, stateless random numbers
and an objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from trainload.autograd_trace.derivation.interpret import GraphInterpreter
from trainload.autograd_trace.graphs import Port, Role
from trainload.autograd_trace.randomness.draws import is_random
from trainload.autograd_trace.randomness.random_key import RandomKey
from trainload.capture.operators import calls_in, is_higher_order, is_overload, nodes_in
from trainload.capture.program import GraphCapture, OutputRole, Program

_HOP: Any = torch.ops.higher_order
_DRAWING = (Port(Role.SEED, "seed"), Port(Role.STEP, "step"), Port(Role.ROW, "row"))
_TRAINING = (*_DRAWING, Port(Role.SCALE, "scale"))
_ROLE_OF_OUTPUT = {
    OutputRole.LOSS: Role.LOSS,
    OutputRole.WEIGHT: Role.WEIGHT,
    OutputRole.METRIC: Role.METRIC,
    OutputRole.PREDICTION: Role.PREDICTION,
    OutputRole.OUTPUT: Role.PREDICTION,
}


class StepModule(nn.Module):
    """One captured graph as a function of (batch..., seed, step, row, scale) over its parameters
    and buffers.

    Only a training graph accepts `scale`; an evaluation graph accepts seed, step and row only if it
    draws random numbers. `scale` (0-dim float32) multiplies the gradient; see `StepGraph`. The
    result is one flat tuple: the captured outputs, detached (with a weight added if the job has
    none), and, for a training graph, the objective.

    Args:
        capture: the graph.
        state: a tensor for every parameter that is not an alias, every buffer and every constant of
            the graph.
        trainable: names of the parameters that get a gradient.
        aliases: alias -> owner.
        device: where it runs.
    """

    def __init__(
        self,
        capture: GraphCapture,
        state: Mapping[str, Tensor],
        trainable: set[str],
        aliases: Mapping[str, str],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._capture = capture
        self._target = device
        self._names: dict[str, str] = {}
        self._slots: list[tuple[str, Any]] = []
        self.training_graph = capture.training
        self._scalars = _TRAINING if self.training_graph else _DRAWING if draws(capture) else ()
        for spec in capture.exported.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                self._slots.append(("input", None))
                continue
            assert spec.target is not None
            name = aliases.get(spec.target, spec.target)
            role = {
                InputKind.PARAMETER: "p",
                InputKind.BUFFER: "b",
                InputKind.CONSTANT_TENSOR: "c",
            }[spec.kind]
            attribute = next(
                (a for a, n in self._names.items() if n == name and a[0] == role), None
            )
            if attribute is None:
                attribute = f"{role}{len(self._names)}"
                self._names[attribute] = name
                tensor = state[f"{capture.name}/{name}"] if role == "c" else state[name]
                if role == "p":
                    self.register_parameter(
                        attribute, nn.Parameter(tensor, requires_grad=name in trainable)
                    )
                else:
                    self.register_buffer(attribute, tensor)
            self._slots.append(("attribute", attribute))

    def port_of(self, attribute: str) -> Port:
        """Return the port that an attribute of this module stands for."""
        role = {"p": Role.PARAMETER, "b": Role.BUFFER, "c": Role.CONSTANT}[attribute[0]]
        name = self._names[attribute]
        return Port(role, f"{self._capture.name}/{name}" if role is Role.CONSTANT else name)

    def input_ports(self) -> tuple[Port, ...]:
        batch = tuple(Port(Role.BATCH, i.name) for i in self._capture.inputs)
        return batch + self._scalars

    def output_ports(self) -> tuple[Port, ...]:
        return output_ports(self._capture)

    def loss_dtype(self) -> torch.dtype:
        """Return the dtype of the loss, and so of the objective; float32 for a graph without a
        loss.
        """
        output = next(
            node for node in reversed(self._capture.exported.graph.nodes) if node.op == "output"
        )
        values = zip(self._capture.outputs, output.args[0], strict=True)
        return next(
            (value.meta["val"].dtype for spec, value in values if spec.role is OutputRole.LOSS),
            torch.float32,
        )

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their owners' names."""
        return {self._names[a]: p for a, p in self.named_parameters()}

    def buffers_by_name(self) -> dict[str, Tensor]:
        """Return the buffers by name."""
        return {self._names[a]: b for a, b in self.named_buffers() if a[0] == "b"}

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        count = len(self._capture.inputs)
        batch, scalars = flat[:count], flat[count:]
        rows = batch[0].shape[0] if batch and batch[0].ndim else 1
        symbol = batch_symbol(self._capture)
        key = RandomKey.of(scalars[0], scalars[1], scalars[2], rows) if scalars else None
        if key is not None and isinstance(symbol, int):
            key = key.of_call()
        interpreter = GraphInterpreter(
            self._capture.exported.graph_module, key, self._target, symbol
        )
        entries = iter(batch)
        values = interpreter.run(
            *(getattr(self, a) if kind == "attribute" else next(entries) for kind, a in self._slots)
        )
        roles = [o.role for o in self._capture.outputs]
        if OutputRole.LOSS not in roles:
            return tuple(v.detach() for v in values)
        outputs = list(values)
        if OutputRole.WEIGHT in roles:
            weight = outputs[roles.index(OutputRole.WEIGHT)].detach().to(torch.float32)
            outputs[roles.index(OutputRole.WEIGHT)] = weight
        else:
            weight = torch.full((), 1.0, dtype=torch.float32, device=self._target) * rows
            outputs.append(weight)
        loss = outputs[roles.index(OutputRole.LOSS)]
        detached = tuple(v.detach() for v in outputs)
        if not self.training_graph:
            return detached
        return (*detached, loss * (weight * scalars[-1]).to(loss.dtype))


def output_ports(capture: GraphCapture) -> tuple[Port, ...]:
    """Return the ports of a step's outputs, in the order of the captured outputs. A weight is added
    if the job has none.
    """
    ports = [Port(_ROLE_OF_OUTPUT[o.role], o.name) for o in capture.outputs]
    if any(p.role is Role.LOSS for p in ports) and not any(p.role is Role.WEIGHT for p in ports):
        ports.append(Port(Role.WEIGHT, "weight"))
    return tuple(ports)


def draws(capture: GraphCapture) -> bool:
    """Return True if a captured graph draws random numbers."""
    return any(is_random(node) for node in nodes_in(capture.exported.graph_module))


def batch_symbol(capture: GraphCapture) -> int | torch.SymInt:
    """Return the number of rows of a captured graph's batch, as its placeholders spell it."""
    for node, spec in zip(
        placeholders(capture), capture.exported.graph_signature.input_specs, strict=True
    ):
        if (
            spec.kind is InputKind.USER_INPUT
            and isinstance(node.meta.get("val"), Tensor)
            and node.meta["val"].ndim
        ):
            size: int | torch.SymInt = node.meta["val"].shape[0]
            return size
    return 0


def placeholders(capture: GraphCapture) -> list[Node]:
    """Return a captured graph's placeholders, including its state."""
    return [n for n in capture.exported.graph.nodes if n.op == "placeholder"]


def trainable_parameters(program: Program, capture: GraphCapture) -> set[str]:
    """Return the names of the parameters that own storage, are trained, and get a gradient from
    this graph.
    """
    names = {p.name for p in program.parameters if p.trainable and p.alias_of is None}
    return names if capture.reached is None else names & set(capture.reached)


def is_functional(module: GraphModule) -> bool:
    """Return True if a captured graph writes to nothing, and its only higher-order operators are
    those for autocast and grad mode.
    """
    return all(
        node.target in (_HOP.wrap_with_set_grad_enabled, _HOP.wrap_with_autocast)
        or (
            not node.target._schema.is_mutable
            if is_overload(node.target)
            else not is_higher_order(node.target)
        )
        for node in calls_in(module)
    )


def is_plain(capture: GraphCapture) -> bool:
    """Return True if a graph without gradients certainly has a step graph: it writes nothing, draws
    nothing and has no branches.
    """
    return (
        not capture.training and is_functional(capture.exported.graph_module) and not draws(capture)
    )
