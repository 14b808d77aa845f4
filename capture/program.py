"""What capture produces: the program, pre-dispatch and portable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch.export import ExportedProgram

from trainload.capture.guard import Guard

SizeLike = int | str
"""A size: an int, or the name of a symbol (`"batch"`, or an expression such as `"2*s1"`) that changes from call to call."""


class OutputRole(StrEnum):
    """What an output of a captured graph is for."""

    LOSS = "loss"
    WEIGHT = "weight"
    METRIC = "metric"
    PREDICTION = "prediction"
    OUTPUT = "output"
    """A tensor for other graphs of the job."""


class Mode(StrEnum):
    """What a captured graph is for, and so how it is run."""

    TRAIN = "train"
    """A loss, in train mode, with gradients."""
    EVAL = "eval"
    """The same function in eval mode, without gradients."""
    PREDICT = "predict"
    """What a trained model is for: eval mode, without gradients."""
    COMPUTE = "compute"
    """Tensors for other graphs of the job (a teacher's logits): eval mode, without gradients."""


MAIN = "train"
"""The graph of a job that has one."""
RESERVED = frozenset({"eval", "predict", "update"})
"""What no graph of a job, and no variant, may be called."""


def graph_name(graph: str, mode: Mode, variant: str = "") -> str:
    """The name under which a graph is captured and stored: "train", "eval", "predict", "critic", "critic-eval", "train-masked"."""
    if mode is Mode.PREDICT:
        name = "predict"
    elif mode is Mode.EVAL:
        name = "eval" if graph == MAIN else f"{graph}-eval"
    else:
        name = graph
    return f"{name}-{variant}" if variant else name


def graph_of(name: str) -> str:
    """The job's graph that a captured one is of, by `graph_name`."""
    base = name.split("-")[0]
    return MAIN if base in ("eval", "predict") else base


def variant_of(name: str) -> str:
    """The variant that a captured graph is, by `graph_name`; "" for the first."""
    return next((part for part in name.split("-")[1:] if part != "eval"), "")


def mode_of(name: str, has_loss: bool) -> Mode:
    """What a captured graph is for, by `graph_name` and by whether a loss is among its outputs."""
    base, *rest = name.split("-")
    if base == "predict":
        return Mode.PREDICT
    if base == "eval" or rest[:1] == ["eval"]:
        return Mode.EVAL
    return Mode.TRAIN if has_loss else Mode.COMPUTE


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One entry of a batch: `dtype` as torch spells it ("int64"), `shape` with symbols for dynamic sizes.

    `quantiles`: values of the example batch, ascending, from which a batch like it can be made; see capture/job/synthesise.py.
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
class Tracing:
    """How a graph was captured: by torch.export's strict mode or its non-strict one, and `why`, in a sentence.

    `refused`: the page that the non-strict mode gave, where the strict one stepped in for it.
    """

    strict: bool
    why: str
    refused: Exception | None = field(default=None, compare=False, repr=False)

    @property
    def mode(self) -> str:
        """As it is written down."""
        return "strict" if self.strict else "non-strict"


@dataclass(frozen=True, slots=True)
class GraphCapture:
    """One captured graph: of one of the job's graphs, in one mode, of one variant.

    Laws: `name` is `graph_name(graph, mode, variant)`; `exported` is torch.export's training IR with no weights of its own that
    `Program.state` lacks; its user inputs are `inputs`, as one dict, in this (sorted) order; its user outputs are `outputs`, one flat
    tuple, in this order.
    """

    name: str
    exported: ExportedProgram
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    reached: tuple[str, ...] | None = None
    """The trained parameters that get a gradient from its loss, by their owners' names, sorted; None: all of the program's."""
    guard: Guard | None = None
    """Which batches it takes; None where that was not asked, or the package is from before guards."""
    coupled: bool = False
    """Whether a row's results depend on the other rows of the call, as measured by a freeze; False until then."""
    tracing: Tracing | None = field(default=None, compare=False)
    """How it was captured; None where it was read from a package, whose debug/capture.json says it."""

    @property
    def mode(self) -> Mode:
        """What it is for."""
        return mode_of(self.name, any(o.role is OutputRole.LOSS for o in self.outputs))

    @property
    def graph(self) -> str:
        """Which of the job's graphs it is of."""
        return graph_of(self.name)

    @property
    def variant(self) -> str:
        """Which variant it is; "" for the first."""
        return variant_of(self.name)

    @property
    def training(self) -> bool:
        """Whether it is run with gradients."""
        return self.mode is Mode.TRAIN


@dataclass(frozen=True, slots=True)
class Program:
    """A captured model and loss: the only source of truth of what is computed.

    Laws: `graphs` holds, by name, one training graph or more, an evaluation graph for each, and what else was asked for; every graph's
    parameters and buffers are names of `parameters` and `buffers`; `state` holds a tensor for every parameter that is not an alias and
    for every buffer, and `constants` one for every tensor constant of a graph (`"train/lifted_tensor_0"`), on CPU. An abstract program has
    no state at all.
    """

    graphs: Mapping[str, GraphCapture]
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    state: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    variants: tuple[str, ...] = ()
    """The job's variants but for the first, in the order in which a batch is tried on them."""

    @property
    def aliases(self) -> dict[str, str]:
        """Alias -> the parameter that owns the storage."""
        return {p.name: p.alias_of for p in self.parameters if p.alias_of is not None}
