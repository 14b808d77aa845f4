"""Checks that no tensor that training changes shares memory with another one.

A package stores each tensor separately. If two share memory, eager training changes both by writing
to one; the stored copies would diverge at the first update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from trainload.capture.operators import calls_in, is_overload
from trainload.capture.source.source_place import place_of_node
from trainload.core.errors import CaptureError

_OTHER_MEMORY = frozenset({torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_})
_CONSTANT = "tensor that forward uses"
_MOST_WORK = 10**6
"""Bound on numpy's exact search for a common element of two strided arrays.

The search is exponential in the number of dims.

Undecided cases count as overlapping.
"""


class _Memory:
    """The bytes of a tensor, as numpy describes an array.

    Nothing is read, so the device does not matter.
    """

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.start = tensor.data_ptr()
        self.end = self.start + size * (
            1
            + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )
        self.device = str(tensor.device)
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "data": (self.start, True),
        }

    def overlaps(self, other: _Memory) -> bool:
        """Return True if an element of one shares a byte with an element of the other."""
        if self.device != other.device or self.end <= other.start or other.end <= self.start:
            return False
        try:
            return np.shares_memory(np.asarray(self), np.asarray(other), max_work=_MOST_WORK)  # type: ignore[arg-type]  # any integer
        except np.exceptions.TooHardError:
            return True


def check_memory(changing: Mapping[str, Tensor], fixed: Mapping[str, Tensor]) -> None:
    """Check that tensors that training changes share memory with no other tensor.

    Their own elements must not overlap either.

    Views of one storage without a common element, such as columns of one fused tensor, are allowed.

    Args:
        changing: "parameter NAME" or "buffer NAME" -> a tensor that an update or a step writes to.
        fixed: the same, or any other description -> a tensor that nothing writes to; these may
            share memory with each other.

    Raises:
        CaptureError: if two share memory; the message names both.
    """
    for name, tensor in changing.items():
        if any(
            stride == 0 and size > 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise CaptureError(
                f"the {name} is expanded: several of its elements share one memory location, so it"
                " cannot be updated in place",
                where=f"Job.model: {name}",
                expected="a tensor with separate memory for every element",
                got=f"shape {tuple(tensor.shape)} with strides {tensor.stride()}",
                hint="Clone it: nn.Parameter(value.expand(...).clone()).",
            )
    place = {name: number for number, name in enumerate([*changing, *fixed])}
    pairs = [
        sorted(pair, key=place.__getitem__) for pair in _overlapping_pairs({**fixed, **changing})
    ]
    shared = min(
        (pair for pair in pairs if pair[0] in changing),
        key=lambda pair: place[pair[0]],
        default=None,
    )
    if shared is not None:
        one, other = shared
        raise CaptureError(
            f"the {one} and the {other} share memory, and training changes the {one}: in a package"
            " they would diverge",
            where=f"Job.model: {other}",
            expected="separate memory",
            got="shared memory",
            hint=_sharing_hint(one, other),
        )


def check_sharing(
    model: nn.Module, exported: ExportedProgram | None = None, written: Set[str] = frozenset()
) -> None:
    """Check that a model's tensors that training changes share memory with no other one.

    Args:
        model: training changes its parameters that require a gradient.
        exported: a graph of it, if there is one yet; its constants are compared as well.
        written: buffers that a call of the graph writes to; training changes them, too.

    Raises:
        CaptureError: if two share memory; the message names both, a constant by the line that uses
            it.
    """
    changing, fixed = dict[str, Tensor](), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        (changing if parameter.requires_grad else fixed)[f"parameter {name}"] = parameter.detach()
    # With duplicates: a batch norm under two names has one set of statistics in eager mode, but two
    # in a package.
    for name, buffer in model.named_buffers(remove_duplicate=False):
        (changing if name in written else fixed)[f"buffer {name}"] = buffer
    if exported is not None:
        inputs = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
        for spec in exported.graph_signature.input_specs:
            if spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
                user = next(iter(inputs[spec.arg.name].users), None)
                label = f"{_CONSTANT} at {place_of_node(user)}"
                # a line may use several
                fixed[label if label not in fixed else f"{label} ({spec.target})"] = (
                    exported.constants[spec.target]
                )
    check_memory(changing, fixed)


def _sharing_hint(one: str, other: str) -> str:
    kind, _, name = one.partition(" ")
    if kind == "parameter" and other.startswith(_CONSTANT):
        return (
            f"Use model.{name} itself there, or model.{name}.detach(), and keep several parameters"
            " in an nn.ParameterList or nn.ParameterDict: tensors in a Python list or dict are not"
            " part of the model. If it must keep its values, clone it (.detach().clone())."
        )
    if kind == "buffer" and other.startswith("buffer "):
        return "Give each a separate tensor (clone it), or register it once and use that one."
    if kind == "parameter" and other.startswith("parameter "):
        path = other.partition(" ")[2]
        return (
            f"Tie them by assignment, as in module.{path.rpartition('.')[2]} ="
            f" other.{name.rpartition('.')[2]}, or clone one of them."
        )
    return (
        f"If it must keep its values, clone it (.detach().clone()); if it must follow the {one},"
        f" use model.{name}.detach() in forward."
    )


def _overlapping_pairs(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of names whose tensors have an element in common."""
    memories = sorted(
        ((_Memory(t), name) for name, t in tensors.items() if t.numel()),
        key=lambda pair: (pair[0].device, pair[0].start),
    )
    active: list[tuple[_Memory, str]] = []
    for memory, name in memories:
        active = [
            (other, n)
            for other, n in active
            if other.device == memory.device and other.end > memory.start
        ]
        for other, n in active:
            if other.overlaps(memory):
                yield n, name
        active.append((memory, name))


def check_same_memory(exported: ExportedProgram) -> None:
    """Check that a graph does not replace or resize the storage of a parameter or buffer.

    Raises:
        CaptureError: if forward calls `set_`, `resize_` or `resize_as_` on one.
    """
    for node in calls_in(exported.graph_module):
        if (
            is_overload(node.target)
            and node.target.overloadpacket in _OTHER_MEMORY
            and getattr(node.args[0], "op", "") == "placeholder"
        ):
            raise CaptureError(
                "forward replaces the memory of a tensor of the model with"
                f" {node.target.overloadpacket.__name__}",
                where=place_of_node(node),
                expected="a write to its values",
                got=f"{node.target} of {node.args[0]}",
                hint=(
                    "Write a buffer's values with copy_; represent a changing size by a mask or a"
                    " number."
                ),
            )
