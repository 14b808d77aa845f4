"""The result of a capture: a program of portable, pre-dispatch graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch.export import ExportedProgram

from trainload.capture.guard import Guard

SizeLike = int | str
"""A size: an int, or a symbol (`"batch"`) or expression (`"2*s1"`) of a dynamic size."""


class OutputRole(StrEnum):
    """Purpose of an output of a captured graph."""

    LOSS = "loss"
    WEIGHT = "weight"
    METRIC = "metric"
    PREDICTION = "prediction"
    OUTPUT = "output"
    """A tensor that other graphs of the job read."""


class Mode(StrEnum):
    """Purpose of a captured graph, which decides how it runs."""

    TRAIN = "train"
    """A loss, in train mode, with gradients."""
    EVAL = "eval"
    """The same function in eval mode, without gradients."""
    PREDICT = "predict"
    """Predictions of the trained model: eval mode, without gradients."""
    COMPUTE = "compute"
    """Tensors for other graphs of the job (a teacher's logits): eval mode, without gradients."""


MAIN = "train"
"""Name of the only graph of a job without `graphs`."""
RESERVED = frozenset({"eval", "predict", "update"})
"""Names that no graph of a job and no variant may have."""


def graph_name(graph: str, mode: Mode, variant: str = "") -> str:
    """Return the name of a captured graph.

    Examples: "train", "eval", "predict", "critic", "critic-eval", "train-masked".
    """
    if mode is Mode.PREDICT:
        name = "predict"
    elif mode is Mode.EVAL:
        name = "eval" if graph == MAIN else f"{graph}-eval"
    else:
        name = graph
    return f"{name}-{variant}" if variant else name


def graph_of(name: str) -> str:
    """Return the job's graph that a captured graph belongs to; inverse of `graph_name`."""
    base = name.split("-")[0]
    return MAIN if base in ("eval", "predict") else base


def variant_of(name: str) -> str:
    """Return the variant of a captured graph by its name; "" for the first variant."""
    return next((part for part in name.split("-")[1:] if part != "eval"), "")


def mode_of(name: str, has_loss: bool) -> Mode:
    """Return the mode of a captured graph by its name and the presence of a loss output."""
    base, *rest = name.split("-")
    if base == "predict":
        return Mode.PREDICT
    if base == "eval" or rest[:1] == ["eval"]:
        return Mode.EVAL
    return Mode.TRAIN if has_loss else Mode.COMPUTE


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One entry of a batch.

    Attributes:
        name: dotted name.
        dtype: dtype as torch spells it ("int64").
        shape: sizes, with symbols for dynamic ones.
        quantiles: values of the example batch, ascending, from which a similar batch can be
            generated; see capture/job/synthesise.py.
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
    """One parameter of the model.

    `alias_of` names the parameter whose storage this one shares (tied weights); an alias has no
    tensor of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A buffer of the model.

    Persistent buffers are in `state_dict()`; the package contains all of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    persistent: bool


@dataclass(frozen=True, slots=True)
class Tracing:
    """The torch.export mode that captured a graph, and the reason for it.

    Attributes:
        strict: True for torch.export's strict mode.
        why: the reason for the mode, in a sentence.
        refused: the error that the non-strict mode raised, if the strict mode was tried because of
            it.
    """

    strict: bool
    why: str
    refused: Exception | None = field(default=None, compare=False, repr=False)

    @property
    def mode(self) -> str:
        """Name of the mode as it is written to files."""
        return "strict" if self.strict else "non-strict"


@dataclass(frozen=True, slots=True)
class GraphCapture:
    """One captured graph: one of the job's graphs, in one mode, for one variant.

    Laws: `name` is `graph_name(graph, mode, variant)`; `exported` is torch.export's training IR and
    has no weights that `Program.state` lacks; its user inputs are `inputs`, as one dict, in this
    (sorted) order; its user outputs are `outputs`, one flat tuple, in this order.
    """

    name: str
    exported: ExportedProgram
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    reached: tuple[str, ...] | None = None
    """Trained parameters that receive a gradient from its loss.

    Sorted names of their owners; None: all of the program's.
    """
    guard: Guard | None = None
    """Batches that it accepts; None if not requested, or if the package predates guards."""
    coupled: bool = False
    """True if a row's results depend on the other rows of the call.

    A freeze measures it; False until then.
    """
    tracing: Tracing | None = field(default=None, compare=False)
    """Mode and reason of the capture.

    None if the graph was read from a package, whose debug/capture.json has them.
    """

    @property
    def mode(self) -> Mode:
        """Purpose of the graph."""
        return mode_of(self.name, any(o.role is OutputRole.LOSS for o in self.outputs))

    @property
    def graph(self) -> str:
        """Name of the job's graph that it belongs to."""
        return graph_of(self.name)

    @property
    def variant(self) -> str:
        """Name of its variant; "" for the first."""
        return variant_of(self.name)

    @property
    def training(self) -> bool:
        """True if it runs with gradients."""
        return self.mode is Mode.TRAIN


@dataclass(frozen=True, slots=True)
class Program:
    """A captured model and loss: the only source of truth for what is computed.

    Laws: `graphs` holds, by name, one or more training graphs, an evaluation graph for each, and
    the other requested graphs; every graph's parameters and buffers are names of `parameters` and
    `buffers`; `state` holds a tensor for every parameter that is not an alias and for every buffer,
    and `constants` one for every tensor constant of a graph (`"train/lifted_tensor_0"`), on CPU. An
    abstract program has no state at all.
    """

    graphs: Mapping[str, GraphCapture]
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    state: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    variants: tuple[str, ...] = ()
    """The job's variants except the first, in the order in which they are tried on a batch."""

    @property
    def aliases(self) -> dict[str, str]:
        """Alias -> the parameter that owns the storage."""
        return {p.name: p.alias_of for p in self.parameters if p.alias_of is not None}
