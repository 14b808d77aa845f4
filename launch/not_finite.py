"""Finds a number in the data that is none, where a step has come to no number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainload.launch.calls import Microbatch
from trainload.launch.data.run_data import RunData
from trainload.launch.engine import Draw


def not_finite_in(draws: Sequence[Draw], data: RunData, source: str) -> str:
    """Return where the batches of a rank have a NaN, or else an infinite number, in words; "" if they have none.

    Args:
        draws: the rank's part of a step.
        data: that their rows are of.
        source: its place.
    """
    microbatches = [microbatch for draw in draws for microbatch in draw.microbatches]
    for wanted in (torch.isnan, torch.isinf):
        for microbatch in microbatches:
            for name, values in sorted(microbatch.batch.items()):
                if (values.is_floating_point() or values.is_complex()) and bool((found := wanted(values)).any()):
                    return _told(name, values, found, microbatch, data, source)
    return ""


def _told(name: str, values: Tensor, found: Tensor, microbatch: Microbatch, data: RunData, source: str) -> str:
    place = found.nonzero()[0].tolist()
    part = data.parts[microbatch.part].name
    row = "a row" if microbatch.rows is None else f"row {int(microbatch.rows[place[0]])}"
    of = source if part is None else f"{source}, part {part}"
    return f"the input {name!r} is {values[tuple(place)].item()} in {row} of {of}"
