"""Stateless random numbers: a function of (seed, step, site, logical element index).

The counter is hashed with ordinary integer operators that a compiler fuses, so a mask costs no
memory traffic of its own, needs no generator state, and is the same under every strategy, on every
device and after every restart.

The mixing function is the 32-bit one with the constants 0x21f0aaad and 0x735a2d97 found by the
hash-prospector search (xor-shift 16, multiply, xor-shift 15, multiply, xor-shift 15). For single
numbers it is computed in int64 with a 32-bit mask: both constants are below 2**31, so no product
overflows. For tensors it is computed in int32, whose products keep the low 32 bits: half the
memory, twice the lanes of a vector, and processors without AVX-512 have no 64-bit product at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Size = int | torch.SymInt
_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_DIGITS = {torch.float16: 11, torch.bfloat16: 8}
"""Bits of a significand. More bits could round up to 1."""


def mix(x: Tensor) -> Tensor:
    """Hash int64 values in [0, 2**32) one to one to int64 values in [0, 2**32). Any shape."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def mix_words(x: Tensor) -> Tensor:
    """Hash int32 values as `mix` hashes the same bits. Any shape."""
    x = x ^ ((x >> 16) & 0xFFFF)  # the shift copies the sign
    x = x * 0x21F0AAAD
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def _word(x: Tensor) -> Tensor:
    """Return the low 32 bits of int64 values as int32."""
    return x.to(torch.int32)


@dataclass(frozen=True, slots=True)
class RandomKey:
    """Inputs of the random numbers of one call, apart from the site and the element.

    Attributes:
        key: 0-dim int64, made of the seed and the step.
        row: 0-dim int64; number, within the global batch, of the call's first row.
        rows: number of rows of the call.
        stacks: number of times that all rows follow one another in the value's batch dim.
    """

    key: Tensor
    row: Tensor
    rows: Size
    stacks: int = 1

    @classmethod
    def of(cls, seed: Tensor, step: Tensor, row: Tensor, rows: Size) -> RandomKey:
        """Return the key of a call. `seed`, `step`, `row`: 0-dim int64; all 64 bits of the seed
        count.
        """
        key = mix(seed & _MASK)
        key = mix((key + ((seed >> 32) & _MASK) + _GOLDEN) & _MASK)
        return cls(mix((key + (step & _MASK)) & _MASK), row, rows)

    def of_call(self) -> RandomKey:
        """Return the key of a call with a fixed number of rows: the row becomes part of it, and
        every value is drawn once for the call.
        """
        return RandomKey(
            mix((mix(self.key) + (self.row & _MASK)) & _MASK), torch.zeros_like(self.row), self.rows
        )

    def of_iteration(self, count: Tensor) -> RandomKey:
        """Return the key of iteration `count` (int64, 0-dim) of a loop."""
        return RandomKey(mix((self.key + (count & _MASK) * _GOLDEN) & _MASK), self.row, self.rows)

    def bits(self, site: int, shape: Sequence[Size], batch_dim: int | None) -> Tensor:
        """Return 32 random bits for each element: int64 (*shape), in [0, 2**32). See `words`."""
        return self.words(site, shape, batch_dim).to(torch.int64) & _MASK

    def words(self, site: int, shape: Sequence[Size], batch_dim: int | None) -> Tensor:
        """Return 32 random bits for each element: int32 (*shape).

        An element's logical index has the row outermost, offset by `row`, then the stack that it is
        in, so that it does not depend on how a global batch was split.

        Args:
            site: number of this random operator in the graph.
            shape: shape of the result.
            batch_dim: the dim that runs over the rows of the batch (each row may own several
                entries of it); None if the value does not belong to single rows.
        """
        index: Tensor = torch.zeros((), dtype=torch.int64, device=self.key.device)
        stride: Size = 1
        order = [d for d in range(len(shape)) if d != batch_dim]
        if batch_dim is not None:
            order.insert(0, batch_dim)
        for dim in reversed(order):
            size = shape[dim]
            coordinate: Tensor = torch.arange(size, dtype=torch.int64, device=self.key.device)  # type: ignore[arg-type]  # accepts SymInts
            if dim == batch_dim:
                entries: Any = size // self.rows
                if self.stacks > 1:
                    beside = entries // self.stacks
                    stack, within = (
                        coordinate // (self.rows * beside),
                        coordinate % (self.rows * beside),
                    )
                    coordinate = (within // beside * self.stacks + stack) * beside + within % beside
                coordinate = coordinate + self.row * entries
            scaled: Tensor = coordinate * stride  # type: ignore[assignment]  # a SymInt's product with a tensor is a tensor
            index = index + scaled.view([-1] + [1] * (len(shape) - 1 - dim))
            stride = stride * size
        return self.words_at(site, index).expand(list(shape))

    def words_at(self, site: int, index: Tensor) -> Tensor:
        """Return 32 random bits for logical elements: int32, of the shape of `index` (int64)."""
        first = mix((self.key + site * _GOLDEN) & _MASK)
        second = mix((first + _GOLDEN) & _MASK)
        words = mix_words(_word(index) ^ _word(first))
        return mix_words(words + _word(second) + _word(index >> 32))

    def uniform(
        self, site: int, shape: Sequence[Size], batch_dim: int | None, dtype: torch.dtype
    ) -> Tensor:
        """Return uniform numbers in [0, 1) in `dtype`: (*shape).

        They are multiples of 2**-24 (2**-11 for float16 and 2**-8 for bfloat16, which hold no
        more).
        """
        digits = _DIGITS.get(dtype, 24)
        high = (self.words(site, shape, batch_dim) >> (32 - digits)) & ((1 << digits) - 1)
        return (high.to(torch.float32) * 2.0**-digits).to(dtype)

    def normal(
        self, site: int, shape: Sequence[Size], batch_dim: int | None, dtype: torch.dtype
    ) -> Tensor:
        """Return standard normal numbers by the Box-Muller transform, in `dtype`: (*shape). Uses
        sites `site` and `site + 1`.
        """
        radius = 1.0 - self.uniform(site, shape, batch_dim, torch.float32)
        angle = self.uniform(site + 1, shape, batch_dim, torch.float32)
        return (torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * math.pi * angle)).to(dtype)

    def keep(self, site: int, shape: Sequence[Size], batch_dim: int | None, p: float) -> Tensor:
        """Return True with probability 1 - p, exact to 2**-32: bool (*shape)."""
        threshold = round(p * 2**32)
        words = self.words(site, shape, batch_dim)
        if threshold == 2**32:
            return torch.zeros_like(words, dtype=torch.bool)
        # flipping the highest bit makes the order of int32 that of the bits as unsigned numbers
        kept: Tensor = (words ^ -(2**31)) >= threshold - 2**31
        return kept
