"""Fixes that torch suggests are parsed by a grammar, applied and recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.capture.jobs import Batch
from tests.capture.shape_jobs import (
    added,
    asked,
    asserting,
    branching,
    free,
    positioned,
    reshaped,
    strided,
)
from torch.export import Dim

from trainload.capture.job.declared_sizes import spelled
from trainload.capture.shapes.shape_fixes import (
    Fix,
    apply_fixes,
    suggested_fixes,
    with_suggested_fixes,
)
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError

# Each loss uses only a part of the model.
pytestmark = pytest.mark.filterwarnings("ignore:.* get no gradient")


def refused(*lines: str) -> CaptureError:
    """Return an error like those of torch.export, with these suggestions."""
    error = CaptureError("the graph cannot be captured")
    listed = "\n  ".join(lines)
    error.__cause__ = ValueError(
        "Constraints violated (a)!\n"
        "  - why.\n\n"
        "Suggested fixes:\n"
        f"  {listed}\n\n"
        "The error above occurred when a = 3"
    )
    return error


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("seq = 8", Fix("seq", "seq = 8", number=8)),
        ("seq = Dim('seq', max=16)", Fix("seq", "seq = Dim('seq', max=16)", most=16)),
        ("seq = Dim('seq', min=3)", Fix("seq", "seq = Dim('seq', min=3)", least=3)),
        (
            "seq = Dim('seq', min=3, max=16)",
            Fix("seq", "seq = Dim('seq', min=3, max=16)", least=3, most=16),
        ),
        (
            "_seq = Dim('_seq', min=1, max=oo)",
            Fix("_seq", "_seq = Dim('_seq', min=1, max=oo)", least=1),
        ),
        ("_seq = Dim('_seq')", Fix("_seq", "_seq = Dim('_seq')")),
        ("b = a", Fix("b", "b = a", root="a")),
        ("seq = 2*_seq", Fix("seq", "seq = 2*_seq", root="_seq", factor=2)),
        ("b = a + 1", Fix("b", "b = a + 1", root="a", offset=1)),
        ("b = 3*a - 4", Fix("b", "b = 3*a - 4", root="a", factor=3, offset=-4)),
    ],
)
def test_a_suggestion_is_read(line: str, fix: Fix) -> None:
    assert suggested_fixes(refused(line)) == (fix,)


@pytest.mark.parametrize(
    "line",
    [
        "seq = __import__('os').system('true')",
        "seq = Dim('other', max=16)",
        "seq = Dim('seq', max=16); x = 1",
        "seq = 2**_seq",
        "seq = a + b",
        "seq == 8",
        "seq.x = 8",
        "seq = -1",
        "",
    ],
)
def test_a_line_of_another_form_is_no_suggestion(line: str) -> None:
    assert suggested_fixes(refused(line)) == ()


def test_a_message_without_suggestions_has_none() -> None:
    error = CaptureError("no")
    error.__cause__ = ValueError("a = 3")
    assert suggested_fixes(error) == ()


BATCH = {"x": torch.zeros(4, 6), "y": torch.zeros(4, 12)}
ROWS = Dim("batch", min=1)
A, B = Dim("a", min=4, max=64), Dim("b")


@pytest.mark.parametrize(
    ("declared", "lines", "x", "y"),
    [
        ((A, B), ["a = 6"], "Dim.STATIC", "Dim('b')"),
        ((A, B), ["a = Dim('a', max=16)"], "Dim('a', min=4, max=16)", "Dim('b')"),
        ((A, B), ["a = Dim('a', min=2, max=99)"], "Dim('a', min=4, max=64)", "Dim('b')"),
        ((A, B), ["b = 2*a"], "Dim('a', min=4, max=64)", "2*a"),
        ((A, B), ["a = Dim('a', max=16)", "b = 2*a"], "Dim('a', min=4, max=16)", "2*a"),
        ((A, B), ["_a = Dim('_a', min=2, max=32)", "a = 2*_a"], "2*_a", "Dim('b')"),
        ((A, B), ["_a = Dim('_a', min=2, max=9)", "a = 2*_a", "b = a"], "2*_a", "2*_a"),
        ((A, B), ["a = 6", "b = a"], "Dim.STATIC", "Dim.STATIC"),
        ((A, 2 * A), ["a = Dim('a', max=16)"], "Dim('a', min=4, max=16)", "2*a"),
        ((A, 2 * A), ["a = 6"], "Dim.STATIC", "Dim.STATIC"),
        ((A, 2 * A), ["_a = Dim('_a')", "a = 3*_a"], "3*_a", "6*_a"),
        ((A, 2 * A), ["a = Dim('a', min=6, max=6)"], "Dim.STATIC", "Dim.STATIC"),
        ((A, Dim.AUTO), ["a = 6"], "Dim.STATIC", "Dim.AUTO"),
    ],
)
def test_a_suggestion_changes_every_dim_that_it_is_about(
    declared: tuple[Any, Any], lines: list[str], x: str, y: str
) -> None:
    shapes = {"x": {0: ROWS, 1: declared[0]}, "y": {0: ROWS, 1: declared[1]}}
    changed, _ = apply_fixes(suggested_fixes(refused(*lines)), shapes, "train")
    assert (spelled(changed["x"][1]), spelled(changed["y"][1])) == (x, y)


@pytest.mark.parametrize("line", ["a = batch", "batch = 2*a", "batch = a"])
def test_rows_are_never_made_to_depend_on_another_size(line: str) -> None:
    with pytest.raises(CaptureError, match="depend on the number of rows"):
        apply_fixes(suggested_fixes(refused(line)), {"x": {0: ROWS, 1: A}}, "train")


@pytest.mark.slow  # test_freeze_shapes.py and a test below cover the result
@pytest.mark.parametrize(
    ("output", "names", "declared", "shape", "applied"),
    [
        (
            reshaped,
            ["x"],
            {"x": {1: Dim("seq")}},
            (6,),
            "x[1]: Dim('seq') became Dim.STATIC for the train graph",
        ),
        (
            reshaped,
            ["x"],
            {"x": {1: Dim.DYNAMIC}},
            (6,),
            "x[1]: Dim.DYNAMIC became Dim.STATIC for the train graph",
        ),
        (
            branching,
            ["x"],
            {"x": {1: Dim("seq")}},
            ("x_1",),
            "x[1]: Dim('seq') became Dim('seq', max=16) for the train graph",
        ),
        (
            positioned,
            ["x"],
            {"x": {1: Dim("seq", max=99)}},
            ("x_1",),
            "x[1]: Dim('seq', max=99) became Dim('seq', max=16) for the train graph",
        ),
        (
            added,
            ["x", "y"],
            {"x": {1: Dim("a")}, "y": {1: Dim("b")}},
            ("x_1", "x_1"),
            "y[1]: Dim('b') became Dim('a') for the train graph",
        ),
    ],
)
def test_a_job_that_torch_refuses_is_captured_as_torch_suggests(
    output: Any, names: list[str], declared: Any, shape: tuple[object, ...], applied: str
) -> None:
    given = asked(output, *names, dynamic=declared)
    with pytest.raises(CaptureError, match=r"certain sizes|only one size"):
        capture(given)
    changed, fixes = with_suggested_fixes(given)
    assert tuple(i.shape[1] for i in capture(changed).graphs["train"].inputs) == shape
    assert [str(fix) for fix in fixes] == [applied]


def test_a_job_that_torch_takes_is_left_as_it_is() -> None:
    given = asked(free, dynamic={"x": {1: Dim("seq")}})
    assert with_suggested_fixes(given) == (given, ())


def test_a_graph_other_than_the_first_has_its_fixes_too() -> None:
    def predict(m: Any, b: Batch) -> Any:
        return branching(m, b)

    changed, fixes = with_suggested_fixes(
        replace(asked(free, dynamic={"x": {1: B}}), predict=predict)
    )
    assert [(fix.graph, fix.after) for fix in fixes] == [("predict", "Dim('b', max=16)")]
    assert [g.inputs[0].shape[1] for g in capture(changed).graphs.values()] == ["x_1"] * 3


def test_suggestions_that_do_not_help_leave_torchs_refusal() -> None:
    with pytest.raises(CaptureError, match=r"certain sizes|only one size"):
        with_suggested_fixes(asked(strided, dynamic={"x": {1: Dim("seq")}}))


def test_a_batch_dim_that_must_be_even_is_not_mended() -> None:
    with pytest.raises(
        CaptureError, match=r"depend on the number of rows.*got the batch dim 2\*_batch"
    ):
        with_suggested_fixes(asked(asserting))


def test_a_batch_dim_may_be_narrowed() -> None:
    def few(m: Any, b: Batch) -> Any:
        assert b["x"].shape[0] <= 16
        return m.linear(b["x"])

    changed, fixes = with_suggested_fixes(asked(few))
    assert [fix.after for fix in fixes] == ["Dim('batch', min=1, max=16)"]
    assert capture(changed).graphs["train"].inputs[0].shape == ("batch", 6, 8)
