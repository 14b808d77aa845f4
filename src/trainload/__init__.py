"""Freeze a PyTorch training job into a package; choose the parallelism when it is launched.

    package = trainload.freeze(job, "gpt.tl")
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
    trainload.launch(package, plan, "train.parquet", run_dir="run")

The public names are in `__init__.pyi`, which type checkers and this module read. `import trainload`
imports neither torch nor Ray: the first use of a name imports the module that defines it.
"""

from typing import Any

import lazy_loader

from trainload.core.versions import VERSION as _VERSION
from trainload.core.versions import check_supported_torch as _check_supported_torch

__version__ = _VERSION

_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name in __all__:
        _check_supported_torch()
    value = globals()[name] = _import(name)
    return value
