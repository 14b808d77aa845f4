"""Dispatch of batches to variants, and the errors for batches that no variant accepts."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from trainload.capture.guard import FixedValue, Guard, InputGuard, fixed_value
from trainload.capture.guards.dispatch import Dispatcher
from trainload.core.errors import DataError

X = InputGuard("x", "float32", ("batch", "x_1"))
RANGES = {"batch": (1, None), "x_1": (2, 8)}
MASK = InputGuard("mask", "bool", ("batch", "x_1"))
PLAIN = Guard((X,), RANGES, absent=("mask",))
MASKED = Guard((MASK, X), RANGES)
SHORT = Guard((X,), {"batch": (1, None), "x_1": (2, 3)}, absent=("mask",))
LONG = Guard((X,), {"batch": (1, None), "x_1": (9, None)}, ("x_1 % 2 == 0",), absent=("mask",))


def rows(length: int = 5, **more: object) -> dict[str, object]:
    return {"x": torch.randn(3, length), **more}


def mask(length: int = 5) -> Tensor:
    return torch.ones(3, length, dtype=torch.bool)


def of(**guards: Guard) -> Dispatcher:
    return Dispatcher(
        "train", {name.removeprefix("first"): [guard] for name, guard in guards.items()}
    )


def refusal(dispatcher: Dispatcher, batch: dict[str, object]) -> str:
    with pytest.raises(DataError) as raised:
        dispatcher.pick(batch)
    return str(raised.value)


def test_an_input_that_is_there_picks_the_variant_that_has_it() -> None:
    assert of(first=PLAIN, masked=MASKED).pick(rows(mask=mask())) == "masked"


@pytest.mark.parametrize("batch", [rows(), rows(mask=None)])
def test_an_input_that_is_none_or_not_there_picks_the_variant_that_lacks_it(
    batch: dict[str, object],
) -> None:
    assert of(masked=MASKED, first=PLAIN).pick(batch) == ""


def test_the_first_that_takes_the_batch_is_picked() -> None:
    assert of(first=SHORT, wide=PLAIN).pick(rows(3)) == ""
    assert of(wide=PLAIN, first=SHORT).pick(rows(3)) == "wide"


@pytest.mark.parametrize(("length", "variant"), [(5, ""), (10, "long")])
def test_a_range_picks(length: int, variant: str) -> None:
    assert of(first=PLAIN, long=LONG).pick(rows(length)) == variant


def test_a_condition_is_asked_again_after_it_was_remembered() -> None:
    dispatcher = of(first=LONG)
    assert [dispatcher.pick(rows(10)) for _ in range(3)] == ["", "", ""]
    for _ in range(2):
        assert "x_1 % 2 == 0" in refusal(dispatcher, rows(11))


class Task(enum.Enum):
    CAPTION = 1
    ANSWER = 2


class Word(enum.StrEnum):
    LEFT = "left"


def flagged(value: object) -> Guard:
    return Guard((X,), RANGES, constants={"flag": fixed_value(value)})


@pytest.mark.parametrize("value", [True, 3, 0.5, "text", Task.CAPTION, Word.LEFT])
def test_a_constant_picks(value: object) -> None:
    assert of(first=flagged("another"), second=flagged(value)).pick(rows(flag=value)) == "second"


def test_the_name_of_a_member_picks_where_its_class_is_unknown() -> None:
    assert (
        of(first=flagged(Task.ANSWER), second=flagged(Task.CAPTION)).pick(rows(flag="CAPTION"))
        == "second"
    )


@pytest.mark.parametrize(
    ("given", "wanted"), [(1, True), (1, 1.0), ("1", 1), (Task.CAPTION, Task.ANSWER)]
)
def test_a_constant_of_another_kind_or_value_does_not_fit(given: object, wanted: object) -> None:
    assert "flag: expected" in refusal(
        of(first=flagged(wanted), second=flagged("another")), rows(flag=given)
    )


def test_a_constant_on_which_all_variants_agree_need_not_be_given() -> None:
    assert of(first=flagged(3), second=flagged(3)).pick(rows()) == ""


def test_a_constant_on_which_all_variants_agree_may_not_be_another() -> None:
    assert "flag: expected 3, got 4" in refusal(of(first=flagged(3)), rows(flag=4))


def test_a_constant_that_is_not_given_is_as_the_first_variant_has_it() -> None:
    assert of(first=flagged(3), second=flagged(4)).pick(rows()) == ""
    assert "flag: expected 4, got nothing, which means 3" in refusal(
        of(first=replace(flagged(3), ranges={**RANGES, "x_1": (9, 9)}), second=flagged(4)), rows()
    )


def test_a_constant_that_the_first_variant_lacks_must_be_given() -> None:
    first = replace(PLAIN, ranges={**RANGES, "x_1": (9, 9)})
    assert "flag: expected 4, got nothing" in refusal(of(first=first, second=flagged(4)), rows())


def test_a_variant_that_lacks_a_constant_takes_a_batch_without_it() -> None:
    assert (
        of(
            first=replace(flagged(3), absent=("mask",)), masked=replace(MASKED, absent=("flag",))
        ).pick(rows(mask=mask()))
        == "masked"
    )


def test_a_symbol_has_one_value() -> None:
    assert "x[1]: expected 5, as mask[1], got 6" in refusal(of(first=MASKED), rows(6, mask=mask(5)))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": torch.randn(3, 5).double()}, "x: expected float32[batch, x_1], got float64[3, 5]"),
        ({"x": torch.randn(3)}, "x: expected float32[batch, x_1], got float32[3]"),
        ({"x": torch.randn(3, 9)}, "x[1]: expected 2 to 8, got 9"),
        ({}, "x: expected float32[batch, x_1], got nothing"),
        ({"x": torch.randn(3, 5), "mask": mask()}, "mask: expected nothing, got bool[3, 5]"),
    ],
)
def test_what_does_not_fit_is_said(batch: dict[str, object], said: str) -> None:
    assert said in refusal(of(first=PLAIN), batch)


def test_the_nearest_variant_is_said_first() -> None:
    said = refusal(of(first=PLAIN, masked=MASKED, long=LONG), rows(9, mask=mask(9)))
    assert said.index("masked: ") < said.index("the first: ")
    assert said.index("masked: ") < said.index("long: ")
    assert "none of the 3 variants" in said


def test_what_no_variant_knows_is_refused_by_name() -> None:
    assert "entries that no variant accepts: 'other'" in refusal(
        of(first=PLAIN), rows(other=torch.ones(3))
    )


def test_what_other_graphs_know_is_passed_over() -> None:
    dispatcher = Dispatcher("predict", {"": [Guard((X,), RANGES)]}, ignored={"label"})
    assert dispatcher.pick(rows(label=torch.ones(3))) == ""


@dataclass
class Pair:
    left: Tensor
    right: Tensor | None = None


def test_a_nested_batch_is_taken_apart() -> None:
    left = Guard(
        (InputGuard("pair.left", "float32", ("batch",)),),
        {"batch": (1, None)},
        absent=("pair.right",),
    )
    both = Guard(
        (
            InputGuard("pair.left", "float32", ("batch",)),
            InputGuard("pair.right", "float32", ("batch",)),
        ),
        {"batch": (1, None)},
    )
    dispatcher = of(first=left, both=both)
    assert dispatcher.pick({"pair": Pair(torch.ones(3))}) == ""
    assert dispatcher.pick({"pair": Pair(torch.ones(3), torch.ones(3))}) == "both"


def test_a_derived_size_must_be_what_the_symbol_makes_it() -> None:
    guard = Guard((X, InputGuard("y", "float32", ("batch", "2*x_1 + 1"))), RANGES)
    assert of(first=guard).pick(rows(3, y=torch.ones(3, 7))) == ""
    assert "y[1]: expected 2*x_1 + 1 = 7, got 6" in refusal(
        of(first=guard), rows(3, y=torch.ones(3, 6))
    )


def test_all_graphs_that_run_on_a_batch_must_take_it() -> None:
    dispatcher = Dispatcher("the loop", {"": [PLAIN, SHORT], "wide": [PLAIN, PLAIN]})
    assert (dispatcher.pick(rows(3)), dispatcher.pick(rows(5))) == ("", "wide")


def test_what_feeds_a_graph_is_not_expected_of_the_batch() -> None:
    fed = Guard(
        (X, InputGuard("logits", "float32", ("batch", "logits_1"))),
        {**RANGES, "logits_1": (2, None)},
        ("logits_1 < x_1",),
    )
    assert Dispatcher("student", {"": [fed]}, fed={"logits"}).pick(rows()) == ""


def test_a_constant_is_told_as_it_was_written() -> None:
    assert [str(fixed_value(v)) for v in (None, True, 2, 0.5, "a", Task.CAPTION, Word.LEFT)] == [
        "None",
        "True",
        "2",
        "0.5",
        "'a'",
        "CAPTION",
        "'left'",
    ]
    assert fixed_value(Word.LEFT) == FixedValue("str", "left")
