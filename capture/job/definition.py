"""What a user hands to the freeze: the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainload.core.arguments import check_fields
from trainload.core.errors import JobError

Batch = Mapping[Any, Any]
"""Input name (a string or an integer) -> value."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a job's loss function may return when a plain scalar is not enough.

    Attributes:
        value: the mean loss of the batch, a 0-dim floating-point tensor.
        weight: what the mean was taken over (tokens that are not padding, say), a 0-dim tensor. Batches are
            combined as sum(weight * value) / sum(weight). None: the number of rows of the batch.
        metrics: further 0-dim tensors to report, each combined like the loss. They get no gradient.
        outputs: tensors for other graphs of the job, which read them by `Graph.feeds`; one row for each of the batch's. No gradient flows
            through them.
    """

    value: torch.Tensor
    weight: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


LossFunction = Callable[[torch.nn.Module, dict[str, Any]], "torch.Tensor | Loss"]
PredictFunction = Callable[[torch.nn.Module, dict[str, Any]], "torch.Tensor | Mapping[str, torch.Tensor]"]
OptimizerFactory = Callable[[torch.nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
ScheduleFunction = Callable[[int], float]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, slots=True)
class Ema:
    """A running mean of the trained parameters: after the first update a copy of them, after every later one
    decay * mean + (1 - decay) * parameter. It is evaluated, and written as the trained package, in place of the last parameters, unless
    the launch says otherwise. Buffers are not averaged.

    Attributes:
        decay: between 0 and 1; 0.999 averages over about the last thousand updates.
    """

    decay: float


@dataclass(frozen=True, slots=True)
class LossScaling:
    """Dynamic loss scaling, for a model that runs under autocast to float16, as `torch.amp.GradScaler` does it.

    The loss is multiplied by a scale before its gradient is taken, and the gradient divided by it. An update whose gradient is not finite
    is left out, and the scale shrinks; after `growth_interval` updates in a row it grows.

    Attributes:
        init_scale: at the first step.
        growth_factor: what the scale is multiplied by when it grows.
        backoff_factor: what it is multiplied by when it shrinks.
        growth_interval: updates in a row before it grows.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True, slots=True)
