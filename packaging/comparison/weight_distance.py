"""How far the tensors of two packages are apart, read in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from trainload.packaging.format.manifest import CONSTANTS
from trainload.packaging.package import Package

BLOCK = 2**20
"""Elements of each of the two tensors that are in memory at once."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How a tensor changed.

    Attributes:
        name: of the parameter or buffer; of a constant, "constant " and its name.
        dtype, shape: of both.
        elements: how many it has.
        changed: how many have other bits.
        greatest: the greatest absolute difference of two finite elements, in float64.
        relative: the root of the sum of squared differences over that of squares before, of finite elements; None: they were all 0.
        not_finite: how many elements were NaN or infinite before, and are.
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
        """Greatest change first: what is no longer finite, then the greatest difference of an element. A relative one would put first
        whatever began at 0, as most biases do.
        """
        return self.not_finite[0] - self.not_finite[1], -self.greatest


def weight_differences(before: Package, after: Package) -> tuple[TensorDifference, ...]:
    """Every parameter, buffer and constant that both packages have, in one dtype and shape, with other values; the greatest change first.

    What has the same digests is not read.

    Raises:
        IntegrityError: bytes are damaged.
        PackageError: a package is abstract.
    """
    found: list[TensorDifference] = []
    a, b = before.weights, after.weights
    for name in a.names():
        if name not in b or (a.dtype(name), a.shape(name)) != (b.dtype(name), b.shape(name)):
            continue
        same_file = before.manifest.files[a.file(name)].sha256 == after.manifest.files[b.file(name)].sha256
        if same_file or a.digests(name) == b.digests(name):
            continue
        difference = tensor_difference(name, a.dtype(name), a.shape(name), _blocks(before, after, name))
        if difference.changed:
            found.append(difference)
    if before.manifest.files.get(CONSTANTS) != after.manifest.files.get(CONSTANTS):
        found += _constants(before, after)
    return tuple(sorted(found, key=lambda difference: (difference.rank, difference.name)))


def _blocks(before: Package, after: Package, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    count = math.prod(before.weights.shape(name))
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        yield before.weights.slice(name, start, stop), after.weights.slice(name, start, stop)


def _constants(before: Package, after: Package) -> Iterator[TensorDifference]:
    a, b = before.all_constants(), after.all_constants()
    for name in sorted(a.keys() & b.keys()):
        if (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape):
            pair = (a[name].reshape(-1), b[name].reshape(-1))
            difference = tensor_difference(f"constant {name}", a[name].dtype, tuple(a[name].shape), [pair])
            if difference.changed:
                yield difference


def tensor_difference(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], blocks: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> TensorDifference:
    """The difference of two tensors, given in blocks of the same elements: pairs of (n,)."""
    changed = 0
    greatest = squares = reference = 0.0
    lost = [0, 0]
    for before, after in blocks:
        size = before.element_size()
        bits = before.view(torch.uint8).reshape(-1, size) != after.view(torch.uint8).reshape(-1, size)
        changed += int(bits.any(1).sum())
        a, b = _numbers(before), _numbers(after)
        finite = (a.isfinite() & b.isfinite()).all(1)
        lost[0] += int((~a.isfinite()).any(1).sum())
        lost[1] += int((~b.isfinite()).any(1).sum())
        apart = (a[finite] - b[finite]).square().sum(1)
        greatest = max(greatest, math.sqrt(float(apart.max())) if apart.numel() else 0.0)
        squares += float(apart.sum())
        reference += float(a[finite].square().sum())
    relative = math.sqrt(squares / reference) if reference else None if squares else 0.0
    spelled = str(dtype).removeprefix("torch.")
    return TensorDifference(name, spelled, shape, math.prod(shape), changed, greatest, relative, (lost[0], lost[1]))


def _numbers(block: torch.Tensor) -> torch.Tensor:
    """(n, 1) float64, or (n, 2) of complex numbers."""
    if block.dtype.is_complex:
        return torch.view_as_real(block).double()
    return block.double().reshape(-1, 1)
