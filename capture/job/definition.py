"""The definition of a job, which the user passes to `freeze`."""

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
    """Return value of a loss function that returns more than a scalar.

    Attributes:
        value: the mean loss of the batch, a 0-dim floating-point tensor.
        weight: number of items that the mean was computed over (for example tokens that are not
            padding), a 0-dim tensor. Batches are combined as sum(weight * value) / sum(weight).
            None: the number of rows of the batch.
        metrics: further 0-dim tensors to report, each combined like the loss. They receive no
            gradient.
        outputs: tensors for other graphs of the job, which read them through `Graph.feeds`; one row
            for each row of the batch. No gradient flows through them.

    Example:
        def loss(model, batch):
            logits, labels = model(batch["tokens"]), batch["labels"]
            kept = labels != -100
            mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            accuracy = ((logits.argmax(-1) == labels) & kept).sum() / kept.sum()
            return trainload.Loss(mean, weight=kept.sum(), metrics={"accuracy": accuracy})
    """

    value: torch.Tensor
    weight: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


LossFunction = Callable[[torch.nn.Module, dict[str, Any]], "torch.Tensor | Loss"]
PredictFunction = Callable[
    [torch.nn.Module, dict[str, Any]], "torch.Tensor | Mapping[str, torch.Tensor]"
]
OptimizerFactory = Callable[
    [torch.nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
]
ScheduleFunction = Callable[[int], float]
WeightNames = Mapping[str, str] | Callable[[str], str]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, slots=True)
class Ema:
    """An exponential moving average of the trained parameters.

    After the first update it is a copy of them, after every later one decay * mean + (1 - decay) *
    parameter. It is evaluated, and written as the trained package, instead of the last parameters,
    unless the launch says otherwise. Buffers are not averaged.

    Attributes:
        decay: between 0 and 1; 0.999 averages over roughly the last thousand updates.

    Example:
        job = trainload.Job(model, batch, optimizer, ema=trainload.Ema(decay=0.999))
    """

    decay: float


@dataclass(frozen=True, slots=True)
class LossScaling:
    """Dynamic loss scaling as in `torch.amp.GradScaler`, for autocast to float16.

    The loss is multiplied by a scale before its gradient is computed, and the gradient is divided
    by it. An update whose gradient is not finite is skipped, and the scale shrinks; after
    `growth_interval` consecutive updates it grows.

    Attributes:
        init_scale: the scale at the first step.
        growth_factor: factor by which the scale grows.
        backoff_factor: factor by which the scale shrinks.
        growth_interval: number of consecutive updates before the scale grows.

    Example:
        job = trainload.Job(model, batch, optimizer, loss_scaling=trainload.LossScaling())
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True, slots=True)
class Graph:
    """One of several graphs of a job: a loss with its own optimizer, or tensors for other graphs.

    Exactly one of `loss` and `compute` is given.

    Attributes:
        loss: like `Job.loss`; it trains the parameters of this graph's optimizer, and no others.
        compute: `compute(model, batch)` -> tensors by name, one row for each row of the batch; runs
            in eval mode, without gradients.
        inputs: names of the batch's outermost entries that it reads. None: all of them.
        feeds: entry of the batch passed to the function -> "graph.output" of an earlier graph,
            which has run on the same batch.
        optimizer: `optimizer(model)`, over the parameters that this graph trains; those that its
            loss reaches are updated. None: `Job.optimizer`, which all graphs without their own
            share.
        schedule: schedule of this optimizer; its steps are this optimizer's updates. None:
            `Job.schedule`.
        clip_norm: like `Job.clip_norm`, for this graph's gradient. None: the job's.
        clip_value: like `Job.clip_value`. None: the job's.
        ema: moving average of the parameters that this graph trains, updated with them. None: the
            job's.

    Example:
        trainload.Graph(loss=generator_loss, inputs=("noise",), optimizer=generator_optimizer)
        trainload.Graph(compute=lambda model, batch: {"features": model.encoder(batch["image"])})
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
    """A run of a graph within a round of the loop.

    Attributes:
        graph: name of the graph.
        times: number of consecutive runs, each with an update.
        every: run only in rounds start, start + every, start + 2 * every, ...
        start: the first such round, from 0.
        fresh: True: each run uses the next batch of the data. False: it uses the round's own batch,
            which all turns share that are not fresh.

    Example:
        loop = (trainload.Turn("discriminator", times=5, fresh=True), trainload.Turn("generator"))
    """

    graph: str
    times: int = 1
    every: int = 1
    start: int = 0
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Asset:
    """A file to include in the package, with options that its path alone does not express.

    Attributes:
        source: its path, or its bytes. The path of a folder includes all files in it.
        media_type: media type of the file, or of each file in the folder: "text/markdown". None:
            derived from the file's name; docs/guides/assets.md has the table.

    Example:
        trainload.Asset(b"free for research", media_type="text/plain")
        trainload.Asset("runs/tokenizer/")
    """

    source: str | os.PathLike[str] | bytes
    media_type: str | None = None


