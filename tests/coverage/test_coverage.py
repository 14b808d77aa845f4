"""A few cases of the coverage suite in all stages, and the suite's page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.coverage.cases import CASES, case_named
from tests.coverage.stages import (
    INTERPRETED,
    PASSED,
    REFUSED,
    STAGES,
    after_elsewhere,
    before_elsewhere,
    difference,
    outcome,
)
from tests.coverage.suite import visit
from tests.coverage.table import TABLE, became
from tests.laws.isolated import make_environment

pytestmark = pytest.mark.slow

QUICK = (
    "no_grad",
    "cond over parameters of a closure",
    "checkpoint with dropout",
    "sdpa with dropout",
    "LSTM with dropout between layers",
    "loss with weight and metrics",
    "tied parameters",
    "columns that are views",
    "a fixed batch size",
)
REFUSALS = ("if on a value of the batch", "a write to a parameter in forward")


@pytest.fixture(scope="module")
def outcomes(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name -> result of the case."""
    folder = tmp_path_factory.mktemp("coverage")
    told = {
        name: (folder / str(number), *before_elsewhere(case_named(name), folder / str(number)))
        for number, name in enumerate(QUICK)
    }
    environment = dataclasses.replace(make_environment(folder / "venv", wheel), prefix=())
    visit(environment, [place for place, _, extra in told.values() if "two_rows" in extra], folder)
    for name, (place, stages, extra) in told.items():
        if "two_rows" in extra:
            after_elsewhere(case_named(name), place, stages, extra)
    return {name: outcome(stages, extra) for name, (_, stages, extra) in told.items()}


@pytest.mark.parametrize("name", QUICK)
def test_a_case_passes_every_stage(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    stages = outcomes[name]["stages"]
    static = name == "a fixed batch size"
    left = ("bfloat16", *(("dynamic batch", "two workers") if static else ()))
    assert {
        s: stages[s]["error"]
        for s in STAGES
        if stages[s]["state"] not in (PASSED, INTERPRETED) and s not in left
    } == {}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_case_without_a_sound_capture_is_refused(name: str, tmp_path: Path) -> None:
    assert case_named(name).refused
    stages, extra = before_elsewhere(case_named(name), tmp_path / "case")
    assert became(outcome(stages, extra)) == REFUSED


def test_the_page_lists_every_case() -> None:
    text = TABLE.read_text()
    assert [case.name for case in CASES if f"\n| {case.name} |" not in text] == []


def test_no_two_cases_have_one_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_refusal_says_why_no_sound_capture_exists() -> None:
    assert [case.name for case in CASES if case.refused and len(case.refused) < 30] == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (torch.tensor([1.0, 2.0]), ""),
        (torch.tensor([1.0, 2.002]), "first.weight"),
        (torch.tensor([1.0, float("nan")]), "first.weight"),
        (torch.ones(3), "first.weight"),
    ],
)
def test_a_wrong_gradient_is_seen(found: torch.Tensor, said: str) -> None:
    eager = {"gradient/first.weight": torch.tensor([1.0, 2.0]), "loss/loss": torch.tensor(3.0)}
    problem = difference(
        eager, {"gradient/first.weight": found, "loss/loss": torch.tensor(3.0)}, 1e-5
    )
    assert (said in problem) if said else problem == ""


@pytest.mark.parametrize(
    ("eager", "found", "right"),
    [
        (1.1, 0.9, True),
        (1.1, 1.14, True),
        (1.1, 1.2, False),
        (1.0, 1.2, False),
        (float("nan"), 1.0, False),
        (1.1, float("nan"), False),
    ],
)
def test_a_rounded_gradient_may_be_as_far_from_the_precise_one_as_eagers(
    eager: float, found: float, right: bool
) -> None:
    rounded, graph, precise = ({"gradient/a": torch.tensor(value)} for value in (eager, found, 1.0))
    assert (difference(rounded, graph, 1e-3, precise) == "") == right


def test_a_missing_gradient_is_seen() -> None:
    eager = {"gradient/a": torch.tensor(1.0), "gradient/b": torch.tensor(0.0)}
    assert "gradient a" in difference(eager, {"gradient/b": torch.tensor(0.0)}, 1e-5)
    assert difference(eager, {"gradient/a": torch.tensor(1.0)}, 1e-5) == ""
