"""Modules keep the train or eval mode that they have in the job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trained import assert_trains_as_eager
from torch import Tensor, nn

from trainload import CaptureError, Job
from trainload.capture.job.model_state import modes_kept
from trainload.capture.tracing.trace import capture


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.drop(self.norm(self.layer(x)))).square().mean()
        return loss


class KeepsItsNorm(Model):
    """Freezes a normalization in `train()`, like detection backbones."""

    def train(self, mode: bool = True) -> KeepsItsNorm:
        super().train(mode)
        self.norm.eval()
        return self


class FreezesItsLayer(Model):
    """Trains a layer in eval mode only, like models that freeze a backbone in `train()`."""

    def train(self, mode: bool = True) -> FreezesItsLayer:
        super().train(mode)
        self.layer.requires_grad_(not mode)
        return self


class Merges(Model):
    """Changes a weight with the mode, like LoRA layers that merge."""

    def train(self, mode: bool = True) -> Merges:
        if mode != self.training:
            self.layer.weight.data += 1.0 if mode else -1.0
        super().train(mode)
        return self


def job(model: nn.Module) -> Job:
    return Job(model, {"x": rows()[:8]}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))


def rows() -> Tensor:
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(1)) + 1.0


def without_dropout(model: Model) -> Model:
    model.drop.eval()
    return model


@pytest.mark.parametrize("training", [True, False])
def test_what_train_freezes_is_not_trained_in_whichever_mode_the_model_is_given(
    training: bool,
) -> None:
    model = FreezesItsLayer().train(training)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    program = capture(job(model))
    trainable = {parameter.name: parameter.trainable for parameter in program.parameters}
    assert trainable == {name: not name.startswith("layer.") for name in before}
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_a_module_in_eval_mode_trains_in_eval_mode(tmp_path: Path) -> None:
    model = without_dropout(Model())
    model.norm.eval()
    assert_trains_as_eager(job(model), {"x": rows()}, tmp_path)


@pytest.mark.slow
def test_what_is_below_a_module_in_eval_mode_is_as_it_was_set(tmp_path: Path) -> None:
    model = without_dropout(Model())
    model.head.eval()
    model.head[1].train()
    assert_trains_as_eager(job(model), {"x": rows()}, tmp_path)


def test_a_mode_that_an_overridden_train_sets_holds(tmp_path: Path) -> None:
    model = KeepsItsNorm().train()
    assert_trains_as_eager(job(without_dropout(model)), {"x": rows()}, tmp_path)


def test_a_nan_is_not_a_value_that_an_overridden_train_changes() -> None:
    model = KeepsItsNorm()
    model.register_buffer("unused", torch.tensor(float("nan")))
    assert capture(job(model)).graphs.keys() == {"train", "eval"}


def test_an_overridden_train_sets_modes_of_a_model_that_is_handed_over_before_it_was_called() -> (
    None
):
    model = KeepsItsNorm()
    assert model.norm.training
    graph = capture(job(model)).graphs["train"].exported.graph
    training = [
        node.args[5] for node in graph.nodes if node.target is torch.ops.aten.batch_norm.default
    ]
    assert training == [False, True]


def test_a_model_in_eval_mode_trains_in_train_mode() -> None:
    graph = capture(job(Model().eval())).graphs["train"].exported.graph
    assert all(
        node.args[5] for node in graph.nodes if node.target is torch.ops.aten.batch_norm.default
    )


def test_evaluation_is_in_eval_mode_whatever_was_set() -> None:
    model = Model()
    model.norm.eval()
    graph = capture(job(model)).graphs["eval"].exported.graph
    assert not any(
        node.args[5] for node in graph.nodes if node.target is torch.ops.aten.batch_norm.default
    )


def test_the_modes_are_as_before_after_a_capture() -> None:
    model = Model()
    model.norm.eval()
    before = [module.training for module in model.modules()]
    capture(job(model))
    assert [module.training for module in model.modules()] == before


def test_a_train_that_changes_weights_is_refused_and_the_weights_are_as_before() -> None:
    model = Merges()
    before = model.layer.weight.detach().clone()
    with pytest.raises(
        CaptureError, match=r"Merges\.train\(\) changes values of the model: layer\.weight"
    ):
        capture(job(model))
    torch.testing.assert_close(model.layer.weight.detach(), before)


def test_a_train_that_changes_weights_is_refused_in_the_first_mode_that_does() -> None:
    model = Merges()
    with modes_kept(model) as set_training, pytest.raises(CaptureError, match=r"layer\.weight"):
        set_training(False)


def test_an_exported_module_is_refused() -> None:
    exported = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)).module()
    with pytest.raises(
        CaptureError,
        match=r"cannot be put into train mode: NotImplementedError.*Pass the original module",
    ):
        capture(job(exported))


def test_a_wrapper_that_spreads_a_model_is_refused() -> None:
    model = Model()
    model.head = nn.Sequential(nn.DataParallel(nn.Linear(6, 6)))
    with pytest.raises(
        CaptureError,
        match=(
            r"head\.0: a wrapper that distributes the model.*got DataParallel\)\. Pass"
            r" model\.module"
        ),
    ):
        capture(job(model))
