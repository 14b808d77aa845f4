"""Freeze a PyTorch training job into a package; choose the parallelism when it is launched.

    package = trainload.freeze(job, "gpt.tl")
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
    trainload.launch(package, plan, "train.parquet", run_dir="run")

Importing this imports neither torch nor Ray: they are imported by the first name that needs them.
"""

from __future__ import annotations

import importlib
import inspect
import types
from typing import TYPE_CHECKING, Any

from trainload.capture.errors import (
    CaptureError,
    CheckpointError,
    ClusterError,
    CompileError,
    ConflictError,
    DataError,
    IntegrityError,
    JobError,
    LostClusterError,
    MissingDataError,
    PackageError,
    PassError,
    PlanError,
    PolicyError,
    RequestError,
    RunInterrupted,
    SignatureError,
    StorageError,
    TrainingError,
    TrainloadError,
    UnsafePackageError,
    VersionError,
    WorkError,
)
from trainload.capture.versions import check_supported_torch as _demand_supported_torch

if TYPE_CHECKING:
    from trainload.api import dry_run as dry_run
    from trainload.api import explain_shapes as explain_shapes
    from trainload.api import freeze as freeze
    from trainload.api import launch as launch
    from trainload.api import open as open
    from trainload.api import plan as plan
    from trainload.api import resume as resume
    from trainload.capture.job import Asset as Asset
    from trainload.capture.job import Ema as Ema
    from trainload.capture.job import Graph as Graph
    from trainload.capture.job import Job as Job
    from trainload.capture.job import Loss as Loss
    from trainload.capture.job import LossScaling as LossScaling
    from trainload.capture.job import Turn as Turn
    from trainload.capture.parameter_groups import parameter_groups as parameter_groups
    from trainload.capture.shape_report import ShapeReport as ShapeReport
    from trainload.evaluating import EvaluationResult as EvaluationResult
    from trainload.evaluating import evaluate as evaluate
    from trainload.exporting import Exported as Exported
    from trainload.exporting import export as export
    from trainload.launch.adapters import Adapters as Adapters
    from trainload.launch.data.arrow_file import write_rows as write_rows
    from trainload.launch.overrides import Overrides as Overrides
    from trainload.packaging.read import Package as Package
    from trainload.passes import Pass as Pass
    from trainload.recording import record as record
    from trainload.sharding.plan import Cluster as Cluster
    from trainload.sharding.plan import Plan as Plan
    from trainload.sharding.simulate import simulate as simulate
    from trainload.stores import Store as Store
    from trainload.stores import gc as gc
    from trainload.stores import promote as promote
    from trainload.stores import pull as pull
    from trainload.stores import push as push
    from trainload.stores import releases as releases
    from trainload.transformation import transform as transform
    from trainload.trust import diff as diff
    from trainload.trust import sign as sign
    from trainload.trust import verify as verify

__version__ = "0.1.0"

__all__ = [
    "Adapters",
    "Asset",
    "CaptureError",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "CompileError",
    "ConflictError",
    "DataError",
    "Ema",
    "EvaluationResult",
    "Exported",
    "Graph",
    "IntegrityError",
    "Job",
    "JobError",
    "Loss",
    "LossScaling",
    "LostClusterError",
    "MissingDataError",
    "Overrides",
    "Package",
    "PackageError",
    "Pass",
    "PassError",
    "Plan",
    "PlanError",
    "PolicyError",
    "RequestError",
    "RunInterrupted",
    "ShapeReport",
    "SignatureError",
    "StorageError",
    "Store",
    "TrainingError",
    "TrainloadError",
    "Turn",
    "UnsafePackageError",
    "VersionError",
    "WorkError",
    "__version__",
    "diff",
    "dry_run",
    "evaluate",
    "explain_shapes",
    "export",
    "freeze",
    "gc",
    "launch",
    "open",
    "parameter_groups",
    "plan",
    "promote",
    "pull",
    "push",
    "record",
    "releases",
    "resume",
    "sign",
    "simulate",
    "transform",
    "verify",
    "write_rows",
]

_HOMES = {
    "Adapters": "trainload.launch.adapters",
    "Asset": "trainload.capture.job",
    "Cluster": "trainload.sharding.plan",
    "Ema": "trainload.capture.job",
    "EvaluationResult": "trainload.evaluating",
    "Exported": "trainload.exporting",
    "Graph": "trainload.capture.job",
    "Job": "trainload.capture.job",
    "Loss": "trainload.capture.job",
    "LossScaling": "trainload.capture.job",
    "Package": "trainload.packaging.read",
    "Pass": "trainload.passes",
    "Overrides": "trainload.launch.overrides",
    "Plan": "trainload.sharding.plan",
    "Store": "trainload.stores",
    "Turn": "trainload.capture.job",
    "ShapeReport": "trainload.capture.shape_report",
    "diff": "trainload.trust",
    "dry_run": "trainload.api",
    "evaluate": "trainload.evaluating",
    "explain_shapes": "trainload.api",
    "export": "trainload.exporting",
    "freeze": "trainload.api",
    "gc": "trainload.stores",
    "open": "trainload.api",
    "parameter_groups": "trainload.capture.parameter_groups",
    "plan": "trainload.api",
    "promote": "trainload.stores",
    "pull": "trainload.stores",
    "push": "trainload.stores",
    "record": "trainload.recording",
    "releases": "trainload.stores",
    "resume": "trainload.api",
    "sign": "trainload.trust",
    "simulate": "trainload.sharding.simulate",
    "transform": "trainload.transformation",
    "verify": "trainload.trust",
    "write_rows": "trainload.launch.data.arrow_file",
}
"""Where each name that is imported on first use lives."""


class _Verb(types.ModuleType):
    """A stage folder whose name is a verb of the face as well.

    `trainload.launch` is the namespace package of the stage, since Python binds a submodule to its parent, and the function
    `trainload.api.launch`, since that is what it is for. Making the module callable serves both, in whatever order they are imported.
    """

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._function(*args, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    @property
    def _function(self) -> Any:
        _demand_supported_torch()
        return getattr(importlib.import_module("trainload.api"), self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)


importlib.import_module("trainload.launch").__class__ = _Verb


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainload' has no attribute {name!r}")
    _demand_supported_torch()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
