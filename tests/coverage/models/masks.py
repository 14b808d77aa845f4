"""Makes eager PyTorch draw trainload's stateless random numbers.

So a model with dropout can be compared with its step graph. The masks of a step graph are a
function of (seed, step, site, element), not of torch's generator. Here the few kernels by which
eager code draws receive the numbers of their site; all other code, including dropout and attention,
is torch's own. So the comparison shares the hash of `RandomKey` with the step graph, but not the
stateless forms in `autograd_trace/randomness/draws.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from scipy.special import gammaincinv
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainload.autograd_trace.randomness.random_key import RandomKey

aten = torch.ops.aten
Shape = Sequence[int]


class StatelessDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """A context in which random kernels draw from a `RandomKey`. Use one for forward and backward.

    Args:
        seed, step, row: as in a step graph.
        rows: number of rows of the batch, preferably a prime: the dim of the rows is the first one
            whose size is a multiple of it.
        static: the number of rows is fixed in the graph, so that its random values belong to the
            call and not to rows.
        stacks: number of times that all rows are repeated in a dim with several entries per row.
    """

    def __init__(
        self, seed: int, step: int, row: int, rows: int, *, static: bool = False, stacks: int = 1
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        key = RandomKey.of(torch.tensor(seed), torch.tensor(step), torch.tensor(row), rows)
        self._key = key.of_call() if static else key
        self._stacked = replace(self._key, stacks=stacks)
        self._rows = None if static else rows
        self._sites: dict[bytes, int] = {}
        self._next = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, *args, **dict(kwargs or {}))
        assert torch.Tag.nondeterministic_seeded not in func.tags or func in _DRAWS_NOTHING_HERE, (
            f"{func} draws by a kernel of its own"
        )
        return func(*args, **dict(kwargs or {}))

    def _site(self, count: int = 1) -> int:
        """Return the site of the current call.

        Checkpointing restores torch's generator and runs code again. So a call is identified by the
        state of the generator, which every call here advances.
        """
        state = torch.random.get_rng_state().numpy().tobytes()
        if state not in self._sites:
            self._sites[state] = self._next
            self._next += count
        torch.rand(())
        return self._sites[state]

    def cond(
        self,
        pred: Any,
        true_fn: Callable[..., Any],
        false_fn: Callable[..., Any],
        operands: Any = (),
    ) -> Any:
        """Compute torch.cond as Python's `if`.

        The random numbers of a branch are derived from its own key, and all branches share a site.
        """
        outside, state = (
            (self._key, self._stacked, self._sites, self._next),
            torch.random.get_rng_state(),
        )
        site = self._site()
        counted = self._sites, self._next
        self._key = replace(self._key, key=self._key.bits(site, [], None))
        self._stacked = replace(self._key, stacks=self._stacked.stacks)
        self._sites, self._next = {}, 0
        result = (true_fn if pred else false_fn)(*operands)
        drawn = bool(self._next)
        self._key, self._stacked, self._sites, self._next = outside
        if drawn:
            self._sites, self._next = counted
        else:
            del self._sites[state.numpy().tobytes()]
            torch.random.set_rng_state(state)
        return result

    def _dim(self, shape: Shape) -> int | None:
        return (
            None
            if self._rows is None
            else next((d for d, size in enumerate(shape) if size and size % self._rows == 0), None)
        )

    def _key_for(self, shape: Shape) -> RandomKey:
        dim = self._dim(shape)
        return self._key if dim is None or shape[dim] == self._rows else self._stacked

    def heads(self, shape: Shape, probability: float) -> Tensor:
        """Draw booleans that are true with this probability."""
        return self._key_for(shape).keep(self._site(), shape, self._dim(shape), 1 - probability)

    def uniform(self, shape: Shape, dtype: torch.dtype | None) -> Tensor:
        return self._key_for(shape).uniform(
            self._site(), shape, self._dim(shape), dtype or torch.get_default_dtype()
        )

    def normal(self, shape: Shape, dtype: torch.dtype | None) -> Tensor:
        return self._key_for(shape).normal(
            self._site(2), shape, self._dim(shape), dtype or torch.get_default_dtype()
        )

    def integers(self, low: int, high: int, shape: Shape, dtype: torch.dtype | None) -> Tensor:
        return (
            self._key_for(shape).bits(self._site(), shape, self._dim(shape)) % (high - low) + low
        ).to(dtype or torch.int64)


def _bernoulli(draws: StatelessDraws, x: Tensor, *, generator: None = None) -> Tensor:
    return (draws.uniform(x.shape, torch.float32) < x).to(x.dtype)


def _uniform_(
    draws: StatelessDraws, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None
) -> Tensor:
    return x.copy_(draws.uniform(x.shape, x.dtype) * (high - low) + low)


def _normal_(
    draws: StatelessDraws, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None
) -> Tensor:
    return x.copy_(draws.normal(x.shape, x.dtype) * std + mean)


def _exponential_(
    draws: StatelessDraws, x: Tensor, rate: float = 1.0, *, generator: None = None
) -> Tensor:
    return x.copy_(-torch.log(1.0 - draws.uniform(x.shape, torch.float32)) / rate)


def _rrelu(
    draws: StatelessDraws,
    x: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: None = None,
) -> Tensor:
    assert training
    noise.copy_(
        torch.where(
            x > 0, torch.ones_like(x), draws.uniform(x.shape, x.dtype) * (upper - lower) + lower
        )
    )
    return x * noise


def _multinomial(
    draws: StatelessDraws,
    weights: Tensor,
    count: int,
    replacement: bool = False,
    *,
    generator: None = None,
) -> Tensor:
    assert not replacement
    clocks = -torch.log(1.0 - draws.uniform(weights.shape, torch.float32))
    return (weights / clocks).topk(count, -1)[1]


def _poisson(draws: StatelessDraws, rate: Tensor, generator: None = None) -> Tensor:
    """Draw by inversion: count the cumulative probabilities up to a uniform number.

    The rates must be small: counts end at 199.
    """
    counts = torch.arange(200, dtype=torch.float64)
    wide = rate.double().unsqueeze(-1).clamp(min=1e-300)
    cumulative = (counts * wide.log() - wide - torch.lgamma(counts + 1)).exp().cumsum(-1)
    return (
        (draws.uniform(rate.shape, torch.float32).double().unsqueeze(-1) >= cumulative)
        .sum(-1)
        .to(rate.dtype)
    )


def _gamma(draws: StatelessDraws, concentration: Tensor, generator: None = None) -> Tensor:
    """Apply the quantile function of scipy."""
    below = draws.uniform(concentration.shape, torch.float32).double() + 2.0**-25
    return torch.from_numpy(gammaincinv(concentration.double().numpy(), below.numpy()))


def _dirichlet(draws: StatelessDraws, concentration: Tensor, generator: None = None) -> Tensor:
    drawn = _gamma(draws, concentration)
    return (drawn / drawn.sum(-1, keepdim=True)).to(concentration.dtype)


for _operator in (
    torch.ops.higher_order.scan,
    torch.ops.higher_order.cond,
    torch.ops.higher_order.while_loop,
    torch.ops.higher_order.map_impl,
):
    # random numbers are drawn outside of these operators
    _operator.py_impl(StatelessDraws)(
        lambda _, *args, _operator=_operator, **kwargs: _operator(*args, **kwargs)
    )


_RULES: dict[Any, Callable[..., Tensor]] = {
    aten.bernoulli_.float: lambda d, x, p=0.5, **_: x.copy_(d.heads(x.shape, p)),
    aten.bernoulli.p: lambda d, x, p=0.5, **_: d.heads(x.shape, p).to(x.dtype),
    aten.bernoulli.default: _bernoulli,
    aten.uniform_.default: _uniform_,
    aten.normal_.default: _normal_,
    aten.exponential_.default: _exponential_,
    aten.rrelu_with_noise.default: _rrelu,
    aten.multinomial.default: _multinomial,
    aten.poisson.default: _poisson,
    aten._standard_gamma.default: (
        lambda d, concentration, *_: _gamma(d, concentration).to(concentration.dtype)
    ),
    aten._sample_dirichlet.default: _dirichlet,
    aten.randperm.default: lambda d, n, *, dtype=None, **_: (
        d.integers(0, 1 << 32, [n], None).argsort().to(dtype or torch.int64)
    ),
    aten.normal.Tensor_float: lambda d, mean, std=1.0, **_: (
        mean + std * d.normal(mean.shape, mean.dtype)
    ),
    aten.normal.float_Tensor: lambda d, mean, std, **_: mean + std * d.normal(std.shape, std.dtype),
    aten.normal.Tensor_Tensor: lambda d, mean, std, **_: (
        mean + std * d.normal((mean + std).shape, mean.dtype)
    ),
    aten.rand.default: lambda d, size, *, dtype=None, **_: d.uniform(size, dtype),
    aten.randn.default: lambda d, size, *, dtype=None, **_: d.normal(size, dtype),
    aten.rand_like.default: lambda d, x, *, dtype=None, **_: d.uniform(x.shape, dtype or x.dtype),
    aten.randn_like.default: lambda d, x, *, dtype=None, **_: d.normal(x.shape, dtype or x.dtype),
    aten.randint.default: lambda d, high, size, *, dtype=None, **_: d.integers(
        0, high, size, dtype
    ),
    aten.randint.low: lambda d, low, high, size, *, dtype=None, **_: d.integers(
        low, high, size, dtype
    ),
}
_DRAWS_NOTHING_HERE = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten.rrelu_with_noise_backward.default,
    }
)
"""Operators tagged as random; on a CPU the first one is only used without dropout."""
