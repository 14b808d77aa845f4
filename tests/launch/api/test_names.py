"""Names are data: any printable name can be trained, whatever a graph's nodes are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trained import assert_trains_as_eager
from torch import Tensor, nn, optim

from trainload import Job, JobError
from trainload.capture.job.names import is_dotted_name, is_part
from trainload.capture.tracing.trace import capture

NAMES = (
    *("a-b", "a_b", "a b", "a/b:c", "a%b#c", "a;b@1,", "a'b\"", "\\{(*", "ä😀"),
    *("class", "None", "0"),
)


class Odd(nn.Module):
    """Model with a layer for each of NAMES, similar module names, and a buffer with an odd name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in NAMES})
        self.encoder = nn.ModuleDict({"proj": nn.Linear(4, 4)})
        self.encoder_proj = nn.Linear(4, 4)
        self.register_buffer("how-many?", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("how-many?").add_(1.0)
        x = self.encoder_proj(self.encoder["proj"](x))
        found: Tensor = x + sum(layer(x).tanh() for layer in self.layers.values())
        return found


def loss(model: nn.Module, batch: dict[Any, Any]) -> Tensor:
    found = (
        batch["x"]["y"] * batch["x_y"] + batch["user id"][0] - batch["user id"][1] + batch["größe"]
    )
    result: Tensor = model(found).square().mean()
    return result


def rows(count: int) -> dict[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    drawn = iter(torch.randn(5, count, 4, generator=generator))
    return {
        "x": {"y": next(drawn)},
        "x_y": next(drawn),
        "user id": {0: next(drawn), 1: next(drawn)},
        "größe": next(drawn),
    }


def job() -> Job:
    return Job(Odd(), rows(8), lambda m: optim.SGD(m.parameters(), lr=0.01), loss=loss)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_and_a_batch_of_odd_names_train(compiled: bool, tmp_path: Path) -> None:
    assert_trains_as_eager(job(), rows(32), tmp_path, compile=compiled)


def test_a_name_with_a_control_character_is_refused() -> None:
    model = nn.ModuleDict({"a\nb": nn.Linear(4, 4)})
    with pytest.raises(JobError, match=r"'a\\nb\.weight'"):
        capture(Job(model, {"x": torch.randn(4, 4)}, lambda m: optim.SGD(m.parameters(), lr=0.1)))


def test_a_name_that_is_too_long_is_refused() -> None:
    model = nn.ModuleDict({"a" * 600: nn.Linear(4, 4)})
    with pytest.raises(JobError, match="at most 512 characters"):
        capture(Job(model, {"x": torch.randn(4, 4)}, lambda m: optim.SGD(m.parameters(), lr=0.1)))


@pytest.mark.parametrize(
    "batch",
    [
        {"a.b": torch.ones(4, 4)},
        {"": torch.ones(4, 4)},
        {"x": {1: torch.ones(4, 4), "1": torch.ones(4, 4)}},
    ],
)
def test_an_input_whose_name_says_two_things_is_refused(batch: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=r"Job\.batch"):
        capture(Job(nn.Linear(4, 4), batch, lambda m: optim.SGD(m.parameters(), lr=0.1)))


@given(st.lists(st.text(min_size=1), min_size=1))
def test_a_dotted_name_is_one_of_usable_parts(parts: list[str]) -> None:
    name = ".".join(parts)
    assert is_dotted_name(name) == (
        len(name) <= 512 and all(is_part(part) for part in name.split("."))
    )


@given(st.text(min_size=1))
def test_what_a_name_may_hold_can_be_printed(text: str) -> None:
    if is_part(text):
        assert len(text.splitlines()) == 1
        assert text.encode("utf-8").decode("utf-8") == text
