"""Parameters of a run, as trackers list them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainload.launching.run.run_spec import read_spec


def parameters_of(run_dir: Path) -> dict[str, Any]:
    """Return the parameters of a run by name: its package, its steps, its strategy, its global
    batch, and the changes of what it trains as "set.lr".
    """
    spec = read_spec(run_dir)
    parameters = {
        "package": spec.digest,
        "steps": spec.steps,
        "strategy": spec.plan.strategy,
        "global_batch": spec.plan.global_batch,
    }
    changes = spec.overrides.model_dump(exclude_defaults=True)
    return parameters | {f"set.{name}": value for name, value in changes.items()}