AssetLike = str | os.PathLike[str] | bytes | Asset


@dataclass(frozen=True, slots=True)
class Job:
    """A training job, ready to be frozen.

    Attributes:
        model: the module, with its weights, on any device.
        batch: an example batch, input name -> tensor; or nested dicts, lists, tuples, named tuples
            or dataclasses of tensors, which become inputs with dotted names ("mask.left",
            "pair.0"). Every tensor's leading dim is the batch dim, with 2 rows or more, except as
            declared in `shared` and `dynamic`. None, numbers and strings in it are constants of the
            graphs.
        loss: `loss(model, batch)` -> a 0-dim mean loss, or `Loss`; `batch` is nested as above.
            None: `model(**batch)` returns it.
        optimizer: `optimizer(model)` -> a new `torch.optim.Optimizer` over the model's parameters,
            or several, each over some of them. None: each of `graphs` has its own.
        schedule: `schedule(step)` -> factor on each group's learning rate, for step 0, 1, ...; or a
            `torch.optim.lr_scheduler` factory that receives the optimizer. None: constant.
        predict: `predict(model, batch)` -> the predictions of the trained model. None: no predict
            graph.
        predict_inputs: names of the batch's outermost entries that predict reads. None: all of
            them.
        dynamic: (dotted) input name -> {dim: torch.export.Dim, one derived from it such as 2*dim,
            Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, the size, or None}, or one of these for each dim.
            Dims that are not declared are fixed, except for the leading dim of every input, which
            is dynamic (one dim, named "batch") unless declared as `{0: Dim.STATIC}`. For an input
            whose rows are in another dim, declare that dim: `{"state": {1: Dim("batch")}}`. See
            docs/guides/shapes.md.
        shared: (dotted) names of tensors of the batch that are the same for all rows of every
            batch: class weights, anchors, a mask. The package stores their values, and data sets do
            not contain them. A container's name includes all tensors in it. See
            docs/guides/shapes.md.
        steps: length of the run: optimizer updates, or rounds of the loop if there are `graphs`.
        global_batch: rows of one optimizer update, over all workers and microbatches. None: the
            number of rows of the example.
        clip_norm: maximum global L2 norm of the gradient of the optimized parameters. None: no
            clipping.
        clip_value: maximum absolute value of each element of the gradient. None: no clipping. At
            most one of the two may be set.
        ema: a moving average of the parameters. None: no average.
        loss_scaling: loss scaling for float16 under autocast. None: the loss is not scaled.
        seed: seed of dropout masks and of the order of the data.
        assets: name -> file to include in the package (a tokenizer, a licence, a model card): a
            path, bytes, or an `Asset`. A name may contain folders ("tokenizer/vocab.json"); for a
            folder of files it is the folder's name. See docs/guides/assets.md.
        graphs: several graphs by name, instead of `loss`. The first one that trains is the main
            one: its loss is the run's.
        variants: further example batches by name, each with other entries, constants or shapes than
            `batch`; every graph is captured for each. A run passes a batch to the first variant
            that accepts it, starting with `batch`. See docs/guides/variants.md.
        weight_names: name of a parameter or buffer in the model's `state_dict()` -> its name in
            weights that a launch reads (`weights_from`), as a dict or a function of the name.
            Names that it lacks, and None: they are the same there. See docs/guides/weights.md.
        replays: further batches, each run by the variant that accepts it, on which the freeze
            compares the graphs with eager mode.
        loop: the turns of a round, in order; the name of a graph stands for one run of it. None:
            every graph once, in the order of `graphs`.

    Example:
        job = trainload.Job(
            model,
            {"tokens": torch.zeros(4, 5, dtype=torch.uint8)},
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
            loss=next_token,
            steps=1000,
            global_batch=64,
        )
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
    weight_names: WeightNames | None = None


def check_job(job: Job) -> None:
    """Check the types of the attributes of a job, its graphs and its turns.

    Raises:
        JobError: if an attribute has a wrong type; the message names it.
    """
    check_fields(job, "Job", JobError)
    for name, graph in job.graphs.items():
        check_fields(graph, f"Job.graphs[{name!r}]", JobError)
    for place, turn in enumerate(job.loop or ()):
        if isinstance(turn, Turn):
            check_fields(turn, f"Job.loop[{place}]", JobError)
    factories = {
        "Job": job.optimizer,
        **{f"Job.graphs[{name!r}]": graph.optimizer for name, graph in job.graphs.items()},
    }
    for where, factory in factories.items():
        if isinstance(factory, type):
            raise JobError(
                "a class instead of a function of the model",
                where=f"{where}.optimizer",
                expected=(
                    f"lambda model: {factory.__name__}(model.parameters(), lr=0.1), for example"
                ),
                got=factory.__name__,
            )
