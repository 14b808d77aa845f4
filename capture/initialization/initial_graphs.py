"""A graph for the first value of each parameter and buffer, from the tape of their construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from trainload.capture.initialization.construction_draws import Draw, Unsupported, draw_of
from trainload.capture.initialization.construction_tape import (
    LARGEST_CONSTANT,
    Call,
    Tape,
    TensorRef,
)
from trainload.capture.initialization.fake_tensors import VALUES_NEEDED, fake_mode
from trainload.capture.job.tensor_classes import has_values
from trainload.core.errors import raised

_aten = torch.ops.aten

_REFUSALS = (
    RuntimeError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AssertionError,
    *VALUES_NEEDED,
)
"""Exceptions of torch's operators and tracer."""


@dataclass(frozen=True, slots=True)
class InitialGraph:
    """Computes first values: a function of draws and constants, without mutation.

    Attributes:
        module: flat graph. Its inputs are the draws, then the constants; it has one output, and
            every node has a `meta["val"]`.
        draws: the draws.
    """

    module: GraphModule
    draws: tuple[Draw, ...]

    @property
    def result(self) -> Tensor:
        """A fake tensor with the shape and dtype of the output."""
        value: Tensor = output_of(self.module).meta["val"]
        return value


@dataclass(frozen=True, slots=True)
class InitialValue:
    """The first value of one tensor.

    Attributes:
        graph: number of its graph.
        draws: number of each of the graph's draws among all draws of the job. Two tensors with the
            same draw, such as a copy and its original, have the same number.
        constants: number of each of the graph's constants.
    """

    graph: int
    draws: tuple[int, ...]
    constants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Initialization:
    """First values of a model's parameters and buffers.

    Attributes:
        graphs: distinct graphs.
        values: parameter or buffer -> its value. Aliases of tied parameters are left out.
        constants: the constants: (elements,) each.
        missing: parameter or buffer without a graph -> the reason, a clause.
    """

    graphs: tuple[InitialGraph, ...] = ()
    values: Mapping[str, InitialValue] = field(default_factory=dict)
    constants: tuple[Tensor, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def initial_graphs(
    tape: Tape, tensors: Mapping[str, TensorRef], values: Mapping[str, Tensor]
) -> Initialization:
    """Return the graphs of tensors.

    A small tensor that cannot be computed again, and does not depend on draws, is a constant.

    Args:
        tape: the calls that constructed them.
        tensors: parameter or buffer -> its place on the tape.
        values: parameter or buffer -> the tensor.
    """
    graphs: list[InitialGraph] = []
    found: dict[str, InitialValue] = {}
    missing: dict[str, str] = {}
    known: dict[Any, tuple[int, _Inputs] | str] = {}
    fixed: dict[str, Tensor] = {}
    constants: dict[int, int] = {}
    for name, ref in tensors.items():
        part = _Part(tape, ref)
        if isinstance(values[name], nn.Parameter) and ref.storage in part.constants:
            missing[name] = "it was constructed elsewhere, before or outside of the function"
            continue
        if tape.random_read is not None and (
            part.last >= tape.random_read[0] or not tape.read_draws.isdisjoint(part.draws)
        ):
            place = tape.random_read[1]
            missing[name] = f"the construction depends on a random value, which it reads at {place}"
            continue
        signature = part.signature()
        if signature not in known:
            try:
                graph, used = _trace(part)
            except Unsupported as reason:
                known[signature] = str(reason)
            except _REFUSALS as error:  # an operator may refuse anything
                known[signature] = f"its construction cannot be repeated: {raised(error)[:200]}"
            else:
                graphs.append(graph)
                known[signature] = len(graphs) - 1, used
        traced = known[signature]
        if isinstance(traced, str):
            if part.draws or not has_values(values[name]) or values[name].nbytes > LARGEST_CONSTANT:
                missing[name] = traced
            else:
                fixed[name] = values[name].detach().reshape(-1).clone()
            continue
        number, used = traced
        storages = [part.constants[local] for local in used.constants]
        draws = tuple(part.draws[local] for local in used.draws)
        found[name] = InitialValue(
            graph=number,
            draws=draws,
            constants=tuple(constants.setdefault(each, len(constants)) for each in storages),
        )
    all_constants = [tape.constants[storage] for storage in constants]
    for name, value in fixed.items():
        graphs.append(_constant_graph(value, tensors[name].shape))
        found[name] = InitialValue(len(graphs) - 1, (), (len(all_constants),))
        all_constants.append(value)
    return Initialization(tuple(graphs), found, tuple(all_constants), missing)


def _constant_graph(value: Tensor, shape: tuple[int, ...]) -> InitialGraph:
    """Return the graph of a constant: (elements,) -> shape."""
    module: GraphModule = make_fx(lambda flat: flat.view(shape), tracing_mode="fake")(value)
    _return_tuple(module)
    return InitialGraph(module, ())


def _return_tuple(module: GraphModule) -> None:
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.args = ((output.args[0],),)
    module.recompile()


def output_of(module: GraphModule) -> Node:
    """Return the node of a graph's only output."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    result: Node
    (result,) = output.args[0]
    return result


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs that a graph reads, as numbers among those of its part of the tape."""

    draws: tuple[int, ...]
    constants: tuple[int, ...]


class _Part:
    """The calls of a tape on which one tensor depends.

    Attributes:
        calls: the calls, in order.
        draws: numbers, among the tape's calls, of those that draw.
        constants: storages of the constants that they read.
        last: number of the last call; -1 if there is none.
    """

    def __init__(self, tape: Tape, target: TensorRef) -> None:
        numbers = tape.calls_for(target.storage)
        self.tape = tape
        self.target = target
        self.last = numbers[-1] if numbers else -1
        self.calls = [tape.calls[number] for number in numbers]
        self.draws = [number for number in numbers if tape.calls[number].random]
        created = {storage for call in self.calls for storage in call.created}
        read = [storage for call in self.calls for storage in sorted(call.read)]
        self.constants = [
            storage for storage in dict.fromkeys([*read, target.storage]) if storage not in created
        ]

    def signature(self) -> Any:
        """Return a hashable value that is equal for parts with equal graphs."""
        local: dict[int, int] = {}

        def plain(value: Any) -> Any:
            if isinstance(value, TensorRef):
                number = local.setdefault(value.storage, len(local))
                return (number, value.dtype, value.shape, value.strides, value.offset)
            if isinstance(value, list | tuple):
                return tuple(plain(item) for item in value)
            if isinstance(value, Mapping):
                return tuple((key, plain(item)) for key, item in value.items())
            if isinstance(value, torch.Generator):
                return None
            return type(value), str(value)

        calls = tuple(
            (str(call.operator), plain(call.args), plain(call.kwargs), plain(call.results))
            for call in self.calls
        )
        constants = tuple(
            (plain(storage_ref(self.tape, storage)), storage in self.tape.outside)
            for storage in self.constants
        )
        return plain(self.target), calls, constants


def storage_ref(tape: Tape, storage: int) -> TensorRef:
    """Return a constant's storage as a tensor: (elements,)."""
    values = tape.constants.get(storage)
    if values is None:
        return TensorRef(storage, torch.uint8, (tape.outside.get(storage, 0),), (1,), 0)
    return TensorRef(storage, values.dtype, tuple(values.shape), (1,), 0)


def _trace(part: _Part) -> tuple[InitialGraph, _Inputs]:
    """Return the graph of a part of a tape.

    Raises:
        Unsupported: the tensor cannot be computed from the tape.
    """
    for storage in part.constants:
        if storage in part.tape.outside:
            size = part.tape.outside[storage] / 2**20
            raise Unsupported(
                f"it was not computed by torch, but read from elsewhere ({size:,.1f} MiB)"
            )
    mode = fake_mode()
    draws: list[Draw] = []
    with mode:
        constants = [
            torch.empty(values.shape, dtype=values.dtype)
            for values in (part.tape.constants[storage] for storage in part.constants)
        ]
        _Replay(part, constants, _note(draws)).run()
        inputs = [torch.empty(draw.shape, dtype=draw.dtype) for draw in draws]

    def function(*values: Tensor) -> Tensor:
        drawn = iter(values[: len(inputs)])
        return _Replay(part, values[len(inputs) :], lambda draw: next(drawn)).run()

    module: GraphModule = make_fx(functionalize(function), tracing_mode="fake")(*inputs, *constants)
    module.graph.eliminate_dead_code(is_impure_node=_is_input)
    _simplify(module)
    _return_tuple(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    kept = [number for number, node in enumerate(placeholders) if node.users]
    for number, node in enumerate(placeholders):
        if number not in kept:
            module.graph.erase_node(node)
    module.recompile()
    used = _Inputs(
        tuple(number for number in kept if number < len(inputs)),
        tuple(number - len(inputs) for number in kept if number >= len(inputs)),
    )
    return InitialGraph(module, tuple(draws[number] for number in used.draws)), used


def _note(draws: list[Draw]) -> Any:
    """Return a function that appends a draw to a list, and returns a tensor for it."""

    def draw(each: Draw) -> Tensor:
        draws.append(each)
        return torch.empty(each.shape, dtype=each.dtype)

    return draw


def _is_input(node: Node) -> bool:
    return node.op in ("placeholder", "output")


_UNCHANGED = frozenset(
    {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten.clone.default}
)
"""Operators whose result has the same elements in the same order."""


def _simplify(module: GraphModule) -> None:
    """Remove calls that change nothing, and what a tensor is before it is overwritten whole.

    Python objects of tensors without values make more calls, so that their graphs would be others.
    """
    for node in list(module.graph.nodes):
        if node.target in _UNCHANGED:
            if node.meta["val"].shape == node.args[0].meta["val"].shape:
                node.replace_all_uses_with(node.args[0])
            continue
        if node.target not in (_aten.copy.default, _aten.fill.Scalar, _aten.zero.default):
            continue
        value = node.meta["val"]
        if node.target is not _aten.copy.default:
            filling = node.args[1] if node.target is _aten.fill.Scalar else 0
            with module.graph.inserting_before(node):
                new = module.graph.call_function(
                    _aten.full.default,
                    (list(value.shape), filling),
                    {"dtype": value.dtype, "device": torch.device("cpu"), "pin_memory": False},
                )
            new.meta.update(node.meta)
        else:
            new = node.args[1]
            source = new.meta["val"]
            if (value.shape, value.dtype) != (source.shape, source.dtype):
                continue
        node.replace_all_uses_with(new)
    module.graph.eliminate_dead_code(is_impure_node=_is_input)


class _Replay:
    """One execution of a part of a tape.

    Args:
        part: the part.
        constants: a tensor for each of its constants.
        draw: returns the numbers of a draw.
    """

    def __init__(self, part: _Part, constants: Sequence[Tensor], draw: Any) -> None:
        self._part = part
        self._draw = draw
        self._tensors: dict[TensorRef, Tensor] = {}
        self._any: dict[tuple[int, torch.dtype], Tensor] = {}
        for storage, values in zip(part.constants, constants, strict=True):
            self._bind(storage_ref(part.tape, storage), values)

    def run(self) -> Tensor:
        """Execute the calls, and return the target."""
        for call in self._part.calls:
            results = self._call(call)
            tensors = list(results) if isinstance(results, list | tuple) else [results]
            tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
            for ref, tensor in zip(call.results, tensors, strict=True):
                # The default dtype may have been another one when the call was recorded.
                self._bind(ref, tensor if tensor.dtype == ref.dtype else tensor.to(ref.dtype))
        return self._find(self._part.target)

    def _call(self, call: Call) -> Any:
        args, kwargs = map_aggregate((call.args, dict(call.kwargs)), self._value)
        if call.random:
            draw, use = draw_of(call.operator, args, kwargs)
            return use(self._draw(draw))
        return call.operator(*args, **kwargs)

    def _bind(self, ref: TensorRef, tensor: Tensor) -> None:
        self._tensors[ref] = tensor
        self._any.setdefault((ref.storage, ref.dtype), tensor)

    def _find(self, ref: TensorRef) -> Tensor:
        if ref in self._tensors:
            return self._tensors[ref]
        base = self._any.get((ref.storage, ref.dtype))
        if base is None:
            raise Unsupported("its memory is also used with another dtype")
        return base.as_strided(ref.shape, ref.strides, ref.offset)

    def _value(self, argument: Any) -> Any:
        return self._find(argument) if isinstance(argument, TensorRef) else argument
