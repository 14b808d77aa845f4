"""All cases of the suite, in the order of the table.

Importing this module imports neither transformers nor timm.
"""

from __future__ import annotations

from tests.coverage import inputs
from tests.coverage.case import Case
from tests.coverage.models import (
    autograd,
    control_flow,
    derivatives,
    draws,
    exportdb,
    functional,
    functions,
    images,
    numerics,
    recipes,
    sequences,
    state,
    timm_models,
    transformers_models,
)

FAMILIES = (
    control_flow,
    autograd,
    functions,
    derivatives,
    sequences,
    images,
    draws,
    functional,
    numerics,
    recipes,
    state,
    inputs,
    exportdb,
    transformers_models,
    timm_models,
)
CASES: tuple[Case, ...] = tuple(case for module in FAMILIES for case in module.FAMILY.cases)


def case_named(name: str) -> Case:
    """Return the case with this name.

    Raises:
        KeyError: no case has this name.
    """
    return {case.name: case for case in CASES}[name]
