"""Stateless forms of random operators: the same distributions as torch's, with random bits from a
`RandomKey`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from trainload.autograd_trace.randomness.random_key import RandomKey
from trainload.capture.operators import draws_nothing, is_overload, is_seeded
from trainload.capture.substitutes.gamma import gamma_at
from trainload.capture.watching.bodies import ALPHA

aten = torch.ops.aten
_NORMAL_SITES = 2


class Run(Protocol):
    """Interface of the interpreter that a random operator's stateless form uses."""

    def key(self) -> RandomKey: ...

    def site(self, count: int = 1) -> int: ...

    def batch_dim(self) -> int | None: ...


def is_random(node: Node) -> bool:
    """Return True if a node draws from a random generator."""
    return (
        is_overload(node.target)
        and (node.target in RANDOM or is_seeded(node.target))
        and not draws_nothing(node.target, node.args, node.kwargs)
    )


def _dropout(run: Run, x: Tensor, p: float, train: bool | None = True) -> Tensor:
    if train is False or p == 0:
        return x
    if p == 1:
        return x * 0
    keep = run.key().keep(run.site(), x.shape, run.batch_dim(), p)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def _native_dropout(
    run: Run, x: Tensor, p: float, train: bool | None = True
) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    keep = run.key().keep(run.site(), x.shape, run.batch_dim(), p)
    return torch.where(
        keep,
        x * (0.0 if p == 1 else 1.0 / (1.0 - p)),
        torch.zeros((), dtype=x.dtype, device=x.device),
    ), keep


