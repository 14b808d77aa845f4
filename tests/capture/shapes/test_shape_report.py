"""Shape reports name the line that restricts a size, and the code that allows more sizes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.jobs import Batch, job
from tests.capture.shape_jobs import (
    Parts,
    added,
    asked,
    asserting,
    branching,
    free,
    line_of,
    positioned,
    reshaped,
    strided,
    strided_target,
    whole_positions,
)
from torch.export import Dim

from trainload.capture.shapes.shape_report import DimReport, ShapeReport, explain_shapes
from trainload.core.errors import CaptureError


def dim(report: ShapeReport, name: str, number: int) -> DimReport:
    return next(d for d in report.dims if (d.input, d.dim) == (name, number))


DECLARED: dict[str, Any] = {
    "named": Dim("seq"),
    "auto": Dim.AUTO,
    "dynamic": Dim.DYNAMIC,
    "fixed": None,
}


@functools.cache
def explained(output: Callable[..., Any], name: str, number: int, declared: str) -> ShapeReport:
    """Return the report of a job with one dim declared in this way."""
    return explain_shapes(asked(output, name, dynamic={name: {number: DECLARED[declared]}}))


@pytest.mark.matrix("reshaped-*-named", "positioned-*-named", "branching-*-fixed")
@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize(
    ("output", "name", "number", "condition", "relax"),
    [
        (reshaped, "x", 1, "8*batch*SIZE == 48*batch", "Change PLACE, which needs CONDITION"),
        (branching, "x", 1, "SIZE <= 16", "Change PLACE, which needs CONDITION"),
        (positioned, "x", 1, "SIZE <= 16", "Change PLACE, which needs CONDITION"),
        (whole_positions, "long", 1, "SIZE == 16", "Change PLACE, which needs CONDITION"),
        (strided, "x", 1, "SIZE >= 3", "Change PLACE, which needs CONDITION"),
    ],
)
def test_the_line_that_restricts_a_dim_is_named(
    output: Callable[..., Any], name: str, number: int, condition: str, relax: str, declared: str
) -> None:
    report = dim(explained(output, name, number, declared), name, number)
    place, line = line_of(output)
    wanted = condition.replace("SIZE", "seq" if declared == "named" else f"{name}[{number}]")
    assert (report.causes[0].place, report.causes[0].line, report.causes[0].condition) == (
        place,
        line,
        wanted,
    )
    if declared != "fixed":
        assert report.relax.startswith(relax.replace("PLACE", place).replace("CONDITION", wanted))


@pytest.mark.matrix("reshaped-*", "positioned-*", "strided-*")
@pytest.mark.parametrize(
    ("output", "name", "symbol", "limits"),
    [
        (reshaped, "x", None, (6, 6)),
        (branching, "x", "x_1", (2, 16)),
        (positioned, "x", "x_1", (2, 16)),
        (whole_positions, "long", None, (16, 16)),
        (strided, "x", "x_1", (3, None)),
        (free, "x", "x_1", (2, None)),
    ],
)
def test_a_dim_left_to_torch_has_the_range_that_the_model_takes(
    output: Callable[..., Any], name: str, symbol: str | None, limits: tuple[int, int | None]
) -> None:
    found = explained(output, name, 1, "auto")
    report = dim(found, name, 1)
    assert (report.symbol, report.least, report.most, found.refused) == (symbol, *limits, ())


@pytest.mark.matrix("reshaped-*", "positioned-*")
@pytest.mark.parametrize(
    ("output", "fix"),
    [
        (reshaped, "seq = 6"),
        (branching, "seq = Dim('seq', max=16)"),
        (positioned, "seq = Dim('seq', max=16)"),
        (strided, "seq = Dim('seq', min=3)"),
    ],
)
def test_a_dim_that_torch_refuses_has_what_the_model_takes_and_what_torch_suggests(
    output: Callable[..., Any], fix: str
) -> None:
    report = explained(output, "x", 1, "named")
    by_torch = dim(explained(output, "x", 1, "auto"), "x", 1)
    assert (dim(report, "x", 1).least, dim(report, "x", 1).most) == (by_torch.least, by_torch.most)
    assert report.refused
    assert report.fixes == (fix,)


def test_a_batch_dim_that_must_be_even_is_laid_to_its_line() -> None:
    report = explain_shapes(asked(asserting))
    place, line = line_of(asserting)
    (cause,) = dim(report, "x", 0).causes
    assert (cause.place, cause.line, cause.condition) == (place, line, "batch % 2 == 0")
    assert dim(report, "x", 0).relax == f"Change {place}, which needs batch % 2 == 0."
    assert report.refused == (
        (
            "Not all values of batch = x[0] in the specified range satisfy the generated guard"
            " (x[0] % 2) == 0"
        ),
    )


def test_dims_that_must_be_equal_name_each_other() -> None:
    report = explain_shapes(
        asked(added, "x", "y", dynamic={"x": {1: Dim("a")}, "y": {1: Dim("b")}})
    )
    place, _ = line_of(added)
    for name in ("x", "y"):
        found = dim(report, name, 1)
        assert (found.symbol, [c.condition for c in found.causes]) == ("a", ["a == b"])
        assert found.relax == f"Declare them as one Dim, or change {place}, which needs a == b."
    assert report.fixes == ("b = a",)


@pytest.mark.slow  # a test below covers rows that are declared equal
def test_dims_that_are_declared_equal_have_no_cause() -> None:
    seq = Dim("seq")
    report = explain_shapes(asked(added, "x", "y", dynamic={"x": {1: seq}, "y": {1: seq}}))
    assert [(d.symbol, d.causes, d.relax) for d in report.dims if d.dim == 1] == [
        ("seq", (), "")
    ] * 2
    assert report.refused == ()


def test_rows_have_no_cause_in_each_other() -> None:
    report = explain_shapes(asked(added, "x", "y"))
    assert [(d.symbol, d.causes, d.relax) for d in report.dims if d.dim == 0] == [
        ("batch", (), "")
    ] * 2


def test_a_stride_makes_a_derived_dim_and_its_line_is_named() -> None:
    report = explain_shapes(
        asked(strided_target, "x", "target", dynamic={"x": {1: Dim.AUTO}, "target": {2: Dim.AUTO}})
    )
    place, line = line_of(strided_target)
    tie = next(c for c in dim(report, "target", 2).causes if c.condition.endswith("== target[2]"))
    assert (tie.place, tie.line) == (place, line)
    assert "x[1]" in tie.condition
    assert tie in dim(report, "x", 1).causes


def test_a_derived_dim_is_shown_as_declared() -> None:
    half = Dim("half", min=2)
    given = job(
        Parts(),
        batch={"x": torch.randn(4, 6, 8), "w": torch.randn(4, 12)},
        loss=lambda m, b: m.linear(b["x"]).mean() + b["w"].mean(),
        dynamic={"x": {1: half}, "w": {1: 2 * half}},
    )
    report = explain_shapes(given)
    assert [(d.symbol, d.declared) for d in report.dims if d.dim == 1] == [
        ("2*half", "2*half"),
        ("half", "Dim('half', min=2)"),
    ]


def test_a_fixed_dim_that_could_be_dynamic_says_what_to_write() -> None:
    found = dim(explain_shapes(asked(branching)), "x", 1)
    assert (found.symbol, found.least, found.most, found.declared) == (None, 6, 6, "")
    assert found.relax == "Write dynamic={'x': {1: Dim('x_1', max=16)}}."


@pytest.mark.matrix("added-*")
@pytest.mark.parametrize(
    ("output", "names"),
    [(branching, ["x"]), (added, ["x", "y"]), (strided, ["x"]), (strided_target, ["x", "target"])],
)
def test_what_it_says_to_write_is_taken(output: Callable[..., Any], names: list[str]) -> None:
    advice = [
        d.relax
        for d in explain_shapes(asked(output, *names)).dims
        if d.relax.startswith("Write dynamic=")
    ]
    assert advice
    dynamic: dict[str, dict[int, Any]] = {}
    for text in advice:
        for name, dims in eval(
            text.removeprefix("Write dynamic=").removesuffix("."), {"Dim": Dim}
        ).items():
            dynamic.setdefault(name, {}).update(dims)
    report = explain_shapes(asked(output, *names, dynamic=dynamic))
    assert report.refused == ()
    assert [d.symbol for d in report.dims if d.input == "x" and d.dim == 1] == ["x_1"]


def test_a_size_of_the_models_own_is_laid_to_the_line_that_has_it() -> None:
    found = dim(explain_shapes(asked(free)), "x", 2)
    assert [c.condition for c in found.causes] == ["x[2] == 8"]
    assert found.causes[0].line == 'return m.linear(b["x"])'
    assert found.relax.endswith("then write dynamic={'x': {2: Dim('x_2')}}.")


def test_a_length_of_1_asks_for_a_longer_example() -> None:
    given = job(
        Parts(),
        batch={"x": torch.randn(4, 1, 8)},
        loss=lambda m, b: free(m, b).mean(),
        dynamic={"x": {1: Dim.AUTO}},
    )
    assert dim(explain_shapes(given), "x", 1).relax.startswith("Use an example of length 2 or more")


def test_a_declared_limit_says_to_raise_it() -> None:
    report = explain_shapes(asked(free, dynamic={"x": {1: Dim("seq", min=4, max=64)}}))
    assert (
        dim(report, "x", 1).relax
        == "Raise the max of Dim('seq', min=4, max=64). Lower the min of Dim('seq', min=4, max=64)."
    )


@pytest.mark.slow
def test_what_cannot_be_captured_for_another_reason_is_an_error() -> None:
    def data_dependent(m: Any, b: Batch) -> Any:
        return m.linear(b["x"]) if b["x"].sum() > 0 else m.linear(-b["x"])

    with pytest.raises(CaptureError, match=r"only known at\s+run\s+time"):
        explain_shapes(asked(data_dependent))


def test_explaining_leaves_torchs_logger_and_the_model_as_they_were() -> None:
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    given = asked(branching)
    given.model.eval()
    before = (
        list(logger.handlers),
        logger.level,
        logger.disabled,
        logger.propagate,
        torch.random.get_rng_state().tolist(),
    )
    explain_shapes(given)
    after = (
        list(logger.handlers),
        logger.level,
        logger.disabled,
        logger.propagate,
        torch.random.get_rng_state().tolist(),
    )
    assert (after, given.model.training) == (before, False)
