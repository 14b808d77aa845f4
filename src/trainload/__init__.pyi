"""The public names of trainload and the modules that define them.

`trainload/__init__.py` imports a name on its first use.
"""

from .capture.job.definition import Asset as Asset
from .capture.job.definition import Ema as Ema
from .capture.job.definition import Graph as Graph
from .capture.job.definition import Job as Job
from .capture.job.definition import Loss as Loss
from .capture.job.definition import LossScaling as LossScaling
from .capture.job.definition import Turn as Turn
from .capture.job.parameter_groups import parameter_groups as parameter_groups
from .capture.shapes.shape_report import ShapeReport as ShapeReport
from .capture.shapes.shape_report import explain_shapes as explain_shapes
from .core.errors import CaptureError as CaptureError
from .core.errors import CheckpointError as CheckpointError
from .core.errors import ClusterError as ClusterError
from .core.errors import CompileError as CompileError
from .core.errors import ConflictError as ConflictError
from .core.errors import DataError as DataError
from .core.errors import IntegrityError as IntegrityError
from .core.errors import JobError as JobError
from .core.errors import LostClusterError as LostClusterError
from .core.errors import MissingDataError as MissingDataError
from .core.errors import PackageError as PackageError
from .core.errors import PassError as PassError
from .core.errors import PlanError as PlanError
from .core.errors import PolicyError as PolicyError
from .core.errors import RequestError as RequestError
from .core.errors import RunInterrupted as RunInterrupted
from .core.errors import SignatureError as SignatureError
from .core.errors import StorageError as StorageError
from .core.errors import TrainingError as TrainingError
from .core.errors import TrainloadError as TrainloadError
from .core.errors import UnsafePackageError as UnsafePackageError
from .core.errors import VersionError as VersionError
from .core.errors import WeightsError as WeightsError
from .core.errors import WorkError as WorkError
from .exporting.export_graphs import Exported as Exported
from .exporting.export_graphs import export as export
from .freezing.freeze import freeze as freeze
from .freezing.record import record as record
from .launching.api.compare_steps import RunComparison as RunComparison
from .launching.api.compare_steps import compare_run as compare_run
from .launching.api.debug_step import Diagnosis as Diagnosis
from .launching.api.debug_step import debug as debug
from .launching.api.evaluate import EvaluationResult as EvaluationResult
from .launching.api.evaluate import evaluate as evaluate
from .launching.api.fill import fill as fill
from .launching.api.launch import dry_run as dry_run
from .launching.api.launch import launch as launch
from .launching.api.launch import resume as resume
from .launching.api.make_build import BuildReport as BuildReport
from .launching.api.make_build import build as build
from .launching.api.open_package import open as open
from .launching.api.profile_run import Profile as Profile
from .launching.api.profile_run import profile as profile
from .launching.api.verified_build import verify_build as verify_build
from .launching.data.arrow_file import write_rows as write_rows
from .launching.run.journal import Event as Event
from .launching.run.result import RunResult as RunResult
from .launching.settings.adapters import Adapters as Adapters
from .launching.settings.overrides import Overrides as Overrides
from .launching.settings.run_settings import RunSettings as RunSettings
from .packaging.package import Package as Package
from .passes import Pass as Pass
from .publishing.stores import Store as Store
from .publishing.stores import gc as gc
from .publishing.stores import promote as promote
from .publishing.stores import pull as pull
from .publishing.stores import push as push
from .publishing.stores import push_build as push_build
from .publishing.stores import releases as releases
from .publishing.trust import diff as diff
from .publishing.trust import sign as sign
from .publishing.trust import verify as verify
from .sharding.planner.make_plan import plan as plan
from .sharding.planner.simulate import simulate as simulate
from .sharding.plans.plan import Cluster as Cluster
from .sharding.plans.plan import Plan as Plan
from .transforms.apply import transform as transform

__all__: list[str]
__version__: str
