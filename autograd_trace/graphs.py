"""Results of autograd_trace: step graphs, update graphs and the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch.export import ExportedProgram

from trainload.capture.program import MAIN
from trainload.core.records import LeanRecord


class Role(StrEnum):
    """Role of an input or output of a step graph."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    BATCH = "batch"
    SEED = "seed"
    """0-dim int64: the run's seed."""
    STEP = "step"
    """0-dim int64: number of the optimizer update, from 0."""
    ROW = "row"
    """0-dim int64: the number, within the global batch, of this call's first row."""
    SCALE = "scale"
    """0-dim float32: factor of the loss's gradient, beside the loss weight: 1 / rows of the global
    batch.
    """
    LOSS = "loss"
    WEIGHT = "weight"
    METRIC = "metric"
    PREDICTION = "prediction"
    GRADIENT = "gradient"
    BUCKET = "bucket"
    """1-D: this rank's part of a bucket's parameters. Only in graphs that a plan has rewritten, as
    are the next two.
    """
    BUCKET_GRADIENT = "bucket_gradient"
    """1-D: the gradients of a bucket; as an input, the gradients accumulated so far."""
    TOTALS = "totals"
    """1-D float32: weight * loss, weight * each metric, and the weight, summed over the ranks."""
    TENSOR_RANK = "tensor_rank"
    """0-dim int64: this rank's number on the tensor axis. Only in graphs that were partitioned over
    one.
    """
    ACTIVATION = "activation"
    """A value that forward sends to later stages of a pipeline.

    Only in the graphs of its stages, as are the next two.
    """
    COTANGENT = "cotangent"
    """A value that backward sends to earlier stages."""
    SAVED = "saved"
    """A value that a stage keeps from one of its graphs for another."""


TANGENT = "tangent"
"""Name of the node of a step graph at which its backward part begins."""

CHUNK = "chunk"
"""Key in `node.meta` of nodes that compute a chunk of a loss, whose value is the chunk's index."""

ADDED = "added"
"""Key in `node.meta` of a node that a plan has added: slices of buckets, flat gradients,
collectives.
"""


@dataclass(frozen=True, slots=True)
class Port:
    """A named input or output.

    For a gradient, `name` is its parameter's; for a buffer output, the buffer's; for a constant,
    its name in `Program.constants`.
    """

    role: Role
    name: str


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One flat, functional graph of ATen and collective operators.

    Laws: placeholder i is `inputs[i]` and output i is `outputs[i]`; all outputs are tensors; there
    is one gradient for each trainable parameter that the loss depends on, of the parameter's shape
    and dtype; the gradient output is that of scale * weight * loss, so that sums over microbatches
    and ranks, divided by scale * (sum of weights), are the gradient of the mean; the backward part
    begins at the node named `TANGENT` (a graph without gradients has none); nothing reads a random
    generator: masks are a function of (seed, step, site, logical element index).
    """

    module: torch.fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One entry of an optimizer's state.

    If `like_parameter`, it has the parameter's shape; otherwise it has `shape`, which is () in an
    elementwise update.
    """

    name: str
    dtype: str
    like_parameter: bool
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class UpdateGraph:
    """An optimizer's update of one parameter group, as a function of one tensor.

    `first`: (param, grad, lr) -> (param, *state), for a parameter that was never updated.

    `following`: (param, grad, lr, *state) -> (param, *state).

    param and grad have the shape `shape`, or (n,) for any n if it is None; lr is 0-dim float32;
    state is as in `state`, in its order.

    Laws: both are functional, and their constants are 0-dim. If `shape` is None, the update is
    elementwise: every element of the result depends only on the same element of the inputs (and on
    0-dim ones), so it may run on any slice. Otherwise it runs on whole parameters, all of this
    shape.
    """

    group: str
    first: ExportedProgram
    following: ExportedProgram
    state: tuple[StateSpec, ...]
    shape: tuple[int, ...] | None = None

    @property
    def elementwise(self) -> bool:
        """True if it may run on any slice."""
        return self.shape is None


class GroupRecipe(LeanRecord):
    """A parameter group: its parameters, and the learning rate of each update of its optimizer (the
    last one is kept from then on).

    Law: if `schedule` is a number, there is one learning rate, which is multiplied by the entries
    of that table in the recipe's `schedules`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    later: ClassVar[frozenset[str]] = frozenset({"schedule", "clock"})

    name: str
    parameters: tuple[str, ...]
    learning_rates: tuple[float, ...] = Field(min_length=1)
    schedule: int | None = Field(default=None, ge=0)
    clock: tuple[str, ...] = ()
    """The graphs whose turns count as its optimizer's updates; () for the main one."""


