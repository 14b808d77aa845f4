"""The decision to promote a challenger, and its reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainload.core.canonical_json import canonical_json
from trainload.core.errors import RequestError
from trainload.retraining.ticks.gate import Check, Verdict, decide

BETTER = {"eval.loss": 1.0, "champion.eval.loss": 1.1, "train.loss": 1.2}
WORSE = {**BETTER, "eval.loss": 1.2}
BAR = "eval.loss <= champion.eval.loss"


def sliced(**losses: float) -> dict[str, dict[str, float]]:
    return {
        f"country={name}": {**BETTER, "eval.loss": loss, "slice.rows": 50.0}
        for name, loss in losses.items()
    }


def test_a_better_challenger_is_promoted() -> None:
    assert decide(BAR, BETTER).promote


def test_a_worse_one_is_not_and_the_reason_has_the_numbers() -> None:
    verdict = decide(BAR, WORSE)
    assert (verdict.promote, verdict.reason) == (
        False,
        "eval.loss <= champion.eval.loss: 1.2 <= 1.1 is false",
    )


@pytest.mark.parametrize("name", ["train.loss", "eval.loss"])
def test_a_loss_that_is_no_number_is_refused_whatever_is_required(name: str) -> None:
    verdict = decide("1 < 2", {**BETTER, name: math.nan})
    assert (verdict.promote, verdict.reason) == (False, f"{name} is finite: nan")


def test_a_champion_whose_loss_is_no_number_lets_nobody_pass() -> None:
    assert not decide(BAR, {**BETTER, "champion.eval.loss": math.nan}).promote


def test_a_slice_that_is_worse_is_refused_by_name() -> None:
    verdict = decide(BAR, BETTER, slices_require=BAR, slices=sliced(DE=1.0, FR=1.5))
    assert (verdict.promote, verdict.reason) == (
        False,
        "country=FR: eval.loss <= champion.eval.loss: 1.5 <= 1.1 is false",
    )


def test_a_slice_of_few_rows_is_not_judged_and_that_is_said() -> None:
    verdict = decide(BAR, BETTER, slices_require=BAR, slices=sliced(FR=1.5), slice_least_rows=51)
    assert verdict.promote
    assert verdict.checks[-1] == Check(
        text="not judged: 50 rows, fewer than 51", slice="country=FR", holds=None, judged=False
    )


def test_a_column_that_has_drifted_is_warned_of() -> None:
    verdict = decide(BAR, BETTER, drift={"age": 0.3, "height": 0.1}, drift_warn=0.2)
    assert (verdict.promote, verdict.warnings) == (
        True,
        ("column age has drifted: 0.3, which reaches the warning level of 0.2",),
    )


def test_a_column_beyond_the_bar_is_refused() -> None:
    verdict = decide(BAR, BETTER, drift={"age": 1.5}, drift_warn=0.2, drift_bar=1.0)
    assert (verdict.promote, verdict.reason) == (
        False,
        "column age has drifted: 1.5, which reaches the bar of 1",
    )


def test_all_that_failed_is_told() -> None:
    verdict = decide("eval.loss < 1 and train.loss < 1", WORSE)
    assert verdict.reason == "eval.loss < 1: 1.2 < 1 is false; train.loss < 1: 1.2 < 1 is false"


def test_all_comparisons_are_kept_those_that_hold_too() -> None:
    assert [each.text for each in decide(BAR, BETTER).checks if each.right is not None] == [
        f"{BAR}: 1 <= 1.1 is true"
    ]


def test_a_name_without_a_value_is_an_error() -> None:
    with pytest.raises(RequestError, match="there is no such metric"):
        decide("eval.accuracy > 0.5", BETTER)


@pytest.mark.parametrize(
    "values",
    [BETTER, {**BETTER, "eval.loss": math.inf}, {**BETTER, "champion.eval.loss": math.nan}],
)
def test_a_verdict_is_json(values: dict[str, Any]) -> None:
    verdict = decide(BAR, values)
    assert Verdict.model_validate_json(canonical_json(verdict.model_dump(mode="json"))) == verdict


def test_the_reason_of_a_promotion_names_what_held_of_all_that_was_asked_for() -> None:
    values = {"eval.loss": 0.5, "champion.eval.loss": 0.75, "train.loss": 0.25}
    verdict = decide("eval.loss < 1 and train.loss < 1 and eval.loss < champion.eval.loss", values)
    assert [text.split(":")[0] for text in verdict.reason.split("; ")] == [
        "eval.loss < 1",
        "train.loss < 1",
        "eval.loss < champion.eval.loss",
    ]


def test_a_long_reason_says_how_many_more_there_are() -> None:
    verdict = decide(" and ".join(["eval.loss < 1"] * 5), {"eval.loss": 0.5, "train.loss": 0.25})
    assert verdict.reason.endswith("; and 2 more")
