"""The normal distribution's quantiles, with the same bits on every processor.

Only operations that IEEE 754 rounds correctly are used (+, -, x, /, square root), each by an
operator of its own. Logarithms of vector libraries differ with the length of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 2.0**-36
"""Probability below which quantiles are those of LEAST: 6.6 standard deviations."""

# M. J. Wichura, Algorithm AS 241: The Percentage Points of the Normal Distribution, Applied
# Statistics 37 (1988), PPND16: numerators and denominators, highest power first.
_CENTRAL = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_TAIL = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
_SERIES = tuple(1.0 / odd for odd in range(23, 0, -2))
"""Coefficients of atanh(s) / s in s squared, highest power first."""


def normal_quantile(probability: Tensor) -> Tensor:
    """Return the standard normal quantiles of probabilities: float64, of the same shape (n,)."""
    p = probability.clamp(LEAST, 1.0 - LEAST)
    centred = p - 0.5
    result = centred * _ratio(_CENTRAL, 0.180625 - centred * centred)
    (outer,) = torch.nonzero(centred.abs() > 0.425, as_tuple=True)
    if outer.numel():
        side = centred[outer]
        smaller = torch.minimum(p[outer], 1.0 - p[outer])
        distance = _ratio(_TAIL, (-logarithm(smaller)).sqrt() - 1.6)
        result[outer] = torch.where(side < 0, -distance, distance)
    return result


def logarithm(x: Tensor) -> Tensor:
    """Return the natural logarithms of positive numbers: float64, of the same shape."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponents = exponent.to(torch.float64) - low.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return _polynomial(_SERIES, s * s) * (s * 2.0) + exponents * math.log(2.0)


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: Tensor) -> Tensor:
    return _polynomial(coefficients[0], x).div_(_polynomial(coefficients[1], x))


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    first, second, *others = coefficients
    # Not addcmul, which some processors round once.
    result = (x * first).add_(second)
    for coefficient in others:
        result.mul_(x).add_(coefficient)
    return result
