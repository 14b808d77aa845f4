"""Graph modules whose Python source is generated only if they are run.

Tested with torch 2.13.0. Private name used: `torch.fx._lazy_graph_module`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.fx._lazy_graph_module import _use_lazy_graph_module


def generated_when_run() -> AbstractContextManager[None]:
    """Return a context in which torch's tracers make such modules.

    torch.export makes several graph modules of a whole model and runs none of them.
    """
    return _use_lazy_graph_module(True)