def _feature_dropout(run: Run, x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    shape = [*x.shape[:2], *([1] * (x.ndim - 2))]
    keep = run.key().keep(run.site(), shape, run.batch_dim(), p)
    return x * (keep.to(x.dtype) * (0.0 if p == 1 else 1.0 / (1.0 - p)))


def _bernoulli(run: Run, x: Tensor, *, generator: None = None) -> Tensor:
    return (run.key().uniform(run.site(), x.shape, run.batch_dim(), torch.float32) < x).to(x.dtype)


def _bernoulli_p(run: Run, x: Tensor, p: float = 0.5, *, generator: None = None) -> Tensor:
    return run.key().keep(run.site(), x.shape, run.batch_dim(), 1.0 - p).to(x.dtype)


def _bernoulli_tensor(run: Run, x: Tensor, p: Tensor, *, generator: None = None) -> Tensor:
    return (run.key().uniform(run.site(), x.shape, run.batch_dim(), torch.float32) < p).to(x.dtype)


def _alpha_dropout(run: Run, x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(run, x, x.shape, p, train)


def _feature_alpha_dropout(run: Run, x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(run, x, [*x.shape[:2], *([1] * (x.ndim - 2))], p, train)


def _alpha(run: Run, x: Tensor, shape: Sequence[Any], p: float, train: bool) -> Tensor:
    """Apply dropout that keeps the mean and variance of SELU outputs ("Self-Normalizing Neural
    Networks", section 3).
    """
    if not train or p == 0:
        return x
    if p == 1:
        return x * 0
    factor: float = ((ALPHA**2 * p + 1.0) * (1.0 - p)) ** -0.5
    keep = run.key().keep(run.site(), shape, run.batch_dim(), p).to(x.dtype)
    return x * (keep * factor) + ((keep - 1.0) * (ALPHA * factor) + ALPHA * factor * p)


def _rrelu(
    run: Run,
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: None = None,
) -> Tensor:
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    slope = (
        run.key().uniform(run.site(), x.shape, run.batch_dim(), x.dtype) * (upper - lower) + lower
    )
    return torch.where(x > 0, x, x * slope)


def _rand(run: Run, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return run.key().uniform(run.site(), size, run.batch_dim(), dtype or torch.get_default_dtype())


def _randn(run: Run, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return run.key().normal(
        run.site(_NORMAL_SITES), size, run.batch_dim(), dtype or torch.get_default_dtype()
    )


def _rand_like(run: Run, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return run.key().uniform(run.site(), x.shape, run.batch_dim(), dtype or x.dtype)


def _randn_like(run: Run, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return run.key().normal(run.site(_NORMAL_SITES), x.shape, run.batch_dim(), dtype or x.dtype)


def _attention(
    run: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention; with dropout it is written out, since torch's kernels
    draw from a generator.

    query (..., L, E), key (..., S, E), value (..., S, V) -> (..., L, V), as torch's documentation
    defines it.
    """
    if dropout_p == 0:
        plain: Tensor = aten.scaled_dot_product_attention.default(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return plain
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    with torch.autocast(query.device.type, enabled=False):
        # as torch's CPU kernel computes
        if query.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
            query, key, value = query.float(), key.float(), value.float()
        factor = query.size(-1) ** -0.5 if scale is None else scale
        scores = (query @ key.transpose(-2, -1)) * factor
        if is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~causal, float("-inf"))
        if attn_mask is not None:
            scores = (
                scores.masked_fill(~attn_mask, float("-inf"))
                if attn_mask.dtype == torch.bool
                else scores + attn_mask
            )
        probabilities = torch.softmax(
            scores,
            -1,
            dtype=torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else None,
        )
        # As in torch's kernels, a position that may attend to nothing yields zeros, not NaN.
        probabilities = probabilities.masked_fill(
            (scores == float("-inf")).all(-1, keepdim=True), 0.0
        )
        keep = run.key().keep(run.site(), probabilities.shape, run.batch_dim(), dropout_p)
        attended = (
            torch.where(
                keep, probabilities / (1.0 - dropout_p), torch.zeros_like(probabilities)
            ).to(value.dtype)
            @ value
        )
    return attended.to(dtype)


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Disable mkldnn. torch.backends.mkldnn.flags does the same, but warns on every build without
    Intel GPUs.
    """
    enabled, *_ = torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]  # torch's
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(enabled)  # type: ignore[no-untyped-call]  # as above


def _recurrent(operator: Any) -> Callable[..., Any]:
    """Return a recurrent operator that runs layer by layer, with stateless dropout between the
    layers.

    It runs without mkldnn (oneDNN), whose layer returns a workspace that a traced backward lacks.
    On a GPU the setting has no effect.
    """

    def call(
        run: Run,
        x: Tensor,
        state: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        with _without_mkldnn():
            if not train or dropout == 0 or num_layers == 1:
                whole: tuple[Tensor, ...] = operator(
                    x, state, params, has_biases, num_layers, 0.0, train, bidirectional, batch_first
                )
                return whole
            states = list(state) if isinstance(state, list | tuple) else [state]
            directions, count = 2 if bidirectional else 1, len(params) // num_layers
            last: list[list[Tensor]] = []
            for layer in range(num_layers):
                if layer > 0:
                    x = _dropout(run, x, dropout)
                own = [s.narrow(0, layer * directions, directions) for s in states]
                layer_state = own if isinstance(state, list | tuple) else own[0]
                these = params[layer * count : (layer + 1) * count]
                x, *after = operator(
                    x, layer_state, these, has_biases, 1, 0.0, train, bidirectional, batch_first
                )
                last.append(after)
            return (x, *(torch.cat(parts) for parts in zip(*last, strict=True)))

    return call


def _in_place(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(run: Run, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = rule(run, x, *args, **kwargs)
        # Dropout with p=0 or in eval mode writes nothing: autograd may have saved x for an earlier
        # operator.
        return x if result is x else x.copy_(result)

    return call


def _uniform(
    run: Run, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None
) -> Tensor:
    return run.key().uniform(run.site(), x.shape, run.batch_dim(), x.dtype) * (high - low) + low


def _normal(
    run: Run, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None
) -> Tensor:
    return run.key().normal(run.site(_NORMAL_SITES), x.shape, run.batch_dim(), x.dtype) * std + mean


def _exponential(run: Run, x: Tensor, rate: float = 1.0, *, generator: None = None) -> Tensor:
    return (
        -torch.log(1.0 - run.key().uniform(run.site(), x.shape, run.batch_dim(), torch.float32))
        / rate
    ).to(x.dtype)


def _randint(run: Run, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _randint_low(run, 0, high, size, **options)


def _randint_low(
    run: Run,
    low: int,
    high: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> Tensor:
    return (run.key().bits(run.site(), size, run.batch_dim()) % (high - low) + low).to(
        dtype or torch.int64
    )


def _randint_like(
    run: Run, x: Tensor, high: int, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return _randint_low(run, 0, high, x.shape, dtype=dtype or x.dtype)


def _randint_like_low(
    run: Run, x: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return _randint_low(run, low, high, x.shape, dtype=dtype or x.dtype)


def _normal_of(
    run: Run, mean: Tensor | float, std: Tensor | float = 1.0, *, generator: None = None
) -> Tensor:
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = (tensors[0] + tensors[-1]).shape
    return (
        run.key().normal(run.site(_NORMAL_SITES), shape, run.batch_dim(), tensors[0].dtype) * std
        + mean
    )


def _randperm(run: Run, n: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return (
        run.key()
        .bits(run.site(), [n], run.batch_dim())
        .argsort(stable=True)
        .to(dtype or torch.int64)
    )


def _multinomial(
    run: Run,
    weights: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: None = None,
) -> Tensor:
    """Sample weights (rows, n) or (n,) -> (..., num_samples): the winners of a race of exponential
    clocks with the weights as rates.
    """
    shape: list[Any] = [*weights.shape]
    if replacement:
        shape.insert(-1, num_samples)
        weights = weights.unsqueeze(-2)
    clocks = -torch.log(1.0 - run.key().uniform(run.site(), shape, run.batch_dim(), torch.float32))
    speed = weights.float() / clocks.clamp(min=2.0**-25)
    return speed.argmax(-1) if replacement else speed.topk(num_samples, -1).indices


_HALVINGS = 20
"""Bisection steps of an interval of at most a million counts: sufficient for rates up to 3e9."""


def _poisson(run: Run, rate: Tensor, generator: None = None) -> Tensor:
    """Return the smallest count whose cumulative probability exceeds a uniform number, by bisection
    within eight standard deviations.

    P(count <= k) is the upper incomplete gamma function of k + 1 and the rate, regularised
    (Abramowitz and Stegun, 26.4.21).
    """
    below = run.key().uniform(run.site(), rate.shape, run.batch_dim(), torch.float32).double()
    wide = rate.detach().double()
    spread = 8 * wide.sqrt()
    low, high = (wide - spread - 2).clamp(min=-1).floor(), (wide + spread + 30).floor()
    for _ in range(_HALVINGS):
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1, wide) > below
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high.to(rate.dtype)


_FINEST = 44
"""Bisection steps over the logarithms that a double can represent: to a relative 1e-10."""


def _gamma_quantile(run: Run, concentration: Tensor) -> Tensor:
    """Return standard gamma variates in float64: where the regularised lower incomplete gamma
    function reaches a uniform number.

    torch draws them by rejection, which has no stateless form. `gamma_at` provides the derivative.
    """
    below = (
        run.key().uniform(run.site(), concentration.shape, run.batch_dim(), torch.float32).double()
        + 2.0**-25
    )
    wide = concentration.detach().double()
    low, high = torch.full_like(wide, -700.0), (wide + 40 * wide.sqrt() + 40).log()
    for _ in range(_FINEST):
        middle = (low + high) / 2
        enough = torch.special.gammainc(wide, middle.exp()) > below
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high.exp()


def _gamma(run: Run, concentration: Tensor, generator: None = None) -> Tensor:
    drawn: Tensor = gamma_at(
        concentration, _gamma_quantile(run, concentration).to(concentration.dtype)
    )
    return drawn


def _dirichlet(run: Run, concentration: Tensor) -> Tensor:
    drawn = _gamma_quantile(run, concentration)
    return (drawn / drawn.sum(-1, keepdim=True)).to(concentration.dtype)


RANDOM: dict[Any, Callable[..., Any]] = {
    aten.dropout.default: _dropout,
    aten.native_dropout.default: _native_dropout,
    aten.dropout_.default: _in_place(_dropout),
    aten.feature_dropout.default: _feature_dropout,
    aten.feature_dropout_.default: _in_place(_feature_dropout),
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli_.float: _in_place(_bernoulli_p),
    aten.bernoulli_.Tensor: _in_place(_bernoulli_tensor),
    aten.alpha_dropout.default: _alpha_dropout,
    aten.alpha_dropout_.default: _in_place(_alpha_dropout),
    aten.feature_alpha_dropout.default: _feature_alpha_dropout,
    aten.feature_alpha_dropout_.default: _in_place(_feature_alpha_dropout),
    aten.rrelu.default: _rrelu,
    aten.rrelu_.default: _in_place(_rrelu),
    aten.lstm.input: _recurrent(aten.lstm.input),
    aten.gru.input: _recurrent(aten.gru.input),
    aten.rnn_tanh.input: _recurrent(aten.rnn_tanh.input),
    aten.rnn_relu.input: _recurrent(aten.rnn_relu.input),
    aten.uniform_.default: _in_place(_uniform),
    aten.normal_.default: _in_place(_normal),
    aten.exponential_.default: _in_place(_exponential),
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.randperm.default: _randperm,
    aten.multinomial.default: _multinomial,
    aten.poisson.default: _poisson,
    aten._standard_gamma.default: _gamma,
    torch.ops.trainload.dirichlet.default: _dirichlet,
    aten.rand.default: _rand,
    aten.randn.default: _randn,
    aten.rand_like.default: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.scaled_dot_product_attention.default: _attention,
}
"""Operator -> its stateless form, called with the interpreter and the operator's own arguments."""