class Graph:
    """One of several graphs of a job: a loss of its own with an optimizer of its own, or tensors for other graphs.

    Exactly one of `loss` and `compute` is given.

    Attributes:
        loss: as `Job.loss`; what it returns trains the parameters of this graph's optimizer, and no others.
        compute: `compute(model, batch)` -> tensors by name, one row for each of the batch's; run in eval mode, without gradients.
        inputs: the names of the batch's outermost entries that it reads. None: all of them.
        feeds: entry of the batch that the function is given -> "graph.output" of an earlier graph, which has run on the same batch.
        optimizer: `optimizer(model)`, over the parameters that this graph trains. None: `Job.optimizer`, one for all graphs that have none
            of their own. Of its parameters those are updated that this loss reaches.
        schedule: of this optimizer; its steps are this optimizer's updates. None: `Job.schedule`.
        clip_norm: as `Job.clip_norm`, of this graph's gradient. None: the job's.
        clip_value: as `Job.clip_value`. None: the job's.
        ema: of the parameters that this graph trains, moved with its updates. None: the job's.
    """

    loss: LossFunction | None = None
    compute: Callable[[torch.nn.Module, dict[str, Any]], Mapping[str, torch.Tensor]] | None = None
    inputs: Collection[str] | None = None
    feeds: Mapping[str, str] = field(default_factory=dict)
    optimizer: OptimizerFactory | None = None
    schedule: ScheduleFunction | SchedulerFactory | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    ema: Ema | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """When a graph runs within a round of the loop.

    Attributes:
        graph: its name.
        times: how often in a row, each time with an update.
        every: in rounds start, start + every, start + 2 * every, ... only.
        start: the first such round, from 0.
        fresh: each time on the next batch of the data. Otherwise on the round's own, which all turns share that are not fresh.
    """

    graph: str
    times: int = 1
    every: int = 1
    start: int = 0
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that travels in the package, where its path alone does not say everything.

    Attributes:
        source: its path, or its bytes. A folder's path stands for all files in it.
        media_type: of the file, or of each in the folder: "text/markdown". None: by the file's name; docs/assets.md has the table.
    """

    source: str | os.PathLike[str] | bytes
    media_type: str | None = None


AssetLike = str | os.PathLike[str] | bytes | Asset


@dataclass(frozen=True, slots=True)
class Job:
    """A training job, ready to be frozen.

    Attributes:
        model: the module, with its weights, on any device.
        batch: an example batch, input name -> tensor; or a dict, list, tuple, named tuple or dataclass of tensors, which are then
            inputs with dotted names ("mask.left", "pair.0"). Every tensor's leading dim is the batch dim, of 2 rows or more, but for
            what `shared` and `dynamic` say. None, numbers and strings in it are constants of the graphs.
        loss: `loss(model, batch)` -> a 0-dim mean loss, or `Loss`; `batch` is nested as above. None: `model(**batch)` returns it.
        optimizer: `optimizer(model)` -> a new `torch.optim.Optimizer` over the model's parameters, or several, each over some of them.
            None: every one of `graphs` has its own.
        schedule: `schedule(step)` -> factor on each group's learning rate, for step 0, 1, ...; or a
            `torch.optim.lr_scheduler` factory that is given the optimizer. None: constant.
        predict: `predict(model, batch)` -> the tensors that a trained model is for. None: no predict graph.
        predict_inputs: the names of the batch's outermost entries that predict reads. None: all of them.
        dynamic: (dotted) input name -> {dim: torch.export.Dim, one derived from it such as 2*dim, Dim.AUTO, Dim.DYNAMIC,
            Dim.STATIC, the size, or None}, or one of these for each dim. Dims are fixed where nothing is said, but for the leading
            dim of every input, which is dynamic (one dim, named "batch") unless this says `{0: Dim.STATIC}`. Of an input whose rows are
            elsewhere it names that dim: `{"state": {1: Dim("batch")}}`. docs/shapes.md.
        shared: (dotted) names of tensors of the batch that are the same for all rows of every batch: class weights, anchors, a mask. The
            package keeps their values, and no data set holds them. A container's name stands for all tensors in it. docs/shapes.md.
        steps: length of the run: optimizer updates, or rounds of the loop where there are `graphs`.
        global_batch: rows of one optimizer update, over all workers and microbatches. None: the example's rows.
        clip_norm: greatest global L2 norm of the gradient, which is of the parameters that an optimizer has. None: no clipping.
        clip_value: greatest absolute value of each element of the gradient. None: no clipping. One of the two at most.
        ema: a running mean of the parameters. None: none is kept.
        loss_scaling: for float16 under autocast. None: the loss is not scaled.
        seed: of dropout masks and of the order of the data.
        assets: name -> what travels in the package under it (a tokenizer, a licence, a model card): a path, bytes, or an `Asset`. A name
            may have folders ("tokenizer/vocab.json"); one that stands for a folder of files is the folder's. docs/assets.md.
        graphs: several graphs by name, in place of `loss`. The first one that trains is the main one: its loss is the run's.
        variants: further example batches by name, each of other entries, constants or shapes than `batch`; every graph is captured for
            each. A run gives a batch to the first that takes it, `batch` being the first of all. docs/variants.md.
        replays: further batches, each given to the variant that takes it, on which the freeze compares graphs with eager.
        loop: what happens in a round, in order: turns, or names of graphs that run once. None: every graph once, in the order of `graphs`.
    """

    model: torch.nn.Module
    batch: Batch
    optimizer: OptimizerFactory | None = None
    loss: LossFunction | None = None
    schedule: ScheduleFunction | SchedulerFactory | None = None
    predict: PredictFunction | None = None
    predict_inputs: Collection[str] | None = None
    dynamic: Mapping[str, Any] = field(default_factory=dict)
    shared: Collection[str] = ()
    steps: int = 1000
    global_batch: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    ema: Ema | None = None
    loss_scaling: LossScaling | None = None
    seed: int = 0
    assets: Mapping[str, AssetLike] = field(default_factory=dict)
    graphs: Mapping[str, Graph] = field(default_factory=dict)
    loop: Sequence[Turn | str] | None = None
    variants: Mapping[str, Batch] = field(default_factory=dict)
    replays: Sequence[Batch] = ()


def check_job(job: Job) -> None:
    """Check the attributes of a job, its graphs and its turns against their annotations.

    Raises:
        JobError: an attribute has a wrong type; the message names it.
    """
    check_fields(job, "Job", JobError)
    for name, graph in job.graphs.items():
        check_fields(graph, f"Job.graphs[{name!r}]", JobError)
    for place, turn in enumerate(job.loop or ()):
        if isinstance(turn, Turn):
            check_fields(turn, f"Job.loop[{place}]", JobError)
    factories = {"Job": job.optimizer, **{f"Job.graphs[{name!r}]": graph.optimizer for name, graph in job.graphs.items()}}
    for where, factory in factories.items():
        if isinstance(factory, type):
            raise JobError(
                "a class in place of a function of the model",
                where=f"{where}.optimizer",
                expected=f"lambda model: {factory.__name__}(model.parameters(), lr=0.1), for example",
                got=factory.__name__,
            )
