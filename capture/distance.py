"""How far two tensors are apart, wherever a graph is compared with what it was made from."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

_NOISE = 1e-6


def relative_distance(expected: Tensor | None, got: Tensor | None, floor: float = 0.0) -> float:
    """The L2 distance, relative to the expected tensor's norm, or to `floor` where that is more. Computed in float64.

    Infinite where shapes, dtypes or the places of NaN differ; nothing (None) counts as zeros.
    """
    if expected is None or got is None:
        present = got if expected is None else expected
        return 0.0 if present is None or not bool((present != 0).any()) else float("inf")
    if expected.shape != got.shape or expected.dtype != got.dtype or not bool((expected.isnan() == got.isnan()).all()):
        return float("inf")
    distance = absolute_distance(expected, got)
    return distance / max(float(expected.double().nan_to_num().norm()), floor, 1e-30) if distance else 0.0


def absolute_distance(expected: Tensor, got: Tensor) -> float:
    """The L2 distance, NaN aside."""
    return float((expected.double().nan_to_num() - got.double().nan_to_num()).norm())


def noise_floor(gradients: Iterable[Tensor | None]) -> float:
    """Gradients of a smaller norm than this are compared with this: a millionth of all gradients' norm."""
    return _NOISE * norm_of(gradients)


def norm_of(gradients: Iterable[Tensor | None]) -> float:
    """The norm of all gradients together."""
    return float(sum(float(g.double().norm()) ** 2 for g in gradients if g is not None) ** 0.5)
