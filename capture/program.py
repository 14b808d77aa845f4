"""What capture produces: the program, pre-dispatch and portable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.export import ExportedProgram

SizeLike = int | str
"""A size: an int, or the name of a symbol (`"batch"`, or an expression such as `"2*s1"`) that changes from call to call."""


class OutputRole(StrEnum):
    """What an output of a captured graph is for."""

    LOSS = "loss"
    WEIGHT = "weight"
    METRIC = "metric"
    PREDICTION = "prediction"


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One entry of a batch: `dtype` as torch spells it ("int64"), `shape` with symbols for dynamic sizes.

    `quantiles`: values of the example batch, ascending, from which a batch like it can be made; see capture/synthesise.py.
    """

    name: str
    dtype: str
    shape: tuple[SizeLike, ...]
    quantiles: tuple[int | float, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One output of a captured graph, in the graph's order."""

    name: str
    role: OutputRole


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One entry of the model's state.

    `alias_of` names the parameter whose storage this one shares (tied weights); an alias has no tensor of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A buffer of the model. `persistent` ones are in `state_dict()`; all of them travel in the package."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    persistent: bool


@dataclass(frozen=True, slots=True)
class GraphCapture:
    """One captured graph.

    Laws: `exported` is torch.export's training IR with no weights of its own that `Program.state` lacks; its user inputs are
    `inputs`, as one dict, in this (sorted) order; its user outputs are `outputs`, one flat tuple, in this order.
    """

    name: str
    exported: ExportedProgram
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A captured model and loss: the only source of truth of what is computed.

    Laws: `graphs` holds "train", and "eval" and "predict" where they were asked for; every graph's parameters and buffers are
    names of `parameters` and `buffers`; `state` holds a tensor for every parameter that is not an alias and for every buffer,
    and `constants` one for every tensor constant of a graph (`"train/lifted_tensor_0"`), on CPU. An abstract program has no state at all.
    """

    graphs: Mapping[str, GraphCapture]
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    state: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]

    @property
    def aliases(self) -> dict[str, str]:
        """Alias -> the parameter that owns the storage."""
        return {p.name: p.alias_of for p in self.parameters if p.alias_of is not None}
