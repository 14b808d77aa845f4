"""Load the state of a rank: from a checkpoint, or that with which a run begins."""

from __future__ import annotations

from trainload.launching.checkpoints.load import load_sharded
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.worker.rank_state import RankState
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

SCALING = "loss scaling"
"""Key of the loss scales in the `user` entries of a checkpoint."""


def load_checkpoint(checkpoint: Checkpoint, plan: Plan, rank: int, held: RankState) -> None:
    """Load a rank's state under a plan from a checkpoint, which another plan may have written."""
    held.load(load_sharded(checkpoint, plan, rank), checkpoint.index.user.get(SCALING))


def load_beginning(spec: RunSpec, package: Package, plan: Plan, rank: int, held: RankState) -> None:
    """Load the state with which a run begins: the weights of its package, and the optimizer's state
    of another run if it begins from one.
    """
    if package.given is not None:
        package.given.begin()
    held.load_package()
    if spec.optimizer_from is not None:
        before = Checkpoint.open(spec.optimizer_from)
        state = load_sharded(before, plan, rank, state_alone=True)
        held.load_optimizer(state, before.index.user.get(SCALING))
