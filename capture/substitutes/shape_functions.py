"""Substitutes for functions of torch that query sizes or values while traced.

Their result does not depend on the answer.

While a model is watched, each is computed by operators that do not query them, or by torch's own
function if that is impossible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import symbolic_shapes

from trainload.capture.substitutes.ctc import ctc_loss

_hint: Callable[[Any], int] = (
    getattr(symbolic_shapes, "optimization_hint", None) or symbolic_shapes.hint_int  # type: ignore[attr-defined]  # its name before torch 2.13
)
_FEW = 25
"""torch computes distances by a matrix product above this number of rows."""


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Split a dim whose size is a multiple of `chunks`, as that of stacked views is.

    torch.chunk would fix even a size `2*s0`.

    For stacked columns it is a multiple if their sizes are the same, which torch keeps as a
    condition. The size is not queried if it has only one symbol, since that would have to be even
    from then on.
    """
    size: Any = x.shape[dim]
    if isinstance(size, int) or not (
        symbolic_shapes.statically_known_true(size % chunks == 0)
        or (len(symbolic_shapes.free_symbols(size)) > 1 and size % chunks == 0)
    ):
        return torch.chunk(x, chunks, dim)
    return torch.split(x, [size // chunks] * chunks, dim)


def _cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> Tensor:
    """Compute distances with the method that torch uses for the example's number of rows."""
    if p == 2 and compute_mode == "use_mm_for_euclid_dist_if_necessary":
        rows: tuple[Any, Any] = (x1.shape[-2], x2.shape[-2])
        many = any((size if isinstance(size, int) else _hint(size)) > _FEW for size in rows)
        compute_mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"
    return torch.cdist(x1, x2, p, compute_mode)


def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Gather after expanding both tensors: torch compares their sizes as plain numbers."""
    if dim is None:
        return x.flatten().gather(0, indices.flatten())
    dim %= x.ndim
    sizes = [a if b == 1 else b for a, b in zip(x.shape, indices.shape, strict=True)]
    across, along = list(sizes), list(sizes)
    across[dim], along[dim] = x.shape[dim], indices.shape[dim]
    return x.expand(across).gather(dim, indices.expand(along))


def _cov(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Compute a covariance without weights; torch checks the values of weights."""
    if fweights is not None or aweights is not None:
        return torch.cov(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    centred = rows - rows.mean(1, keepdim=True)
    return ((centred @ centred.t().conj()) / (rows.shape[1] - correction)).squeeze()


def _gaussian_nll(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute the loss without torch's check that no variance is negative.

    The gradient of a variance below `eps` is that of torch: as if it had not been clamped.
    """
    if not isinstance(var, Tensor) or (var.ndim != input.ndim and var.ndim != input.ndim - 1):
        return nn.functional.gaussian_nll_loss(input, target, var, full, eps, reduction)
    var = var.unsqueeze(-1) if var.ndim < input.ndim else var
    raised = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (raised.log() + (input - target) ** 2 / raised) + (
        0.5 * math.log(2 * math.pi) if full else 0.0
    )
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


SUBSTITUTES: Mapping[Any, Callable[..., Any]] = {
    torch.ctc_loss: ctc_loss,
    nn.functional.ctc_loss: ctc_loss,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.cdist: _cdist,
    torch.take_along_dim: _take_along_dim,
    Tensor.take_along_dim: _take_along_dim,
    torch.cov: _cov,
    Tensor.cov: _cov,
    nn.functional.gaussian_nll_loss: _gaussian_nll,
}
"""Function -> its substitute, which the watch's mode calls."""


def encoder_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `nn.TransformerEncoder.forward` that uses the mask as it is.

    torch's own checks by the mask's values whether it is causal.
    """

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        return original(self, src, mask, src_key_padding_mask, is_causal or False)

    return forward


def decoder_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for `nn.TransformerDecoder.forward`."""

    def forward(self: nn.TransformerDecoder, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 7:  # tgt, memory, four masks, tgt_is_causal
            kwargs["tgt_is_causal"] = kwargs.get("tgt_is_causal") or False
        return original(self, *args, **kwargs)

    return forward


def module_to(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `nn.Module.to` that does nothing if nothing would change.

    torch writes to `.data` even then.
    """

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = [
            *args,
            *(kwargs[name] for name in ("device", "dtype") if kwargs.get(name) is not None),
        ]
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        dtypes = {x for x in arguments if isinstance(x, torch.dtype)} | {x.dtype for x in tensors}
        devices = {torch.device(x) for x in arguments if isinstance(x, str | torch.device)} | {
            x.device for x in tensors
        }
        state = [*self.parameters(), *self.buffers()]
        supported = (
            all(isinstance(x, Tensor | torch.dtype | str | torch.device | bool) for x in arguments)
            and "memory_format" not in kwargs
        )
        same = all(
            (not value.is_floating_point() or dtypes <= {value.dtype}) and devices <= {value.device}
            for value in state
        )
        return self if supported and same else original(self, *args, **kwargs)

    return to
