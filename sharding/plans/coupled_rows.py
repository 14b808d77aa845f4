"""Warn that a plan's results differ from one process's if rows of one call depend on one
another.
"""

from __future__ import annotations

from trainload.packaging.format.manifest import Manifest
from trainload.sharding.plans.plan import Plan


def note_on_coupled_rows(manifest: Manifest, plan: Plan) -> str | None:
    """Return a note for the user, or None if the plan's losses equal those of one process on the
    whole global batch.

    Args:
        manifest: manifest of the planned package; freezing records in it which graphs couple rows.
        plan: plan for the package.
    """
    coupled = [name for name in manifest.training_graphs() if manifest.graphs[name].coupled]
    calls = plan.accumulate * plan.data_ranks
    normalised = any("batch_norm" in name for name in manifest.ops)
    if (
        not coupled
        or calls == 1
        or (normalised and plan.batch_norm == "synchronised" and plan.accumulate == 1)
    ):
        return None
    note = (
        f"rows of one call depend on each other in graph {', '.join(coupled)} (through batch norm"
        " or in-batch negatives, for example), so losses and gradients depend on the rows of a"
        f" call: here {plan.rows_per_call} of {plan.global_batch}"
    )
    if normalised and plan.batch_norm != "synchronised":
        note += ". With --batch-norm synchronised, batch norm uses the rows of all ranks"
    return note
