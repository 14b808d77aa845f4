"""The plan: how one package is spread over one cluster, as data."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Strategy = Literal["single", "zero0", "zero1", "zero3"]
DeviceKind = Literal["cpu", "cuda"]


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
    rank r of w owns [r * length / w, (r + 1) * length / w). All parameters of a bucket have one dtype and are in the same parameter groups:
    none where they are frozen, one, or several where several graphs train them with optimizers of their own.

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
    reduce-scattered, updated parameters gathered; "zero3" parameters sharded too, gathered once for forward and once for backward.

    Laws: the buckets hold every parameter that is not an alias exactly once; global_batch = world_size * accumulate * rows of one call.
    """

    version: int = 1
    package: str
    """The package's digest: the sha256 of its manifest, in hex."""
    cluster: Cluster
    strategy: Strategy
    global_batch: int = Field(ge=1)
    accumulate: int = Field(default=1, ge=1)
    prefetch: int = Field(default=1, ge=0)
    """How many buckets ahead of its use a bucket's gather starts."""
    buckets: tuple[Bucket, ...]
    estimate: Estimate

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    @property
    def rows_per_call(self) -> int:
        """Rows of the batch that one rank is given for one microbatch."""
        return self.global_batch // (self.world_size * self.accumulate)
