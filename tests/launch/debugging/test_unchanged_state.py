"""A step whose loss or gradient is not finite leaves parameters, optimizer state and buffers."""

from __future__ import annotations

import math

import pytest
import torch
from tests.launch.debugging.planted_faults import ROWS, WIDTH, freeze, plain_batch, root_loss
from torch import Tensor, nn

import trainload
from trainload.launching.node.build import uncompiled_build
from trainload.launching.worker.calls import Microbatch
from trainload.launching.worker.engine import Draw, Engine, NotFiniteError

_CPU = torch.device("cpu")


def logarithm_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss that is infinite, with a finite gradient, for a row of zeros."""
    loss: Tensor = model(batch["x"]).square().mean() - batch["x"].abs().sum(1).log().mean()
    return loss


@pytest.fixture(scope="module", params=[root_loss, logarithm_loss], ids=["gradient", "loss"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine that has made no step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, affine=False))
    package = freeze(
        tmp_path_factory.mktemp("state"),
        model if request.param is logarithm_loss else model[0],
        request.param,
        plain_batch(),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    )
    plan = trainload.plan(package, trainload.Cluster(), "single")
    return Engine(package, plan, 0, _CPU, uncompiled_build(package, plan, _CPU))


def draw(*, bad: bool) -> Draw:
    x = torch.ones(ROWS, WIDTH) + torch.arange(ROWS)[:, None]
    if bad:
        x[3] = 0
    return Draw([Microbatch({"x": x}, 0)])


def state_of(engine: Engine) -> dict[str, Tensor]:
    held = engine.held
    states = {f"{key} {n}": v for key, values in held.states.items() for n, v in enumerate(values)}
    return {name: value.clone() for name, value in (held.params | states | held.buffers).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("steps", [0, 1], ids=["the first step", "a later step"])
def test_parameters_and_optimizer_state_stay(engine: Engine, steps: int) -> None:
    engine.held.load_package()
    engine.held.states.clear()
    for number in range(steps):
        engine.step(number, [draw(bad=False)])
    before = state_of(engine)
    with pytest.raises(NotFiniteError) as raised:
        engine.step(steps, [draw(bad=True)])
    assert not math.isfinite(raised.value.value)
    after = state_of(engine)
    for name in engine.held.buffers:  # forward has made new ones
        del before[name], after[name]
    assert equal(before, after)


def test_a_turn_that_is_repeated_begins_from_the_same_buffers(engine: Engine) -> None:
    engine.held.load_package()
    engine.held.states.clear()
    with pytest.raises(NotFiniteError):
        engine.step(0, [draw(bad=True)])
    before = state_of(engine)
    engine.repeat_turn(engine.built)
    assert equal(before, state_of(engine))
