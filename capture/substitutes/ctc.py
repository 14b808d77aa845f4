"""The CTC loss as an operator, `trainload::ctc_loss`, whose output shapes are known before it runs.

torch's own operator returns a table whose width depends on the data, and has no fake kernel. This
one computes loss and gradient together; every program that reads packages defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten


@torch.library.custom_op("trainload::ctc_loss", mutates_args=())
def losses_and_gradient(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Return each row's negative log likelihood, and its gradient.

    Args:
        log_probs: (time, rows, classes), floating point.
        targets: (rows, longest), or the concatenated targets of all rows.
        input_lengths: (rows,) integers.
        target_lengths: (rows,) integers.
        blank: the blank class.
        zero_infinity: True if impossible rows get the gradient 0.

    Returns:
        (rows,) and (time, rows, classes), with the dtype of `log_probs`.
    """
    operands = (log_probs.contiguous(), targets, input_lengths, target_lengths)
    losses, table = _ATEN._ctc_loss.Tensor(*operands, blank, zero_infinity)
    gradient = _ATEN._ctc_loss_backward.Tensor(
        torch.ones_like(losses), *operands, losses, table, blank, zero_infinity
    )
    return losses, gradient.clone(memory_format=torch.contiguous_format)


@losses_and_gradient.register_fake
def _(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Any:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(log_probs.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, by_loss: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return by_loss.unsqueeze(-1) * gradient, None, None, None, None, None


losses_and_gradient.register_autograd(_backward, setup_context=_setup_context)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int | str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute `torch.ctc_loss` or `torch.nn.functional.ctc_loss` with this operator.

    The first has numbers for reductions.
    """
    if log_probs.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(
        log_probs.device.type
    ):
        log_probs = log_probs.float()  # as autocast does on a CPU
    batched = log_probs.ndim == 3
    lengths = [
        torch.as_tensor(sizes, device=log_probs.device).reshape(-1)
        for sizes in (input_lengths, target_lengths)
    ]
    losses: Tensor
    losses, _ = losses_and_gradient(
        log_probs if batched else log_probs.unsqueeze(1), targets, *lengths, blank, zero_infinity
    )
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros_like(losses), losses)
    if reduction in ("mean", 1):
        return (losses / lengths[1].clamp(min=1).to(losses.dtype)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if batched else losses.squeeze(0)
