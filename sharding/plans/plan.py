"""The plan: the distribution of one package over one cluster, as data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainload.core.arguments import out_of_range
from trainload.core.errors import PlanError
from trainload.sharding.plans.strategies import BatchNorm, Divide, Recompute, Schedule, Strategy

DeviceKind = Literal["cpu", "cuda"]

DATA = "trainload.data"
"""Logical name of the process group of the ranks with different rows: all ranks if there is no
tensor axis.
"""
SHARD = "trainload.shard"
"""Process group of the ranks that share one copy of sharded tensors, if there are several
copies.
"""
REPLICATE = "trainload.replicate"
"""Process group of the ranks that each hold the same part of a copy."""
TENSOR = "trainload.tensor"
"""Process group of the ranks that share the work on the same rows."""
PIPELINE = "trainload.pipeline"
"""Process group of the ranks with the same rows and the same shares, one for each rank of the
pipeline.
"""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Count = Annotated[int, Field(ge=1)]


class Cluster(_Record):
    """Shape of a cluster: `nodes` x `devices_per_node` devices of one kind.

    Example:
        trainload.Cluster(nodes=4, devices_per_node=8, device="cuda")
    """

    nodes: Count = 1
    devices_per_node: Count = 1
    device: DeviceKind = "cpu"

    def __init__(
        self, nodes: int = 1, devices_per_node: int = 1, device: DeviceKind = "cpu", **unknown: Any
    ) -> None:
        """Validate the shape.

        Raises:
            PlanError: a number is not a positive integer, the device is unknown, or a field is
                unknown.
        """
        try:
            super().__init__(
                **{
                    "nodes": nodes,
                    "devices_per_node": devices_per_node,
                    "device": device,
                    **unknown,
                }
            )
        except ValidationError as error:
            raise out_of_range(error, PlanError, "Cluster") from error

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node


class Shard(_Record):
    """Division of a parameter among the ranks of the tensor axis.

    Its dim `dim`, of n elements, consists of `blocks` blocks of `ranks` shares each; a rank has its
    share of every block. A fused projection of query, key and value has three blocks.
    """

    dim: int = Field(ge=0)
    blocks: int = Field(default=1, ge=1)

    def divides(self, shape: Sequence[int], ranks: int) -> bool:
        """Return True if a parameter of this shape has equal shares for this number of ranks."""
        return self.dim < len(shape) and shape[self.dim] % (self.blocks * ranks) == 0

    def share_shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Return the shape of one rank's share of a parameter."""
        return tuple(size // ranks if at == self.dim else size for at, size in enumerate(shape))

    def whole_shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Return the shape of a parameter from that of one share."""
        return tuple(size * ranks if at == self.dim else size for at, size in enumerate(shape))

    def __str__(self) -> str:
        return f"dim {self.dim}" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")


class Slot(_Record):
    """Place of one parameter in its bucket, in elements: [offset, offset + length)."""

    parameter: str
    offset: int = Field(ge=0)
    length: int = Field(ge=0)
    shape: tuple[int, ...]


class Bucket(_Record):
    """Parameters that are stored, communicated and updated together, as one flat tensor.

    Laws: slots are in order and do not overlap; `length` is a multiple of the world size and not
    smaller than the end of the last slot; if s ranks shard it, rank r owns [r * length / s, (r + 1)
    * length / s). All parameters of a bucket have one dtype and are in the same parameter groups:
    none if they are frozen, one, or several if several graphs train them with optimizers of their
    own. Either all are divided by the tensor axis (`divided`; a slot is then one rank's share), or
    all are whole on each of its ranks.

    `whole` lists the groups whose update needs whole parameters. Storage and communication are as
    in other buckets, but for such an update every rank gathers the bucket's parameters, gradients
    and sharded state, updates all of them, and keeps its own part. `stages` lists the pipeline
    stages that use its parameters, in order, the same for all of them; () without a pipeline.
    """

    name: str
    dtype: str
    groups: tuple[str, ...]
    length: int = Field(ge=0)
    slots: tuple[Slot, ...]
    whole: tuple[str, ...] = ()
    divided: bool = False
    stages: tuple[int, ...] = ()

    def group_among(self, groups: Collection[str]) -> str | None:
        """Return the one of its groups that is in `groups` (those of one graph), or None."""
        return next((group for group in self.groups if group in groups), None)

    def entry(self, group: str, name: str) -> str:
        """Return the name under which a run stores a state entry of one of its groups."""
        return name if len(self.groups) == 1 else f"{group}.{name}"


class Pipeline(_Record):
    """Division of a step among the `ranks` ranks of a pipeline: each has one or several stages of
    the graph, and a microbatch passes through all of them.

    Laws: `order` has the actions of each rank in order, in torch's notation: stage, F (forward), B
    (backward) or I and W (its two parts), microbatch. Every stage does all of its work on each of
    the plan's `accumulate` microbatches exactly once, and the ranks do not deadlock
    (sharding/pipeline/stage_schedule.py).

    Attributes:
        schedule: schedule that the order comes from; with `stage_ranks` it adds nothing to `order`.
        stage_ranks: stage -> its rank.
        order: rank -> its actions.
        buffers: buffer whose update depends on parameters -> its stage. Other buffers are on all
            stages.
    """

    ranks: int = Field(ge=2)
    schedule: Schedule
    stage_ranks: tuple[int, ...]
    order: tuple[tuple[str, ...], ...]
    buffers: dict[str, int] = {}

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if set(self.stage_ranks) != set(range(self.ranks)) or len(self.order) != self.ranks:
            raise ValueError(
                f"stage_ranks and order do not assign stages and actions to each of {self.ranks}"
                " ranks"
            )
        unknown = [
            name for name, stage in self.buffers.items() if not 0 <= stage < len(self.stage_ranks)
        ]
        if unknown:
            raise ValueError(f"buffer {unknown[0]} is on an unknown stage")
        return self


class Estimate(_Record):
    """Bytes for one rank; if the ranks of a pipeline differ, the maximum."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    """Maximum number of bytes of full parameters that exist at one time beside the rank's own
    shards. An update of whole parameters adds gradients and state.
    """
    communication_bytes_per_step: int
    """Bytes that one rank sends for one optimizer update, with ring algorithms."""


NO_ESTIMATE = Estimate(
    parameter_bytes=0,
    gradient_bytes=0,
    optimizer_bytes=0,
    gathered_bytes=0,
    communication_bytes_per_step=0,
)
"""Estimate of a plan that was not estimated."""


class Replicated(_Record):
    """Work that every rank of the tensor axis repeats: the nodes of one operator in the main
    training graph that run on whole tensors.

    In the example batch: `operations` of matrix products, `bytes` read and written.
    """

    operator: str
    nodes: int
    operations: float
    bytes: float


class Plan(_Record):
    """Distribution of a package's training over a cluster. It is made once, on the driver; ranks
    decide nothing.

    The data axis is distributed by `strategy`: "single", one device; "zero0", data parallel with
    all-reduced gradients; "zero1", optimizer state sharded, gradients reduce-scattered once a step,
    updated parameters gathered; "zero2", gradients sharded too, reduce-scattered after each
    microbatch; "zero3", parameters sharded too, gathered once for forward and once for backward;
    "hybrid", as zero3 among `shard_ranks` neighbours and replicated across such groups.

    On the tensor axis, each group of `tensor_ranks` neighbours works on the same rows, each rank on
    its shares of the parameters in `tensor_shards`. `divide` is what else they share: "tensor",
    nothing; "sequence", also the positions where no parameter's division applies; "context",
    positions only; "expert", the experts, and positions elsewhere if the graph has any.
    `replicated` is the work that each of them repeats. On the pipeline axis, the ranks of a
    `pipeline` work on the same rows one after the other, each on its stages of the graph.

    `batch_norm`: "averaged", each rank normalises by its own rows, and buffers that forward updates
    are averaged over the ranks after each call; "broadcast", the same, but the buffers are those of
    the first rank; "synchronised", each rank normalises by the rows of all ranks.

    `recompute` says which forward values are recomputed for backward: "job", those in the model's
    own checkpoints; "selective", all except results of matrix products, convolutions, attention and
    collectives, and values that cross from one segment of the graph to the next; "full", all except
    values that cross segments.

    `loss_chunks`: number of parts of a call's rows in which the logits, the loss and their
    gradients are computed, one after the other, so that the logits of all rows never exist; 1 for
    all rows at once.

    `offload`: fraction of the parts of forward, evenly spread, whose values kept for backward are
    in the host's memory meanwhile (sharding/rewriting/offload.py). Not with a pipeline.

    Laws: every parameter that is not an alias is in exactly one bucket; global_batch = data_ranks *
    accumulate * rows of one call; `shard_ranks` divides data_ranks and is set only for "hybrid";
    rank = (pipeline index * data_ranks + data index) * tensor_ranks + tensor index.

    Example:
        plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero1")
        print(plan.world_size, plan.global_batch, len(plan.buckets))
    """

    version: int = 1
    package: str
    """Digest of the package: the sha256 of its manifest, in hex."""
    cluster: Cluster
    strategy: Strategy
    shard_ranks: int | None = Field(default=None, ge=1)
    """Number of adjacent ranks of the data axis that share one copy: those of a node, since its
    devices have the fastest links.
    """
    tensor_ranks: int = Field(default=1, ge=1)
    tensor_shards: dict[str, Shard] = {}
    divide: Divide = "tensor"
    replicated: tuple[Replicated, ...] = ()
    pipeline: Pipeline | None = None
    batch_norm: BatchNorm = "averaged"
    recompute: Recompute = "job"
    loss_chunks: int = Field(default=1, ge=1)
    offload: float = Field(default=0.0, ge=0, le=1)
    global_batch: int = Field(ge=1)
    accumulate: int = Field(default=1, ge=1)
    prefetch: int = Field(default=1, ge=0)
    """Number of buckets by which a bucket's gather precedes its use."""
    buckets: tuple[Bucket, ...]
    estimate: Estimate

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    @model_validator(mode="after")
    def _check_degrees(self) -> Self:
        if (self.strategy == "hybrid") != (self.shard_ranks is not None):
            raise ValueError("shard_ranks must be set with the strategy hybrid, and with no other")
        if self.world_size % self.tensor_ranks:
            raise ValueError(
                f"tensor_ranks is {self.tensor_ranks}, which does not divide the cluster's"
                f" {self.world_size} devices"
            )
        if self.world_size // self.tensor_ranks % self.pipeline_ranks:
            raise ValueError(
                f"the pipeline has {self.pipeline_ranks} ranks, which do not divide the other"
                f" {self.world_size // self.tensor_ranks}"
            )
        stages = range(0 if self.pipeline is None else len(self.pipeline.stage_ranks))
        for bucket in self.buckets:
            if not set(bucket.stages) <= set(stages) or bool(bucket.stages) != bool(stages):
                raise ValueError(
                    f"{bucket.name} is on stages {bucket.stages}, but the plan has"
                    f" {list(stages) or 'none'}"
                )
        if self.shard_ranks == 1 < self.data_ranks:
            raise ValueError(
                "shard_ranks is 1, so every rank would hold everything: use the strategy zero0"
            )
        if self.shard_ranks is not None and self.data_ranks % self.shard_ranks:
            raise ValueError(
                f"shard_ranks is {self.shard_ranks}, which does not divide the {self.data_ranks}"
                " ranks of the data axis"
            )
        if self.strategy == "single" and self.data_ranks > 1:
            raise ValueError(
                f"the strategy is single, but the data axis has {self.data_ranks} ranks"
            )
        if self.offload and self.pipeline is not None:
            raise ValueError("offload is set, but the plan has a pipeline")
        if self.tensor_ranks == 1 and self.tensor_shards:
            raise ValueError("tensor_shards divides parameters, but tensor_ranks is 1")
        if self.tensor_ranks == 1 and self.divide != "tensor":
            raise ValueError(f"divide is {self.divide}, but tensor_ranks is 1")
        if self.divide == "context" and self.tensor_shards:
            raise ValueError(
                "divide is context, which divides no parameters, but there are tensor_shards"
            )
        return self

    @property
    def data_ranks(self) -> int:
        """Number of ranks (or of groups of ranks of the other axes) with different rows."""
        return self.world_size // (self.tensor_ranks * self.pipeline_ranks)

    @property
    def pipeline_ranks(self) -> int:
        """Number of ranks that a microbatch passes through."""
        return 1 if self.pipeline is None else self.pipeline.ranks

    def data_index(self, rank: int) -> int:
        """Return a rank's index on the data axis."""
        return rank // self.tensor_ranks % self.data_ranks

    def pipeline_index(self, rank: int) -> int:
        """Return a rank's index on the pipeline axis."""
        return rank // (self.tensor_ranks * self.data_ranks)

    def tensor_index(self, rank: int) -> int:
        """Return a rank's index on the tensor axis."""
        return rank % self.tensor_ranks

    def holders(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the pipeline ranks that hold a bucket, in order."""
        return (
            (0,)
            if self.pipeline is None
            else tuple(sorted({self.pipeline.stage_ranks[stage] for stage in bucket.stages}))
        )

    def held_buckets(self, pipeline_index: int) -> tuple[Bucket, ...]:
        """Return the buckets that a pipeline rank holds."""
        return tuple(bucket for bucket in self.buckets if pipeline_index in self.holders(bucket))

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of a slot's whole parameter."""
        shard = self.tensor_shards.get(slot.parameter)
        return slot.shape if shard is None else shard.whole_shape(slot.shape, self.tensor_ranks)

    # Sharding on the data axis

    @property
    def shards_state(self) -> bool:
        """True if a rank keeps and updates only its share of the optimizer's state."""
        return self.strategy in ("zero1", "zero2", "zero3", "hybrid")

    @property
    def shards_gradients(self) -> bool:
        """True if a rank keeps only its share of a gradient between microbatches."""
        return self.strategy in ("zero2", "zero3", "hybrid")

    @property
    def shards_parameters(self) -> bool:
        """True if a rank stores only its share of the parameters."""
        return self.strategy in ("zero3", "hybrid")

    @property
    def shard_degree(self) -> int:
        """Number of ranks of the data axis that share one copy of sharded tensors."""
        if self.shard_ranks is not None:
            return self.shard_ranks
        return self.data_ranks if self.shards_state else 1

    @property
    def replicas(self) -> int:
        """Number of copies of sharded tensors."""
        return self.data_ranks // self.shard_degree

    @property
    def shard_group(self) -> str:
        """Name of the process group that shares one copy."""
        return DATA if self.replicas == 1 else SHARD

    def shard_index(self, rank: int) -> int:
        """Return the index of the share that a rank holds of its copy."""
        return self.data_index(rank) % self.shard_degree

    def part_index(self, rank: int) -> int:
        """Return which of `data_ranks` equal parts of its buckets a rank writes. It holds that part
        under every strategy.
        """
        return self.shard_index(rank) * self.replicas + self.data_index(rank) // self.shard_degree

    def file_index(self, rank: int) -> int:
        """Return the index of a rank's checkpoint file: ordered by pipeline rank, then by part,
        then by tensor rank.
        """
        lane = self.pipeline_index(rank) * self.data_ranks + self.part_index(rank)
        return lane * self.tensor_ranks + self.tensor_index(rank)

    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the process groups that the plan's graphs use: name -> the groups of ranks of that
        name, all of the same size.
        """
        pipeline, data, tensor = (
            range(self.pipeline_ranks),
            range(self.data_ranks),
            range(self.tensor_ranks),
        )
        groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        lanes = [tuple(self._rank(p, d, t) for d in data) for p in pipeline for t in tensor]
        if len(data) > 1 or self.world_size == 1:
            groups[DATA] = tuple(lanes)
        if self.replicas > 1 and self.shard_degree > 1:
            degree = self.shard_degree
            groups[SHARD] = tuple(
                lane[i : i + degree] for lane in lanes for i in range(0, len(lane), degree)
            )
            groups[REPLICATE] = tuple(lane[i::degree] for lane in lanes for i in range(degree))
        if len(tensor) > 1:
            groups[TENSOR] = tuple(
                tuple(self._rank(p, d, t) for t in tensor) for p in pipeline for d in data
            )
        if len(pipeline) > 1:
            groups[PIPELINE] = tuple(
                tuple(self._rank(p, d, t) for p in pipeline) for d in data for t in tensor
            )
        for holders in sorted(
            {self.holders(bucket) for bucket in self.buckets} if len(pipeline) > 1 else ()
        ):
            if len(holders) > 1:
                groups[shared_group(holders)] = tuple(
                    tuple(self._rank(p, d, t) for p in holders) for d in data for t in tensor
                )
        return groups

    def _rank(self, pipeline: int, data: int, tensor: int) -> int:
        return (pipeline * self.data_ranks + data) * self.tensor_ranks + tensor

    @property
    def rows_per_call(self) -> int:
        """Number of rows of the batch that one rank of the data axis receives for one
        microbatch.
        """
        return self.global_batch // (self.data_ranks * self.accumulate)


def shared_group(holders: Sequence[int]) -> str:
    """Return the logical name of the process groups of ranks that hold the same bucket, one rank
    for each of these pipeline ranks.
    """
    return f"trainload.shared.{'.'.join(map(str, holders))}"


def read_plan(path: Path) -> Plan:
    """Read a plan that `trainload plan` wrote and that may have been edited since.

    Raises:
        PlanError: the file does not exist or is malformed.
    """
    if not path.is_file():
        raise PlanError(
            "there is no such plan", where=str(path), hint="Create one: trainload plan PKG -o FILE."
        )
    try:
        return Plan.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PlanError(f"this is not a plan: {place}: {first['msg']}", where=str(path)) from error
