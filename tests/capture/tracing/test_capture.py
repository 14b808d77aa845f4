"""The content of a captured program."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.capture.jobs import Batch, Model, job, mean_square
from torch import Tensor, nn
from torch.export import Dim

from trainload.capture.job.definition import Loss
from trainload.capture.program import OutputRole, Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, JobError


@pytest.fixture(scope="module")
def captured() -> Program:
    """A captured model with tied weights, both kinds of buffers, a constant and dropout."""

    def middle(m: Any, x: Tensor) -> Tensor:
        return nn.functional.dropout((x + m.a + m.b) * torch.tensor([2.0]), 0.5, m.training)

    model = Model(middle, a=torch.ones(8))
    model.register_buffer("b", torch.zeros(8), persistent=False)
    model.last.weight = model.first.weight
    return capture(job(model))


def test_outputs_have_roles_and_names() -> None:
    def loss(model: nn.Module, batch: Batch) -> Loss:
        value = mean_square(model, batch)
        return Loss(
            value,
            weight=batch["x"].abs().sum(),
            metrics={"b": value.detach(), "a": value.detach() * 2},
        )

    outputs = capture(job(Model(), loss=loss)).graphs["train"].outputs
    assert [(o.role, o.name) for o in outputs] == [
        (OutputRole.LOSS, "loss"),
        (OutputRole.WEIGHT, "weight"),
        (OutputRole.METRIC, "a"),
        (OutputRole.METRIC, "b"),
    ]


def test_the_batch_dim_is_dynamic_and_named(captured: Program) -> None:
    (spec,) = captured.graphs["train"].inputs
    assert (spec.name, spec.dtype, spec.shape) == ("x", "float32", ("batch", 8))


@pytest.mark.slow  # test_shapes.py covers all ways to declare it
def test_a_static_batch_dim_is_a_number() -> None:
    (spec,) = capture(job(Model(), dynamic={"x": {0: Dim.STATIC}})).graphs["train"].inputs
    assert spec.shape == (4, 8)


@pytest.mark.slow  # test_shapes.py covers dims of several inputs
def test_a_batch_dim_declared_for_one_input_holds_for_all() -> None:
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4)}
    program = capture(
        job(
            Model(),
            batch=batch,
            loss=lambda m, b: mean_square(m, b) + b["y"].mean(),
            dynamic={"y": {0: Dim("rows", min=2, max=64)}},
        )
    )
    assert [i.shape for i in program.graphs["train"].inputs] == [("batch", 8), ("batch",)]


@pytest.mark.slow  # test_inputs.py covers the order of leaves and of a graph's inputs
def test_inputs_are_sorted_by_name() -> None:
    batch = {"z": torch.randn(4), "x": torch.randn(4, 8), "a": torch.randn(4)}
    program = capture(
        job(
            Model(),
            batch=batch,
            loss=lambda m, b: mean_square(m, b) * b["a"].mean() + b["z"].mean(),
        )
    )
    assert [i.name for i in program.graphs["train"].inputs] == ["a", "x", "z"]


def test_a_model_that_returns_its_loss_needs_no_loss() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, *, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.linear(x), y)

    batch = {"y": torch.randn(4, 8), "x": torch.randn(4, 8)}
    assert set(capture(job(Scored(), batch=batch, loss=None)).graphs) == {"train", "eval"}


def test_tied_weights_are_one_parameter_with_an_alias(captured: Program) -> None:
    assert captured.aliases == {"last.weight": "first.weight"}
    assert "last.weight" not in captured.state


def test_parameters_without_gradient_are_warned_of_and_not_trained() -> None:
    model = Model(spare=nn.Linear(2, 2))
    with pytest.warns(
        UserWarning, match=r"2 parameters get no gradient.*spare\.bias, spare\.weight"
    ):
        program = capture(job(model))
    assert {p.name for p in program.parameters if not p.trainable} == {"spare.weight", "spare.bias"}


def test_frozen_parameters_are_kept_and_not_trained() -> None:
    model = Model()
    model.first.weight.requires_grad_(False)
    program = capture(job(model))
    assert [p.name for p in program.parameters if not p.trainable] == ["first.weight"]
    assert "first.weight" in program.state


def test_buffers_of_both_kinds_travel(captured: Program) -> None:
    assert {b.name: b.persistent for b in captured.buffers} == {"a": True, "b": False}
    assert {"a", "b"} <= set(captured.state)


def test_a_tensor_made_in_forward_is_a_constant(captured: Program) -> None:
    assert [t.tolist() for n, t in captured.constants.items() if n.startswith("train/")] == [[2.0]]


def test_capturing_leaves_the_model_as_it_was() -> None:
    norm = nn.BatchNorm1d(8)
    model = Model(lambda m, x: m.norm(x), norm=norm)
    norm.eval()
    running = norm.running_mean
    assert running is not None
    before = running.clone()
    capture(job(model))
    assert norm.running_mean is running
    assert torch.equal(running, before)
    assert (model.training, norm.training) == (True, False)
    assert all(p.grad is None for p in model.parameters())


def test_capturing_leaves_the_random_generator_as_it_was() -> None:
    given = job(Model(lambda m, x: nn.functional.dropout(x, 0.5, m.training)))
    before = torch.random.get_rng_state()
    capture(given)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_eval_graph_has_no_dropout(captured: Program) -> None:
    flags = {
        name: [n.args[2] for n in g.exported.graph.nodes if "dropout" in str(n.target)]
        for name, g in captured.graphs.items()
    }
    assert flags["train"] == [True]
    assert flags["eval"] in ([], [False])


def test_a_predict_graph_has_only_the_inputs_that_it_reads() -> None:
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4)}
    program = capture(
        job(
            Model(),
            batch=batch,
            loss=lambda m, b: mean_square(m, b) + b["y"].mean(),
            predict=lambda m, b: {"out": m(b["x"])},
            predict_inputs=["x"],
        )
    )
    predict = program.graphs["predict"]
    assert [i.name for i in predict.inputs] == ["x"]
    assert [(o.role, o.name) for o in predict.outputs] == [(OutputRole.PREDICTION, "out")]


@pytest.mark.slow  # tests/coverage captures all modules of torch
def test_an_lstm_is_captured_without_a_warning() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lstm(x)[0]
            return out

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(job(Recurrent(), batch={"x": torch.randn(4, 3, 8)}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": {}}, "batch is empty"),
        ({"batch": {"x": torch.randn(1, 8)}}, "too small"),
        ({"batch": {"x": torch.randn(4, 8), "y": torch.tensor(1.0)}}, "no batch dim"),
        ({"batch": {"x": torch.randn(4, 8), "y": torch.randn(3)}}, "numbers of rows"),
        ({"batch": {"x.y": torch.randn(4, 8)}}, "invalid input name"),
        ({"loss": lambda m, b: m(b["x"])}, "not a scalar"),
        ({"loss": lambda m, b: Loss(mean_square(m, b), metrics={"m": m(b["x"])})}, "0-dim"),
        ({"predict": lambda m, b: {"a": {"b": m(b["x"])}}}, "not a tensor"),
        ({"predict": lambda m, b: m(b["x"]), "predict_inputs": ["z"]}, "not in the batch"),
        ({"dynamic": {"z": {0: Dim.AUTO}}}, "not in the batch"),
    ],
)
def test_a_job_that_does_not_hold_together_is_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        capture(job(Model(), **options))


def test_a_loss_with_state_of_its_own_is_refused() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights", torch.ones(8))

        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            return mean_square(model, batch)

    with pytest.raises(JobError, match="its own parameters or buffers"):
        capture(job(Model(), loss=Weighted()))


def test_two_parameters_on_one_memory_are_refused() -> None:
    model = Model()
    model.last.weight = nn.Parameter(model.first.weight.data)
    with pytest.raises(
        CaptureError, match=r"first\.weight and the parameter last\.weight share memory"
    ):
        capture(job(model))


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(CaptureError, match=r"first\.weight"):
        capture(job(model))


def test_a_scripted_part_is_refused_by_name() -> None:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_module("first", torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(CaptureError, match=r"Job\.model: first: a scripted module"):
        capture(job(model))


def test_a_loss_that_reaches_no_parameter_is_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_square(model, batch).detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CaptureError, match="no gradient reaches"):
            capture(job(Model(), loss=loss))
