"""The same inputs give the same bits: a property of torch that must be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainload.capture.job.ambient import deterministic_algorithms


@contextmanager
def deterministic() -> Iterator[None]:
    """Within it graphs are compiled, and operators run, so that sums are taken in one order.

    Without it scatter-adds (the gradient of an embedding) are atomic additions, whose order changes from run to run. Operators that
    have no such form warn, once each.
    """
    settings: Any = torch.utils.deterministic  # a module that turns itself into an object, which stubs cannot say
    fill = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # costs a pass over every new tensor, and finds bugs we do not have
    try:
        with deterministic_algorithms(True):
            yield
    finally:
        settings.fill_uninitialized_memory = fill
