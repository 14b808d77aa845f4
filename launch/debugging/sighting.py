"""A value that is not finite, where it first appears, and what it was computed from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainload.launching.debugging.tensor_facts import Level, TensorFacts


@dataclass(frozen=True, slots=True)
class Sighting:
    """The first bad value of a call of a graph, as one rank sees it.

    A value is bad if it is not finite, or its magnitude is above the limit of the search.

    Attributes:
        graph: name of the graph within the build.
        call: number of the call among those of the rank in the search.
        microbatch: number of the microbatch of the call in its draw; None if it is unknown.
        position: position of the operator in the graph.
        operator: such as "aten.log.default"; for an input of the graph its role and name.
        module: path of the user's module, such as "blocks.3.attention"; "" for the model itself
            and the loss, and for an update.
        line: line of the user's code, such as "model.py:12: y = x.log()"; "" if unknown.
        part: "forward", "backward", "update", or "input".
        level: rank of the worst value.
        result: the bad value.
        inputs: the tensors that it was computed from.
        rows: numbers of the rows of the data, or of the batch, that have bad elements; () if
            unknown.
        source: name of the data that has these rows.
        from_peers: True if it came from other ranks.
        parameters: parameters whose gradients, or new values, are bad.
    """

    graph: str
    call: int
    microbatch: int | None
    position: int
    operator: str
    module: str
    line: str
    part: str
    level: Level
    result: TensorFacts
    inputs: tuple[TensorFacts, ...]
    rows: tuple[int, ...]
    source: str
    from_peers: bool
    parameters: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {**asdict(self), "level": self.level.name.lower()}
