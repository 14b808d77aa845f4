"""Parameter groups by name."""

from __future__ import annotations

import pytest
import torch
from tests.capture.jobs import job
from tests.optimizers import optimizer_of
from torch import nn

import trainload
from trainload.capture.tracing.trace import capture
from trainload.core.errors import JobError

NO_DECAY = {"weight_decay": 0.0}


class Tied(nn.Module):
    """Two tied matrices, a norm and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x))) * self.scale
        return out


def named(model: nn.Module, groups: list[dict[str, object]]) -> list[list[str]]:
    names = {id(p): n for n, p in model.named_parameters()}
    return [[names[id(p)] for p in g["params"]] for g in groups]  # type: ignore[attr-defined]  # a list of parameters


def test_the_first_pattern_that_fits_wins() -> None:
    model = Tied()
    groups = trainload.parameter_groups(
        model, {"norm.*": {"lr": 0.5}, "*.bias": NO_DECAY}, rest={"weight_decay": 0.1}
    )
    assert named(model, groups) == [["norm.weight", "norm.bias"], ["first.bias"], ["first.weight"]]
    assert [{k: v for k, v in g.items() if k != "params"} for g in groups] == [
        {"lr": 0.5},
        NO_DECAY,
        {"weight_decay": 0.1},
    ]


def test_a_tied_parameter_is_found_by_any_of_its_names_and_is_there_once() -> None:
    model = Tied()
    assert named(model, trainload.parameter_groups(model, {"last.*": NO_DECAY}))[0] == [
        "first.weight"
    ]
    groups = named(model, trainload.parameter_groups(model, {"last.*": {}, "*.bias": {}}))
    assert [name for group in groups for name in group].count("first.weight") == 1


def test_only_leaves_the_others_to_another_optimizer() -> None:
    model = Tied()
    assert named(model, trainload.parameter_groups(model, {"*.weight": {}}, only=True)) == [
        ["first.weight", "norm.weight"]
    ]


def test_all_parameters_in_patterns_leave_no_rest() -> None:
    assert len(trainload.parameter_groups(Tied(), {"*": NO_DECAY}, rest={"weight_decay": 0.1})) == 1


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"*.gamma": NO_DECAY}, "'\\*.gamma' selects no parameter .*norm.weight"),
        ({"*.Bias": NO_DECAY}, "selects no parameter"),
        ({"scale": NO_DECAY}, "selects no parameter"),
        (
            {"*": {}, "norm.*": NO_DECAY},
            "earlier patterns match all of its parameters .*got norm.weight, norm.bias",
        ),
    ],
)
def test_a_pattern_that_gets_no_parameter_is_refused(
    patterns: dict[str, dict[str, float]], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        trainload.parameter_groups(Tied(), patterns)


def test_groups_by_name_are_captured_with_their_options() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            trainload.parameter_groups(
                model, {"*.bias": NO_DECAY}, rest={"weight_decay": 0.5, "lr": 0.2}
            ),
            lr=0.1,
        )

    given = job(Tied(), optimizer=optimizer)
    recipe, updates = optimizer_of(given, capture(given))
    assert [g.parameters for g in recipe.groups] == [
        ("first.bias", "norm.bias"),
        ("first.weight", "norm.weight"),
    ]
    assert [g.learning_rates for g in recipe.groups] == [(0.1,), (0.2,)]
    one, nothing, rate = torch.ones(3), torch.zeros(3), torch.tensor(0.2)
    torch.testing.assert_close(
        [u.first.module()(one, nothing, rate, ())[0] for u in updates], [one, torch.full((3,), 0.9)]
    )
