"""Detects tensors of the trace that survive in a cache outside of the model.

An example is a mask kept by `functools.cache`.

Such a tensor is fake: eager mode would compute fake losses with it, without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainload.capture.job.tensor_classes import is_fake
from trainload.capture.source.causes import GLOBAL
from trainload.capture.source.source_place import place_here
from trainload.core.errors import CaptureError
from trainload.core.finding import Finding, Place

_SENTENCE = (
    "forward keeps a tensor outside of the model between calls, and now has the one that was"
    " created during capture"
)
_ADVICE = (
    "Call the model once before the freeze, so that the kept tensor has values; or make it a buffer"
    " of the model."
)
_REWRITE = (
    "job.loss(job.model, job.batch)  # once, so that the kept tensors have values\n"
    "trainload.freeze(job, ...)"
)


class _FirstUse(TorchFunctionMode):
    """Mode that records where a fake tensor is first used."""

    def __init__(self) -> None:
        super().__init__()
        self.place: Place | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.place is None and any(
            is_fake(value) for value in (*args, *(kwargs or {}).values())
        ):
            self.place = place_here()
        return func(*args, **(kwargs or {}))


def check_no_leaks(
    outputs: Sequence[Tensor], function: nn.Module, batch: dict[str, Tensor]
) -> None:
    """Check that eager mode still computes values after a capture.

    Args:
        outputs: result of `function(batch)` in eager mode.
        function: the captured function.
        batch: its input.

    Raises:
        CaptureError: if the outputs are fake tensors; names the line where one is first used.
    """
    if not any(is_fake(value) for value in outputs):
        return
    mode = _FirstUse()
    with contextlib.suppress(Exception), mode:  # only the line of the first use is wanted
        function(dict(batch))
    finding = Finding(GLOBAL.anchor, _SENTENCE, _ADVICE, _REWRITE, mode.place)
    raise CaptureError(
        _SENTENCE, where=str(mode.place or "Job.model"), hint=_ADVICE, findings=[finding]
    )
