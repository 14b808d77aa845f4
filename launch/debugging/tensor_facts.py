"""Numbers that describe a tensor in a report: range, mean, zeros, and what is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Level(IntEnum):
    """Rank of the worst value of a tensor."""

    FINE = 0
    LARGE = 1
    """A value is infinite, or its magnitude is above a limit."""
    NAN = 2


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor of floating-point numbers or integers.

    Attributes:
        name: its name in the report.
        dtype: such as "bfloat16".
        shape: its sizes.
        low: minimum of its finite values; None if there is none.
        high: maximum of its finite values; None if there is none.
        mean: mean of its finite values; None if there is none.
        zeros: number of zeros.
        nans: number of NaNs.
        infinities: number of infinities of either sign.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    mean: float | None
    zeros: int
    nans: int
    infinities: int

    def __str__(self) -> str:
        """Return them for a sentence: "x: float32[4, 8], -0.51 to 0.93, mean 0.011, 3 zeros"."""
        shape = ", ".join(map(str, self.shape))
        parts = [f"{self.dtype}[{shape}]"]
        if self.low is None:
            parts.append("no finite value")
        elif self.low == self.high:
            parts.append(f"all {self.low:.4g}")
        else:
            parts.append(f"{self.low:.4g} to {self.high:.4g}, mean {self.mean:.4g}")
        for count, one, many in (
            (self.zeros, "zero", "zeros"),
            (self.nans, "NaN", "NaNs"),
            (self.infinities, "infinity", "infinities"),
        ):
            if count and not (one == "zero" and self.low == self.high == 0):
                parts.append(f"{count} {one if count == 1 else many}")
        return f"{self.name}: {', '.join(parts)}"


def level_of(value: Tensor, above: float) -> Level:
    """Return the rank of a tensor's worst value.

    Integers and booleans are FINE.

    Args:
        value: any tensor. Its elements are read once, and nothing of its size is allocated.
        above: magnitude above which a finite value is LARGE; infinity for none.
    """
    numbers = real_numbers(value)
    if numbers is None:
        return Level.FINE
    low, high = torch.stack(torch.aminmax(numbers)).tolist()
    if math.isnan(low) or math.isnan(high):
        return Level.NAN
    greatest = max(-low, high)
    return Level.LARGE if greatest > above or math.isinf(greatest) else Level.FINE


def bad_elements(value: Tensor, above: float) -> Tensor:
    """Return a boolean tensor of the shape of `real_numbers`: True where a value is not FINE."""
    numbers = real_numbers(value)
    assert numbers is not None, "its level is not FINE"
    return ~torch.isfinite(numbers) | (numbers.abs() > above)


def facts_of(value: Tensor, name: str) -> TensorFacts:
    """Return the facts of a tensor on any device."""
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    values = value.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.double()
    finite = values[torch.isfinite(values)]
    low, high, mean = (
        (finite.min().item(), finite.max().item(), finite.mean().item())
        if finite.numel()
        else (None, None, None)
    )
    return TensorFacts(
        name,
        dtype,
        shape,
        low,
        high,
        mean,
        zeros=int((values == 0).sum()),
        nans=int(values.isnan().sum()),
        infinities=int(values.isinf().sum()),
    )


def real_numbers(value: Tensor) -> Tensor | None:
    """Return a tensor's floating-point numbers, complex ones with a last dim of two parts; None if
    it has none.
    """
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return None
    value = value.detach()
    if value.is_complex():
        return torch.view_as_real(value)
    # torch reduces no numbers of eight bits
    return value.float() if value.element_size() == 1 else value
