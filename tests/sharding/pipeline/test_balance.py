"""Assignment of parameters to stages."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.capture.jobs import job
from tests.sharding.given import captured
from torch import Tensor, nn

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import StepGraph
from trainload.capture.tracing.trace import capture
from trainload.core.errors import PlanError
from trainload.sharding.pipeline.balance import choose_stages

BLOCKS, WIDTH = 6, 32
pytestmark = pytest.mark.usefixtures("frozen_gpt")


class Block(nn.Module):
    """A wide layer between two narrow ones, with a skip connection.

    (rows, WIDTH) -> the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.back(torch.relu(self.wide(self.norm(x))))
        return found


def step_of(model: nn.Module) -> StepGraph:
    return derive(
        capture(job(model=model, batch={"x": torch.randn(8, WIDTH)})), "train", torch.device("cpu")
    )


@functools.cache
def blocks() -> StepGraph:
    torch.manual_seed(0)
    return step_of(nn.Sequential(*(Block() for _ in range(BLOCKS))))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_equal_blocks_are_dealt_out_evenly(count: int) -> None:
    homes = choose_stages([blocks()], count)
    each = BLOCKS // count
    assert {
        name: stages
        for name, stages in homes.items()
        if int(name.split(".")[0]) // each != stages[0] or len(stages) > 1
    } == {}


def test_a_tied_parameter_is_on_the_stages_that_use_it() -> None:
    homes = choose_stages([captured("gpt")[2]], 3)
    assert homes["tokens.weight"] == (0, 2)
    assert homes["positions"] == (0,)
    assert homes["mean"] == (2,), "a buffer is where its new value is"


def test_more_stages_than_places_to_cut_are_refused() -> None:
    with pytest.raises(PlanError, match="fewer places to cut than there are stages"):
        choose_stages([step_of(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4)))], 3)


@pytest.mark.slow
def test_what_another_graph_alone_uses_comes_where_its_values_are() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    main = step_of(nn.Sequential(first, nn.ReLU(), second))
    other = step_of(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    homes = choose_stages([main, other], 2)
    assert (homes["2.weight"], homes["4.weight"]) == ((1,), (1,))
