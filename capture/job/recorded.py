"""Records real batches as families with the same structure, and the sizes that occurred."""

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
    """Batches with the same structure, constants and inputs.

    Each input has the same dtype and number of dims in all of them.

    Attributes:
        inputs: name -> dtype as torch spells it, sorted.
        constants: constants by dotted name.
        seen: shapes that occurred -> number of batches.
        kept: an example batch for some of these shapes: copies, nested like the originals.
        variants: shapes -> the variant that accepts them; {} until `Recording.job` has found them.
    """

    inputs: Mapping[str, str]
    constants: Mapping[str, FixedValue]
    seen: dict[Shapes, int] = field(default_factory=dict)
    kept: dict[Shapes, dict[str, Any]] = field(default_factory=dict)
    variants: dict[Shapes, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of recorded batches."""
        return sum(self.seen.values())

    def varied(self) -> dict[str, tuple[int, ...]]:
        """Return input -> dims that had several sizes.

        The batch dim, and inputs without such dims, are left out.
        """
        dims_by_input = {}
        for place, name in enumerate(self.inputs):
            shapes = [batch_shapes[place] for batch_shapes in self.seen]
            dims = tuple(
                dim for dim in range(1, len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1
            )
            if dims:
                dims_by_input[name] = dims
        return dims_by_input

    def __str__(self) -> str:
        """Return one line: count, inputs with the sizes that occurred, and constants."""
        entries = []
        for place, (name, dtype) in enumerate(self.inputs.items()):
            shapes = [batch_shapes[place] for batch_shapes in self.seen]
            dims = [sorted({shape[dim] for shape in shapes}) for dim in range(len(shapes[0]))]
            entries.append(f"{name} {dtype}[{', '.join(_span(sizes) for sizes in dims)}]")
        entries += [f"{name}={value}" for name, value in self.constants.items()]
        times = "once" if self.count == 1 else f"{self.count} times"
        return (
            f"{times}, {len(self.seen)} {'shape' if len(self.seen) == 1 else 'shapes'}:"
            f" {', '.join(entries)}"
        )


def _span(sizes: list[int]) -> str:
    if len(sizes) > 4:
        return f"{sizes[0]}..{sizes[-1]}"
    return "|".join(map(str, sizes))


class Families:
    """Collects batches and sorts them into families.

    Args:
        most_kept: maximum number of batches of a family that are copied and kept.
    """

    def __init__(self, most_kept: int) -> None:
        self._families: dict[object, Family] = {}
        self._most = most_kept

    def add(self, batch: Mapping[str, Any]) -> None:
        """Record a batch.

        Raises:
            JobError: if it holds something that a job's batch cannot hold.
        """
        leaves = leaves_of(batch)
        constants = {name: fixed_value(value) for name, value in constants_of(batch).items()}
        inputs = {name: str(leaf.dtype).removeprefix("torch.") for name, leaf in leaves.items()}
        dims = tuple(leaf.ndim for leaf in leaves.values())
        key = (structure_of(dict(batch)), tuple(inputs.items()), dims, tuple(constants.items()))
        family = self._families.setdefault(key, Family(inputs, constants))
        shapes = tuple(tuple(leaf.shape) for leaf in leaves.values())
        family.seen[shapes] = family.seen.get(shapes, 0) + 1
        if shapes not in family.kept and len(family.kept) < self._most:
            family.kept[shapes] = rebuild(
                batch, {name: _copy(leaf) for name, leaf in leaves.items()}
            )

    def all(self) -> tuple[Family, ...]:
        """Return the families, the most frequent first."""
        return tuple(sorted(self._families.values(), key=lambda family: -family.count))


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().contiguous().clone()
