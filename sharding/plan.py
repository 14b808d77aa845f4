"""The plan: how one package is spread over one cluster, as data."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainload.sharding.strategies import Strategy

DeviceKind = Literal["cpu", "cuda"]

DATA = "trainload.data"
"""Logical name of the process group of all ranks."""
SHARD = "trainload.shard"
"""Of the ranks that share one copy of what is sharded, where there are several copies."""
REPLICATE = "trainload.replicate"
"""Of the ranks that hold the same part of a copy each."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cluster(_Record):
    """The shape of a cluster: `nodes` x `devices_per_node` devices of one kind."""

    nodes: int = Field(default=1, ge=1)
    devices_per_node: int = Field(default=1, ge=1)
    device: DeviceKind = "cpu"

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node


class Slot(_Record):
    """Where one parameter lies in its bucket, in elements: [offset, offset + length)."""

    parameter: str
    offset: int = Field(ge=0)
    length: int = Field(ge=0)
    shape: tuple[int, ...]


class Bucket(_Record):
    """Parameters that are stored, communicated and updated together, as one flat tensor.

    Laws: slots are in order and do not overlap; `length` is a multiple of the world size and no smaller than the end of the last slot;
    of what is sharded among s ranks, number r owns [r * length / s, (r + 1) * length / s). All parameters of a bucket have one dtype and
    are in the same parameter groups: none where they are frozen, one, or several where several graphs train them with optimizers of their
    own.

    `whole`: those of the groups whose update takes whole parameters. What is stored and communicated is as in other buckets; but for such
    an update every rank gathers the bucket's parameters, gradients and sharded state, updates all of them, and keeps its own part.
    """

    name: str
    dtype: str
    groups: tuple[str, ...]
    length: int = Field(ge=0)
    slots: tuple[Slot, ...]
    whole: tuple[str, ...] = ()

    def group_among(self, groups: Collection[str]) -> str | None:
        """The one of its groups that is among these: a graph's; None where there is none."""
        return next((group for group in self.groups if group in groups), None)

    def entry(self, group: str, name: str) -> str:
        """The name under which a run keeps an entry of the state of one of its groups."""
        return name if len(self.groups) == 1 else f"{group}.{name}"


class Estimate(_Record):
    """Bytes for one rank."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    """The greatest number of bytes of full parameters (for an update of whole parameters: of gradients and state too) that exist at one
    time beside the rank's own shards."""
    communication_bytes_per_step: int
    """Sent by one rank for one optimizer update, by ring algorithms."""


class Plan(_Record):
    """How a package trains on a cluster. Made once, on the driver; ranks decide nothing.

    strategy: "single" one device; "zero0" data parallel, gradients all-reduced; "zero1" optimizer state sharded, gradients
    reduce-scattered once a step, updated parameters gathered; "zero2" gradients sharded too, reduce-scattered after each microbatch;
    "zero3" parameters sharded too, gathered once for forward and once for backward; "hybrid" as zero3 among `shard_ranks` neighbours, and
    replicated beyond them.

    Laws: the buckets hold every parameter that is not an alias exactly once; global_batch = world_size * accumulate * rows of one call;
    `shard_ranks` divides the world size and is given for "hybrid" alone.
    """

    version: int = 1
    package: str
    """The package's digest: the sha256 of its manifest, in hex."""
    cluster: Cluster
    strategy: Strategy
    shard_ranks: int | None = Field(default=None, ge=1)
    """How many ranks, neighbours, share one copy: a node's, since its devices have the fastest links."""
    global_batch: int = Field(ge=1)
    accumulate: int = Field(default=1, ge=1)
    prefetch: int = Field(default=1, ge=0)
    """How many buckets ahead of its use a bucket's gather starts."""
    buckets: tuple[Bucket, ...]
    estimate: Estimate

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    @model_validator(mode="after")
    def _check_degrees(self) -> Self:
        if (self.strategy == "hybrid") != (self.shard_ranks is not None):
            raise ValueError("shard_ranks goes with the strategy hybrid, and with no other")
        if self.shard_ranks == 1 < self.world_size:
            raise ValueError("shard_ranks is 1, so that every rank would hold everything: that is the strategy zero0")
        if self.shard_ranks is not None and self.world_size % self.shard_ranks:
            raise ValueError(f"shard_ranks is {self.shard_ranks}, which does not divide the cluster's {self.world_size} devices")
        return self

    # What is sharded, and among whom

    @property
    def shards_state(self) -> bool:
        """Whether a rank keeps and updates only its share of the optimizer's state."""
        return self.strategy in ("zero1", "zero2", "zero3", "hybrid")

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps only its share of a gradient between microbatches."""
        return self.strategy in ("zero2", "zero3", "hybrid")

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank stores only its share of the parameters."""
        return self.strategy in ("zero3", "hybrid")

    @property
    def shard_degree(self) -> int:
        """How many ranks share one copy of what is sharded."""
        if self.shard_ranks is not None:
            return self.shard_ranks
        return self.world_size if self.shards_state else 1

    @property
    def replicas(self) -> int:
        """How many copies there are of what is sharded."""
        return self.world_size // self.shard_degree

    @property
    def shard_group(self) -> str:
        """The name of the process group that shares one copy."""
        return DATA if self.replicas == 1 else SHARD

    def shard_index(self, rank: int) -> int:
        """Which share of its copy a rank holds."""
        return rank % self.shard_degree

    def part_index(self, rank: int) -> int:
        """Which of `world_size` equal parts of every bucket is a rank's to write: one that it holds, under whatever strategy."""
        return self.shard_index(rank) * self.replicas + rank // self.shard_degree

    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The process groups that the plan's graphs name: for each, how it divides the ranks. All its parts are equally large."""
        ranks = range(self.world_size)
        found: dict[str, tuple[tuple[int, ...], ...]] = {DATA: (tuple(ranks),)}
        if self.replicas > 1 and self.shard_degree > 1:
            found[SHARD] = tuple(tuple(ranks[i : i + self.shard_degree]) for i in range(0, self.world_size, self.shard_degree))
            found[REPLICATE] = tuple(tuple(ranks[i :: self.shard_degree]) for i in range(self.shard_degree))
        return found

    @property
    def rows_per_call(self) -> int:
        """Rows of the batch that one rank is given for one microbatch."""
        return self.global_batch // (self.world_size * self.accumulate)
