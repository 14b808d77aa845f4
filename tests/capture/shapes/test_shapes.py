"""Declarations of input sizes in a job."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.capture.jobs import Batch, Model, job, mean_square
from torch import Tensor, nn
from torch.export import Dim

from trainload.capture.job.declared_sizes import declared_shapes, spelled
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, JobError

X = {"x": torch.randn(4, 6, 8)}
PAIR = {"x": torch.randn(4, 6, 8), "y": torch.randn(4, 12)}
HALF = Dim("half", min=2, max=64)


def pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    return mean_square(model, batch) + batch["y"].mean()


def shape_of(said: Any) -> tuple[object, ...]:
    (spec,) = capture(job(Model(), batch=X, dynamic={"x": said})).graphs["train"].inputs
    return spec.shape


@pytest.mark.matrix("tuple")  # the tests below cover ranges, derived dims and automatic dims
@pytest.mark.parametrize(
    "said",
    [
        {1: Dim("seq")},
        {1: Dim("seq", min=2, max=64)},
        {1: Dim.AUTO},
        {1: Dim.AUTO(min=2, max=64)},
        {1: Dim.DYNAMIC},
        {1: 2 * HALF},
        {1: HALF + 1},
        {-2: Dim("seq")},
        (Dim("batch"), Dim("seq"), 8),
        [Dim("batch"), Dim("seq"), None],
    ],
    ids=[
        "named",
        "range",
        "auto",
        "auto range",
        "dynamic",
        "multiple",
        "sum",
        "from the end",
        "tuple",
        "list",
    ],
)
def test_a_dim_that_is_declared_dynamic_is_a_symbol(said: Any) -> None:
    assert shape_of(said) == ("batch", "x_1", 8)


@pytest.mark.matrix("static")
@pytest.mark.parametrize(
    "said",
    [{}, {1: Dim.STATIC}, {1: 6}, {1: None}, None, {1: Dim.STATIC, 2: 8}],
    ids=["nothing", "static", "size", "none", "no entry", "two"],
)
def test_a_dim_that_is_not_declared_dynamic_is_a_number(said: Any) -> None:
    assert shape_of(said) == ("batch", 6, 8)


@pytest.mark.matrix("said0")
@pytest.mark.parametrize("said", [{0: 4}, {0: None}, {0: Dim.STATIC}, (None, None, None)])
def test_a_batch_dim_that_is_fixed_is_a_number(said: Any) -> None:
    assert shape_of(said) == (4, 6, 8)


def test_a_dim_left_to_torch_is_a_number_where_the_model_has_one() -> None:
    model = Model(lambda m, x: x + m.positions, positions=torch.zeros(6, 8))
    (spec,) = capture(job(model, batch=X, dynamic={"x": {1: Dim.AUTO}})).graphs["train"].inputs
    assert spec.shape == ("batch", 6, 8)


def test_a_dim_shared_between_inputs_is_one_symbol() -> None:
    batch = {"x": torch.randn(4, 6, 8), "y": torch.randn(4, 6)}
    seq = Dim("seq")
    program = capture(
        job(Model(), batch=batch, loss=pair_loss, dynamic={"x": {1: seq}, "y": {1: seq}})
    )
    assert [i.shape for i in program.graphs["train"].inputs] == [
        ("batch", "x_1", 8),
        ("batch", "x_1"),
    ]


def test_a_derived_dim_is_tied_to_its_root() -> None:
    exported = (
        capture(
            job(Model(), batch=PAIR, loss=pair_loss, dynamic={"x": {1: HALF}, "y": {1: 2 * HALF}})
        )
        .graphs["train"]
        .exported
    )
    values = {
        node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"
    }
    x, y = (values[name].shape[1] for name in exported.graph_signature.user_inputs)
    assert str(y) == f"2*{x}"


def test_a_range_is_the_graphs() -> None:
    exported = (
        capture(job(Model(), batch=X, dynamic={"x": {1: Dim("seq", min=3, max=64)}}))
        .graphs["train"]
        .exported
    )
    assert [
        (int(r.lower), int(r.upper))
        for r in exported.range_constraints.values()
        if str(r.upper) != "int_oo"
    ] == [(3, 64)]


def test_every_graph_has_the_declared_sizes() -> None:
    given = job(
        Model(),
        batch=PAIR,
        loss=pair_loss,
        predict=lambda m, b: m(b["x"]),
        predict_inputs=["x"],
        dynamic={"x": {1: Dim("seq")}},
    )
    assert {
        name: graph.inputs[0].shape for name, graph in capture(given).graphs.items()
    } == dict.fromkeys(("train", "eval", "predict"), ("batch", "x_1", 8))


@pytest.mark.parametrize(
    ("dynamic", "where", "message"),
    [
        (
            {"z": {1: Dim.AUTO}},
            "Job.dynamic",
            r"not in the batch \(expected some of \['x', 'y'\], got 'z'\)",
        ),
        ({"x": "seq"}, "Job.dynamic['x']", r"by dim \(expected \{dim: \.\.\.\}.* got 'seq'"),
        (
            {"x": (None, Dim.AUTO)},
            "Job.dynamic['x']",
            r"number of dims .* \(expected 3 entries, got 2\)",
        ),
        ({"x": {3: Dim.AUTO}}, "Job.dynamic['x']", r"no such dim \(expected 0 to 2, got 3\)"),
        ({"x": {"1": Dim.AUTO}}, "Job.dynamic['x']", r"no such dim \(expected 0 to 2, got '1'\)"),
        ({"x": {1: Dim.AUTO, -2: Dim.AUTO}}, "Job.dynamic['x'][-2]", r"twice \(got 1 and -2\)"),
        ({"x": {1: 7}}, "Job.dynamic['x'][1]", r"differs from the example's \(expected 6, got 7\)"),
        (
            {"x": {1: "seq"}},
            "Job.dynamic['x'][1]",
            r"not a valid declaration of a dim .* got 'seq'\)\. Write Dim\('seq'\)",
        ),
        ({"x": {1: True}}, "Job.dynamic['x'][1]", r"not a valid declaration of a dim .* got True"),
        (
            {"x": {1: Dim("seq", max=5)}},
            "Job.dynamic['x'][1]",
            r"outside of the declared range \(expected 0 to 5, got 6\)",
        ),
        (
            {"x": {1: Dim.AUTO(min=7)}},
            "Job.dynamic['x'][1]",
            r"outside of the declared range \(expected 7 to any size, got 6\)",
        ),
        (
            {"x": {1: Dim("n") - 2}},
            "Job.dynamic['x'][1]",
            r"negative .*got n from 0\)\. .*Dim\('n', min=2\)",
        ),
        (
            {"x": {1: 4 * Dim("n")}},
            "Job.dynamic['x'][1]",
            r"not possible for the derived dim \(expected 4\*n, got 6\)",
        ),
        (
            {"x": {1: Dim("n")}, "y": {1: Dim("n", max=99)}},
            "Job.dynamic['y'][1]",
            r"'n' has two ranges .*got Dim\('n', max=99\)",
        ),
        (
            {"x": {1: Dim("n")}, "y": {1: Dim("n")}},
            "Job.dynamic['y'][1]",
            r"'n' has two sizes .*expected 6, as in .*, got 12",
        ),
        (
            {"x": {1: Dim("batch", min=1)}},
            "Job.dynamic['x'][1]",
            r"the batch dim 'batch' is also used for another dim",
        ),
        (
            {"x": {0: Dim("a")}, "y": {1: 3 * Dim("a")}},
            "Job.dynamic['y'][1]",
            r"the batch dim 'a' is also used for another dim .*got 3\*a",
        ),
        ({"x": {0: 2 * Dim("a")}}, "Job.dynamic['x'][0]", r"the batch dim is derived .*got 2\*a"),
        (
            {"x": {0: Dim("a")}, "y": {0: Dim("b")}},
            "Job.dynamic",
            r"batch dim in different ways .*got Dim\('a'\), Dim\('b'\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(
    dynamic: dict[str, Any], where: str, message: str
) -> None:
    with pytest.raises(JobError, match=message) as caught:
        declared_shapes(dynamic, PAIR)
    assert caught.value.where == where


@pytest.mark.matrix("0")  # the next test covers length 1
@pytest.mark.parametrize("length", [0, 1])
def test_an_example_of_a_length_that_torch_takes_for_a_constant_is_warned_of(length: int) -> None:
    with pytest.warns(
        UserWarning,
        match=rf"x has length {length} in dim 1, which is declared as Dim\.AUTO.* length 2 or more",
    ):
        program = capture(
            job(
                Model(),
                batch={"x": torch.ones(4, length, 8)},
                loss=lambda m, b: m(b["x"]).sum(),
                dynamic={"x": {1: Dim.AUTO}},
            )
        )
    assert program.graphs["train"].inputs[0].shape == ("batch", length, 8)


@pytest.mark.slow  # the test above covers the warning
def test_a_named_dim_of_length_1_is_warned_of_before_torch_refuses_it() -> None:
    with (
        pytest.warns(UserWarning, match=r"declared as Dim\('seq'\)"),
        pytest.raises(CaptureError, match="only one size"),
    ):
        capture(job(Model(), batch={"x": torch.randn(4, 1, 8)}, dynamic={"x": {1: Dim("seq")}}))


def test_a_fixed_length_of_1_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(job(Model(), batch={"x": torch.randn(4, 1, 8)}))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Dim("n"), "Dim('n')"),
        (Dim("n", min=1), "Dim('n', min=1)"),
        (Dim("n", min=2, max=64), "Dim('n', min=2, max=64)"),
        (Dim("n", max=9), "Dim('n', max=9)"),
        (2 * HALF + 1, "2*half + 1"),
        (Dim.AUTO, "Dim.AUTO"),
        (Dim.DYNAMIC(max=3), "Dim.DYNAMIC(max=3)"),
        (Dim.STATIC, "Dim.STATIC"),
    ],
)
def test_a_declaration_is_spelled_as_a_person_writes_it(spec: Any, text: str) -> None:
    assert spelled(spec) == text
