"""Result of a profile: tables of one rank, and their form as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Use of a tensor's memory."""

    PARAMETERS = "parameters"
    """The rank's part of the parameters."""
    GRADIENTS = "gradients"
    """The rank's part of the gradients, as the update receives them."""
    STATE = "optimizer state"
    """Optimizer state, running means of the parameters, and loss scales."""
    ACTIVATIONS = "activations"
    """Values of forward that backward needs."""
    GATHERED = "gathered"
    """Parameters that were gathered from the ranks."""
    PARTIAL = "gradient parts"
    """Gradients of single parameters and of whole buckets, before they are reduced."""
    OTHER = "other"
    """The batch, buffers, and values that are used at once."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Operators, kernels or ranges of one name in the profiled steps.

    Attributes:
        name: name of the operator; "compiled kernels" for what compiled graphs compute on CPUs
            without operators; "step", "graph ...", "update ..." for the rest of these ranges.
        calls: number of calls per step.
        seconds: time per step that was not spent in other operators: on the device, or on a CPU.
    """

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LineTime:
    """Operators of one line of the user's code, in the interpreted graphs.

    Attributes:
        module: path of the user's module; "" for the model itself and the loss.
        line: line of the user's code; "" if it is unknown.
        forward: seconds of its operators in forward.
        backward: the same in backward, with operators of forward that are computed again there.
    """

    module: str
    line: str
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Time in both."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Collectives of one kind in the interpreted graphs.

    Attributes:
        operator: name of the collective.
        calls: number of calls.
        seconds: time in their calls, and waiting for their results.
    """

    operator: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of the tensors of one kind, in bytes.

    Attributes:
        kind: the kind.
        peak: when all tensors together take most.
        most: when those of this kind take most.
        estimate: estimate of the plan; None for kinds that it does not estimate.
    """

    kind: Kind
    peak: int
    most: int
    estimate: int | None


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Memory of the tensors that a module holds or made, when all together take most.

    Attributes:
        module: path of the user's module; "" for the model itself, the loss and the batch.
        kinds: kind -> bytes.
    """

    module: str
    kinds: Mapping[Kind, int]

    @property
    def bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class InterpretedProfile:
    """Times and memory of forward and backward of one turn, interpreted, without the update.

    Attributes:
        lines: time by line of the user's code, the longest first.
        collectives: time by collective.
        memory: memory by kind.
        modules: memory by module, the largest first.
        at: where the peak is: graph, and line or operator.
    """

    lines: tuple[LineTime, ...]
    collectives: tuple[CollectiveTime, ...]
    memory: tuple[MemoryUse, ...]
    modules: tuple[ModuleMemory, ...]
    at: str


@dataclass(frozen=True, slots=True)
class RankProfile:
    """Profile of one rank.

    Attributes:
        rank: the rank.
        host: name of its host.
        device: kind of its device.
        step: number of the first profiled step, from 1.
        steps: number of profiled steps.
        seconds: mean duration of these steps.
        process_bytes: memory of the process after them: the GPU's reserved memory, or resident
            memory.
        operators: operators, kernels and ranges that take the most time, the longest first.
        interpreted: times by line and memory by module; None if they were not requested.
    """

    rank: int
    host: str
    device: str
    step: int
    steps: int
    seconds: float
    process_bytes: int
    operators: tuple[OperatorTime, ...]
    interpreted: InterpretedProfile | None

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def rank_profile_of(found: Mapping[str, Any]) -> RankProfile:
    """Return the profile of a rank from its JSON."""
    interpreted = found["interpreted"]
    fields = dict(found)
    fields["operators"] = tuple(OperatorTime(**each) for each in found["operators"])
    if interpreted is not None:
        fields["interpreted"] = InterpretedProfile(
            lines=tuple(LineTime(**each) for each in interpreted["lines"]),
            collectives=tuple(CollectiveTime(**each) for each in interpreted["collectives"]),
            memory=tuple(
                MemoryUse(**{**each, "kind": Kind(each["kind"])}) for each in interpreted["memory"]
            ),
            modules=tuple(
                ModuleMemory(
                    each["module"], {Kind(kind): size for kind, size in each["kinds"].items()}
                )
                for each in interpreted["modules"]
            ),
            at=interpreted["at"],
        )
    return RankProfile(**fields)
