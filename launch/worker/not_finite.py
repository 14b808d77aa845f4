"""Find the first non-finite number in a step's data, to explain a non-finite loss or gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainload.launching.data.run_data import RunData
from trainload.launching.worker.engine import Draw


def first_not_finite(draws: Sequence[Draw], data: RunData, source: str) -> str:
    """Return a clause that names the input and row of a NaN, or else of an infinity, in a rank's
    batches; "" if there is none.

    Args:
        draws: the rank's part of a step.
        data: data of the run.
        source: path or URL of the data.
    """
    microbatches = [microbatch for draw in draws for microbatch in draw.microbatches]
    for is_not_finite in (torch.isnan, torch.isinf):
        for microbatch in microbatches:
            for name, values in sorted(microbatch.batch.items()):
                places = is_not_finite(values).nonzero()
                if len(places):
                    row, of = data.origin(
                        microbatch.part, microbatch.rows, int(places[0][0]), source
                    )
                    value = values[tuple(places[0])].item()
                    return (
                        f"the input {name!r} is {value} in"
                        f" {'a row' if row is None else f'row {row}'} of {of}"
                    )
    return ""
