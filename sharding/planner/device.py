"""Performance figures of devices and their links: files, some included in trainload, others written
by `trainload measure`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainload.core.canonical_json import parse_json
from trainload.core.errors import PlanError
from trainload.core.suggestions import did_you_mean
from trainload.sharding.plans.plan import DeviceKind

FOLDER = Path(__file__).parent / "devices"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(_Record):
    """A connection between devices.

    `seconds`: latency until the first byte arrives; `bytes_per_second`: bandwidth of one device in
    one direction, as collectives achieve it.
    """

    seconds: float = Field(ge=0)
    bytes_per_second: float = Field(gt=0)


class Measured(_Record):
    """A measured collective: `operator` of `bytes` on `ranks` ranks."""

    operator: str
    ranks: int
    bytes: int
    seconds: float


class GpuArchitecture(_Record):
    """Properties of an NVIDIA GPU that compiled kernels depend on, from CUDA's tables.

    `threads` and `shared_memory` (bytes) are those of a multiprocessor.
    """

    capability: str = Field(pattern=r"^[1-9][0-9]?\.[0-9]$")
    multiprocessors: int = Field(gt=0)
    threads: int = Field(gt=0)
    shared_memory: int = Field(gt=0)
    l2_bytes: int = Field(gt=0)


class DeviceProfile(_Record):
    """A kind of device. All figures are what programs achieve, not data sheet values; `source` says
    where they come from.
    """

    name: str
    kind: DeviceKind
    source: str
    memory_bytes: int = Field(gt=0)
    reserved_bytes: int = Field(default=0, ge=0)
    """Memory of a process before it holds a tensor, and what its allocator cannot use: libraries,
    their buffers, fragmentation.
    """
    architecture: GpuArchitecture | None = None
    """Architecture for which `trainload build --device` compiles graphs on a machine without this
    GPU; None for devices that cannot be described.
    """
    product_names: tuple[str, ...] = ()
    """Words of the product name that the driver reports ("H100" of "NVIDIA H100 80GB HBM3")."""
    peak_flops: dict[str, float] = Field(default_factory=dict)
    """dtype -> operations per second of dense products from the data sheet, without sparsity or
    TF32: 100 % of model FLOPs utilisation.
    """
    flops: dict[str, float] = Field(min_length=1)
    """dtype -> operations per second of large matrix products.

    A missing dtype counts as float32.
    """
    attention: float = Field(default=1.0, gt=0)
    """Fraction of `flops` that fused attention achieves."""
    memory_bytes_per_second: float = Field(gt=0)
    """Bandwidth of operators on large tensors, reads and writes together."""
    kernel_seconds: float = Field(default=0.0, ge=0)
    """Overhead of each kernel."""
    node: Link
    """Link between the devices of a node."""
    network: Link
    """Link between nodes, for each device."""
    host: Link | None = None
    """Link to the host's memory, for each device in each direction; None for devices that have no
    memory of their own.
    """
    collectives: tuple[Measured, ...] = ()
    """Measurements from which the figures of `node` were derived, if any."""

    def rate(self, dtype: str) -> float:
        """Return the operations per second of matrix products in a dtype."""
        return self.flops.get(dtype) or self.flops.get("float32") or min(self.flops.values())


def names() -> list[str]:
    """Return the names of the devices whose figures are included in trainload."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name: str) -> DeviceProfile:
    """Read the profile of a device.

    Args:
        name: one of `names()`, or the path of a file.

    Raises:
        PlanError: the file does not exist or does not contain a profile.
    """
    path = FOLDER / f"{name}.json" if name in names() else Path(name)
    if not path.is_file():
        raise PlanError(
            "there is no such device",
            where="device",
            expected=f"one of {', '.join(names())}, or a file that `trainload measure` wrote",
            got=name,
            hint=did_you_mean(name, names()),
        )
    try:
        return DeviceProfile.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except (ValidationError, ValueError) as error:
        raise PlanError(
            "this is not a device profile",
            where=str(path),
            expected="the format in docs/guides/planner.md",
            got=str(error).replace("\n", "; "),
            hint="Create one with `trainload measure`.",
        ) from error


@functools.cache
def profile_of_product(product: str) -> DeviceProfile | None:
    """Return the profile of a device by its product name, or None if trainload includes none.

    Args:
        product: name from `torch.cuda.get_device_name`, such as "NVIDIA H100 80GB HBM3".
    """
    profiles = [(word, profile) for profile in map(read, names()) for word in profile.product_names]
    matching = [
        (word, profile)
        for word, profile in profiles
        if re.search(rf"\b{re.escape(word)}\b", product)
    ]
    return max(matching, key=lambda match: len(match[0]))[1] if matching else None


@dataclass(frozen=True, slots=True)
class Span:
    """Distribution of a process group over nodes: its `ranks`, and the number of them `on_node`."""

    ranks: int
    on_node: int


def span_of(groups: Sequence[Sequence[int]], devices_per_node: int) -> Span:
    """Return the span of the process groups of one name: that of the group with the fewest ranks on
    a node.
    """
    spread = [len({rank // devices_per_node for rank in group}) for group in groups]
    ranks = len(groups[0])
    return Span(ranks, max(1, ranks // max(spread)))


def seconds_of(operator: str, size: float, span: Span, device: DeviceProfile) -> float:
    """Return the seconds of a collective, for a ring that crosses the slowest link.

    Args:
        operator: "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast" or
            "send".
        size: bytes of the whole tensor: a gather's result, a scatter's or a reduction's operand.
        span: span of its group.
        device: the devices.
    """
    if span.ranks == 1:
        return 0.0
    inside = span.on_node == span.ranks
    link = device.node if inside else device.network
    # Each of the ranks of one group on a node sends through its own network link.
    speed = (
        link.bytes_per_second
        if inside
        else min(device.node.bytes_per_second, link.bytes_per_second * span.on_node)
    )
    rounds = {"all_reduce": 2, "send": 0}.get(operator, 1)
    if rounds == 0:
        return link.seconds + size / speed
    hops = (span.ranks - 1) if inside else (span.ranks // span.on_node - 1) + (span.on_node - 1)
    return rounds * (
        min(hops, 2 * span.ranks.bit_length()) * link.seconds
        + size * (span.ranks - 1) / span.ranks / speed
    )