MOST = 2**53 - 1
"""Greatest count in a recipe: graphs receive it as int64, and every JSON parser represents it
exactly.
"""


class TurnRecipe(BaseModel):
    """Turns of a graph within a round: see `trainload.capture.job.definition.Turn`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    graph: str
    times: int = Field(default=1, ge=1, le=MOST)
    every: int = Field(default=1, ge=1, le=MOST)
    start: int = Field(default=0, ge=0, le=MOST)
    fresh: bool = False


class GraphRecipe(BaseModel):
    """Update of parameters by one of several training graphs: those of `groups`, with its own
    clipped gradient; `ema_decay` of their mean.

    Law: it computes a gradient for every parameter of these groups.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    groups: tuple[str, ...]
    clip_norm: float | None = Field(default=None, gt=0)
    clip_value: float | None = Field(default=None, gt=0)
    ema_decay: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("the gradient is clipped by its norm or by value, not both")
        return self


class LossScale(BaseModel):
    """Dynamic loss scaling: see `trainload.capture.job.definition.LossScaling`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    init_scale: float = Field(gt=0)
    growth_factor: float = Field(gt=1)
    backoff_factor: float = Field(gt=0, lt=1)
    growth_interval: int = Field(ge=1, le=MOST)


class Recipe(LeanRecord):
    """Settings that drive the graphs, as data.

    Laws: no parameter is in two groups of one graph; a parameter in no group keeps its value; one
    optimizer update uses `global_batch` rows; the gradient is clipped by its norm or by the values
    of its elements; `main` runs in every round of the loop.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    later: ClassVar[frozenset[str]] = frozenset(
        {"schedules", "clip_value", "ema_decay", "loss_scale", "main", "loop", "graphs", "feeds"}
    )

    optimizer: str
    groups: tuple[GroupRecipe, ...]
    schedules: tuple[Annotated[tuple[float, ...], Field(min_length=1)], ...] = ()
    """Factors of learning rates, by step; groups share them."""
    steps: int = Field(ge=1, le=MOST)
    global_batch: int = Field(ge=1, le=MOST)
    clip_norm: float | None = Field(default=None, gt=0)
    clip_value: float | None = Field(default=None, gt=0)
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    loss_scale: LossScale | None = None
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    main: str = MAIN
    """The graph whose loss is the run's."""
    loop: tuple[TurnRecipe, ...] = ()
    """Turns of a round, in order; () for one turn of the main graph."""
    graphs: dict[str, GraphRecipe] = Field(default_factory=dict)
    """Name of a training graph, of each variant -> its recipe; {} if the main graph, of whatever
    variant, updates all groups.
    """
    feeds: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Graph -> input that is not in the data -> "graph.output" of another graph, which runs before
    it in a round, on the same batch.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        for group in self.groups:
            if group.schedule is not None and (
                group.schedule >= len(self.schedules) or len(group.learning_rates) > 1
            ):
                raise ValueError(
                    f"group {group.name} refers to a missing schedule, or has its own learning"
                    " rates as well as a schedule"
                )
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("the gradient is clipped by its norm or by value, not both")
        return self

    @property
    def turns(self) -> tuple[TurnRecipe, ...]:
        """Turns of a round, in order."""
        return self.loop or (TurnRecipe(graph=self.main),)

    def graph(self, name: str) -> GraphRecipe:
        """Return how the training graph of this name updates parameters."""
        if self.graphs:
            return self.graphs[name]
        groups = tuple(group.name for group in self.groups)
        return GraphRecipe(
            groups=groups,
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            ema_decay=self.ema_decay,
        )

    @property
    def keeps_mean(self) -> bool:
        """True if a running mean of parameters is kept."""
        return self.ema_decay is not None or any(
            graph.ema_decay is not None for graph in self.graphs.values()
        )

    def rates(self, updates: int | Mapping[str, int]) -> list[float]:
        """Return the learning rate of every group.

        Args:
            updates: number of turns that each graph has had before, or the main graph.
        """
        counts = {self.main: updates} if isinstance(updates, int) else updates
        rates = []
        for group in self.groups:
            table = (
                group.learning_rates if group.schedule is None else self.schedules[group.schedule]
            )
            step = sum(counts[graph] for graph in group.clock or (self.main,))
            value = table[min(step, len(table) - 1)]
            rates.append(value if group.schedule is None else group.learning_rates[0] * value)
        return rates
