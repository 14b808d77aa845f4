"""What was seen of real batches: families of one structure, with the sizes that came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainload.capture.guard import FixedValue, fixed_value
from trainload.capture.job.inputs import constants_of, leaves_of, rebuild, structure_of

Shapes = tuple[tuple[int, ...], ...]
"""A shape for each input of a family, in its order."""


@dataclass(frozen=True, slots=True)
class Family:
    """Batches of one structure, with the same constants, and the same inputs of the same dtypes and numbers of dims.

    Attributes:
        inputs: name -> dtype as torch spells it, sorted.
        constants: by dotted name.
        seen: the shapes that came -> how often.
        kept: an example batch of some of these shapes: copies, nested as they were.
        variants: shapes -> the variant that takes them; {} until `Recording.job` has found them.
    """

    inputs: Mapping[str, str]
    constants: Mapping[str, FixedValue]
    seen: dict[Shapes, int] = field(default_factory=dict)
    kept: dict[Shapes, dict[str, Any]] = field(default_factory=dict)
    variants: dict[Shapes, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many batches came."""
        return sum(self.seen.values())

    def varied(self) -> dict[str, tuple[int, ...]]:
        """Input -> the dims, but for the batch dim, that had several sizes. Inputs without any are left out."""
        found = {}
        for place, name in enumerate(self.inputs):
            shapes = [each[place] for each in self.seen]
            dims = tuple(dim for dim in range(1, len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1)
            if dims:
                found[name] = dims
        return found

    def __str__(self) -> str:
        """In one line: count, inputs with the sizes that came, and constants."""
        entries = []
        for place, (name, dtype) in enumerate(self.inputs.items()):
            shapes = [each[place] for each in self.seen]
            dims = [sorted({shape[dim] for shape in shapes}) for dim in range(len(shapes[0]))]
            entries.append(f"{name} {dtype}[{', '.join(_span(sizes) for sizes in dims)}]")
        entries += [f"{name}={value}" for name, value in self.constants.items()]
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{times}, {len(self.seen)} {'shape' if len(self.seen) == 1 else 'shapes'}: {', '.join(entries)}"


def _span(sizes: list[int]) -> str:
    if len(sizes) > 4:
        return f"{sizes[0]}..{sizes[-1]}"
    return "|".join(map(str, sizes))


class Families:
    """Takes batches in, and sorts them.

    Args:
        most_kept: batches of a family of which copies are kept.
    """

    def __init__(self, most_kept: int) -> None:
        self._found: dict[object, Family] = {}
        self._most = most_kept

    def add(self, batch: Mapping[str, Any]) -> None:
        """Notes a batch. Raises: JobError where it holds what no batch of a job can."""
        leaves = leaves_of(batch)
        constants = {name: fixed_value(value) for name, value in constants_of(batch).items()}
        inputs = {name: str(leaf.dtype).removeprefix("torch.") for name, leaf in leaves.items()}
        dims = tuple(leaf.ndim for leaf in leaves.values())
        key = (structure_of(dict(batch)), tuple(inputs.items()), dims, tuple(constants.items()))
        family = self._found.setdefault(key, Family(inputs, constants))
        shapes = tuple(tuple(leaf.shape) for leaf in leaves.values())
        family.seen[shapes] = family.seen.get(shapes, 0) + 1
        if shapes not in family.kept and len(family.kept) < self._most:
            family.kept[shapes] = rebuild(batch, {name: _copied(leaf) for name, leaf in leaves.items()})

    def all(self) -> tuple[Family, ...]:
        """The families, those of which most batches came first."""
        return tuple(sorted(self._found.values(), key=lambda family: -family.count))


def _copied(leaf: Tensor) -> Tensor:
    return leaf.detach().contiguous().clone()
