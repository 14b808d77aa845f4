"""Numeric differences between the tensors of two packages, read in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from trainload.core.work_steps import ByteStep
from trainload.packaging.format.package_paths import CONSTANTS
from trainload.packaging.package import Package

BLOCK = 2**20
"""Maximum number of elements of each of the two tensors in memory at once."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The change of a tensor.

    Attributes:
        name: name of the parameter or buffer; for a constant, "constant " and its name.
        dtype, shape: dtype and shape of both tensors.
        elements: number of elements.
        changed: number of elements with different bits.
        greatest: greatest absolute difference of two finite elements, in float64.
        relative: L2 norm of the differences divided by that of the old values, over finite
            elements; None if all old values were 0 and some changed.
        not_finite: number of NaN or infinite elements before and after.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    greatest: float
    relative: float | None
    not_finite: tuple[int, int]

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key, greatest change first: by new non-finite elements, then by the greatest
        absolute difference.

        A relative difference would put first all tensors that began at 0, as most biases do.
        """
        return self.not_finite[0] - self.not_finite[1], -self.greatest


def weight_differences(before: Package, after: Package) -> tuple[TensorDifference, ...]:
    """Return the changed parameters, buffers and constants, greatest change first.

    Tensors are compared if both packages have them with the same dtype and shape. Those with equal
    digests are not read.

    Raises:
        IntegrityError: bytes are damaged.
        PackageError: a package is abstract.
    """
    differences: list[TensorDifference] = []
    a = before.stored_weights
    names = list(_to_compare(before, after))
    read = ByteStep("comparing weights", sum(map(a.nbytes, names)))
    for name in names:
        difference = tensor_difference(
            name, a.dtype(name), a.shape(name), _blocks(before, after, name)
        )
        read.add(a.nbytes(name))
        if difference.changed:
            differences.append(difference)
    if before.manifest.files.get(CONSTANTS) != after.manifest.files.get(CONSTANTS):
        differences += _constants(before, after)
    return tuple(sorted(differences, key=lambda difference: (difference.rank, difference.name)))


def _to_compare(before: Package, after: Package) -> Iterator[str]:
    """Yield the names of tensors of one kind in both packages whose bytes may differ."""
    a, b = before.stored_weights, after.stored_weights
    for name in a.names():
        if name not in b or (a.dtype(name), a.shape(name)) != (b.dtype(name), b.shape(name)):
            continue
        same_file = (
            before.manifest.files[a.file(name)].sha256 == after.manifest.files[b.file(name)].sha256
        )
        if not same_file and a.digests(name) != b.digests(name):
            yield name


def _blocks(
    before: Package, after: Package, name: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    count = math.prod(before.weights.shape(name))
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        yield before.weights.slice(name, start, stop), after.weights.slice(name, start, stop)


def _constants(before: Package, after: Package) -> Iterator[TensorDifference]:
    a, b = before.all_constants(), after.all_constants()
    for name in sorted(a.keys() & b.keys()):
        if (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape):
            pair = (a[name].reshape(-1), b[name].reshape(-1))
            difference = tensor_difference(
                f"constant {name}", a[name].dtype, tuple(a[name].shape), [pair]
            )
            if difference.changed:
                yield difference


def tensor_difference(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    blocks: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> TensorDifference:
    """Return the difference of two tensors, given as pairs of blocks of the same elements, each of
    shape (n,).
    """
    changed = 0
    greatest = squares = reference = 0.0
    non_finite = [0, 0]
    for before, after in blocks:
        size = before.element_size()
        bits = before.view(torch.uint8).reshape(-1, size) != after.view(torch.uint8).reshape(
            -1, size
        )
        changed += int(bits.any(1).sum())
        a, b = _numbers(before), _numbers(after)
        finite = (a.isfinite() & b.isfinite()).all(1)
        non_finite[0] += int((~a.isfinite()).any(1).sum())
        non_finite[1] += int((~b.isfinite()).any(1).sum())
        squared_distances = (a[finite] - b[finite]).square().sum(1)
        greatest = max(
            greatest,
            math.sqrt(float(squared_distances.max())) if squared_distances.numel() else 0.0,
        )
        squares += float(squared_distances.sum())
        reference += float(a[finite].square().sum())
    relative = math.sqrt(squares / reference) if reference else None if squares else 0.0
    dtype_name = str(dtype).removeprefix("torch.")
    return TensorDifference(
        name,
        dtype_name,
        shape,
        math.prod(shape),
        changed,
        greatest,
        relative,
        (non_finite[0], non_finite[1]),
    )


def _numbers(block: torch.Tensor) -> torch.Tensor:
    """Convert a block to float64: (n, 1), or (n, 2) for complex numbers."""
    if block.dtype.is_complex:
        return torch.view_as_real(block).double()
    return block.double().reshape(-1, 1)
