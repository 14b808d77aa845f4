"""Batches with nested containers and constants."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.capture.jobs import Model, job, mean_square
from torch import Tensor, nn
from torch.export import Dim

from trainload.capture.job.inputs import constants_of, leaves_of, rebuild
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import JobError


@dataclass
class Mask:
    left: Tensor
    right: Tensor | None = None


MADE: list[str] = []


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor

    def __post_init__(self) -> None:
        MADE.append("by its constructor")


@dataclass
class Counted:
    value: Tensor

    def __post_init__(self) -> None:
        self.count = len(self.value)


@dataclass
class Mapped(dict[str, Tensor]):
    value: Tensor


class Pair(NamedTuple):
    one: Tensor
    two: Tensor


Plain = namedtuple("Plain", ["only"])
ROWS = torch.randn(4, 8)

NESTED: dict[str, Any] = {
    "x": ROWS,
    "mask": Mask(ROWS[:, 0]),
    "pair": Pair(ROWS, ROWS[:, 1]),
    "listed": [ROWS, (ROWS, Plain(ROWS))],
    "deep": {"b": OrderedDict(c=ROWS), "a": {}},
    "frozen": Frozen(ROWS),
    "temperature": 0.5,
    "mode": "fast",
    "nothing": None,
    "flag": True,
}


def test_leaves_have_dotted_names_in_sorted_order() -> None:
    names = [
        "deep.b.c",
        "frozen.value",
        "listed.0",
        "listed.1.0",
        "listed.1.1.only",
        "mask.left",
        "pair.one",
        "pair.two",
        "x",
    ]
    assert list(leaves_of(NESTED)) == names


def test_what_is_no_tensor_is_a_constant() -> None:
    wanted = {"flag": True, "mask.right": None, "mode": "fast", "nothing": None, "temperature": 0.5}
    assert constants_of(NESTED) == wanted


def test_rebuilding_gives_the_same_types_with_other_tensors() -> None:
    other = {name: leaf + 1 for name, leaf in leaves_of(NESTED).items()}
    made = rebuild(NESTED, other)
    assert {name: type(value) for name, value in made.items()} == {
        name: type(value) for name, value in NESTED.items()
    }
    assert (type(made["listed"][1][1]), type(made["deep"]["b"]), made["deep"]["a"]) == (
        Plain,
        OrderedDict,
        {},
    )
    assert all(leaf is other[name] for name, leaf in leaves_of(made).items())
    assert constants_of(made) == constants_of(NESTED)


def test_rebuilding_runs_no_code_of_a_dataclass() -> None:
    before = list(MADE)
    assert before
    rebuild(NESTED, leaves_of(NESTED))
    assert before == MADE


def test_rebuilding_leaves_the_example_as_it_was() -> None:
    before = {name: leaf.clone() for name, leaf in leaves_of(NESTED).items()}
    rebuild(NESTED, {name: leaf * 0 for name, leaf in before.items()})
    assert all(torch.equal(leaf, before[name]) for name, leaf in leaves_of(NESTED).items())


_NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
_LEAVES = st.one_of(
    st.just(ROWS),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=4),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_NAMES, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=25)
@given(st.dictionaries(_NAMES, _TREES, max_size=4))
def test_a_batch_is_what_its_leaves_and_constants_make_it(tree: dict[str, Any]) -> None:
    batch = {**tree, "always": ROWS}
    assert rebuild(batch, leaves_of(batch)) == batch


@pytest.mark.parametrize(
    ("batch", "where", "message"),
    [
        ({}, "Job.batch", "batch is empty"),
        ({"a": 1}, "Job.batch", "contains no tensor"),
        (
            {"a": {"b\tc": ROWS}},
            "Job.batch: a",
            r"invalid input name \(expected an integer, or a string .*, got 'b\\tc'\)",
        ),
        ({"a": {"b.c": ROWS}}, "Job.batch: a", "invalid input name"),
        ({"": ROWS}, "Job.batch", "invalid input name"),
        ({None: ROWS}, "Job.batch", "invalid input name"),
        (
            {"a": {0: ROWS, "0": ROWS}},
            "Job.batch",
            (
                r"two keys of a dict have the same string form \(expected distinct names, got \[0,"
                r" '0'\]\)"
            ),
        ),
        (
            {"a": [np.zeros(4)]},
            "Job.batch: a.0",
            r"cannot contain \(expected a tensor.* got numpy.ndarray\)\. Convert it to a tensor",
        ),
        ({"a": {"b": {ROWS}}}, "Job.batch: a.b", "cannot contain .* got builtins.set"),
        ({"a": Mask}, "Job.batch: a", "cannot contain .* got builtins.type"),
        (
            {"a": Counted(ROWS)},
            "Job.batch",
            r"attributes that are not fields.* \(expected only the fields value, got count\)",
        ),
        ({"a": Mapped(ROWS)}, "Job.batch: a", "cannot contain .* got .*Mapped"),
        ({"a": 1j, "x": ROWS}, "Job.batch: a", "cannot contain .* got builtins.complex"),
        ({"a" * 200: {"b" * 60: ROWS}}, "Job.batch", r"too long \(expected at most 256 characters"),
    ],
)
def test_what_a_batch_cannot_hold_is_refused_with_its_place(
    batch: dict[str, Any], where: str, message: str
) -> None:
    with pytest.raises(JobError, match=message) as caught:
        leaves_of(batch)
    assert caught.value.where == where


def weighted(model: nn.Module, batch: dict[str, Any]) -> Any:
    """Return a loss that accesses every part of the batch by its own type."""
    mask: Mask = batch["mask"]
    assert mask.right is None
    assert batch["mode"] == "fast"
    one, two = batch["pair"]
    out = model(batch["x"]) * mask.left[:, None] + batch["pair"].one * batch["temperature"]
    return (
        (
            out
            - one
            + two[:, None]
            + batch["listed"][1][1].only
            + batch["deep"]["b"]["c"]
            + batch["frozen"].value
        )
        .square()
        .mean()
    )


@pytest.fixture(scope="module")
def nested() -> Program:
    """A captured job with such a batch."""
    return capture(job(Model(), batch=NESTED, loss=weighted))


def test_a_loss_is_given_the_batch_as_the_job_has_it(nested: Program) -> None:
    train = nested.graphs["train"]
    assert [i.name for i in train.inputs] == list(leaves_of(NESTED))
    assert {i.shape for i in train.inputs} == {("batch", 8), ("batch",)}


def test_a_constant_is_a_number_of_the_graph(nested: Program) -> None:
    exported = nested.graphs["train"].exported
    assert 0.5 in [argument for node in exported.graph.nodes for argument in node.args]


def test_a_model_without_loss_is_called_with_the_nested_entries() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, *, x: Tensor, target: Mask, scale: float) -> Any:
            return ((self.linear(x) - target.left) * scale).square().mean()

    program = capture(
        job(Scored(), batch={"x": ROWS, "target": Mask(ROWS), "scale": 2.0}, loss=None)
    )
    assert [i.name for i in program.graphs["train"].inputs] == ["target.left", "x"]


def test_predict_reads_outermost_entries() -> None:
    program = capture(
        job(
            Model(),
            batch={"x": {"rows": ROWS, "shift": 1.0}, "y": ROWS},
            loss=lambda m, b: (m(b["x"]["rows"]) - b["y"]).square().mean(),
            predict=lambda m, b: m(b["x"]["rows"] + b["x"]["shift"]),
            predict_inputs=["x"],
        )
    )
    assert [i.name for i in program.graphs["predict"].inputs] == ["x.rows"]


def test_sizes_are_declared_by_dotted_name() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Any:
        return mean_square(model, {"x": batch["pair"][0]}) + batch["pair"][1].mean()

    seq = Dim("seq")
    batch = {"pair": (torch.randn(4, 6, 8), torch.randn(4, 6))}
    program = capture(
        job(Model(), batch=batch, loss=loss, dynamic={"pair.0": {1: seq}, "pair.1": {1: seq}})
    )
    assert [i.shape for i in program.graphs["train"].inputs] == [
        ("batch", "pair.0_1", 8),
        ("batch", "pair.0_1"),
    ]


def test_dotted_and_underlined_names_are_kept_apart() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return mean_square(model, {"x": batch["a"]["b"]}) * 2 + mean_square(
            model, {"x": batch["a_b"]}
        )

    program = capture(
        job(Model(), batch={"a": {"b": torch.randn(4, 8)}, "a_b": torch.randn(4, 8)}, loss=loss)
    )
    assert [i.name for i in program.graphs["train"].inputs] == ["a.b", "a_b"]


def test_more_than_ten_parts_of_a_list_keep_their_places() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        weighed = sum(
            (part.mean() * number for number, part in enumerate(batch["parts"][1:], 1)),
            torch.zeros(()),
        )
        return mean_square(model, {"x": batch["parts"][0]}) + weighed

    program = capture(
        job(Model(), batch={"parts": [torch.randn(4, 8) * n for n in range(12)]}, loss=loss)
    )
    assert len(program.graphs["train"].inputs) == 12


def test_an_example_of_two_rows_is_enough() -> None:
    batch = {"mask": Mask(torch.randn(2)), "x": torch.randn(2, 8)}
    program = capture(
        job(
            Model(),
            batch=batch,
            loss=lambda m, b: (m(b["x"]) * b["mask"].left[:, None]).square().mean(),
        )
    )
    assert [i.shape for i in program.graphs["train"].inputs] == [("batch",), ("batch", 8)]


def test_a_nested_tensor_without_rows_is_refused_by_name() -> None:
    with pytest.raises(JobError, match="no batch dim") as caught:
        capture(job(Model(), batch={"x": ROWS, "scales": [torch.tensor(1.0)]}))
    assert caught.value.where == "Job.batch: scales.0"
