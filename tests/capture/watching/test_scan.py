"""Values, gradients and sizes of torch's associative scan in a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from torch import Tensor
from torch.export import Dim

from trainload.capture.parity.replays import Check
from trainload.capture.source.patched import OPERATORS
from trainload.capture.watching.scan import replacements
from trainload.core.errors import CaptureError
from trainload.freezing.prove import prove

scan: Any = vars(sys.modules[OPERATORS])["associative_scan"]
linear_scan: Any = vars(sys.modules[OPERATORS])["scan"]
Middle = Callable[[Any, Tensor], Tensor]


def recurrence(_: Any, x: Tensor) -> Tensor:
    """Compute h[t] = a[t] h[t-1] + b[t], as in state-space models."""
    decay, added = x.sigmoid(), x.tanh()
    combined: Tensor = scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, added), 1, combine_mode="generic"
    )[1]
    return combined


def backwards(model: Any, x: Tensor) -> Tensor:
    gain = model.first.weight[0, 0]
    result: Tensor = scan(
        lambda a, b: torch.maximum(a, b) + a * gain, x, -1, reverse=True, combine_mode="generic"
    )
    return result


def products(model: Any, x: Tensor) -> Tensor:
    """Return products of five matrices, in a dict, by an operator that is not pointwise."""
    y = x.sigmoid()[:, :5, None, None] * model.first.weight[:3, :3]
    combined: Tensor = scan(
        lambda a, b: {"a": a["a"] @ b["a"]}, {"a": y}, 1, combine_mode="generic"
    )["a"]
    return combined.flatten(1)[:, :8]


def by_path(_: Any, x: Tensor) -> Tensor:
    result: Tensor = vars(sys.modules[OPERATORS])["associative_scan"](
        lambda a, b: a + b, x, 1, combine_mode="generic"
    )
    return result


def of_one(_: Any, x: Tensor) -> Tensor:
    result: Tensor = scan(lambda a, b: a + b, x[:, :1], 1, combine_mode="generic")
    return result.expand(-1, 8)


@pytest.mark.matrix("backwards")
@pytest.mark.parametrize("middle", [recurrence, backwards, products, by_path, of_one])
def test_a_scan_has_eagers_loss_and_gradients_on_every_number_of_rows(middle: Middle) -> None:
    program = prove(
        job(Model(middle)), Check.THOROUGH if middle is recurrence else Check.USUAL
    ).program
    assert str(program.graphs["train"].guard) == "x float32[batch, 8]"


@pytest.mark.slow
def test_scans_along_several_dims_are_captured_in_one_model() -> None:
    """The code that torch compiled for one scan does not apply to the next."""

    def both(_: Any, x: Tensor) -> Tensor:
        along_time: Tensor = linear_scan(
            lambda c, t: ((c + t).tanh(), c + t), torch.zeros_like(x[:, 0]), x.t().contiguous()
        )[1].t()
        over_rows: Tensor = linear_scan(
            lambda c, row: (c + 1, row.sin()), torch.zeros(()), along_time.contiguous()
        )[1]
        return over_rows

    program = prove(job(Model(both)), Check.USUAL).program
    assert str(program.graphs["train"].guard) == "x float32[batch, 8]"


@pytest.mark.slow  # test_shapes.py covers dims that a model does not accept
def test_a_scan_of_a_length_that_changes_is_refused() -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        added: Tensor = scan(lambda a, b: a + b, model(batch["x"]), 1, combine_mode="generic")
        return added.square().mean()

    with pytest.raises(CaptureError):
        prove(
            job(
                Model(),
                batch={"x": torch.randn(4, 6, 8)},
                loss=loss,
                dynamic={"x": {1: Dim("seq")}},
            ),
            Check.USUAL,
        )


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 33])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_scan_is_torchs_to_the_bit(length: int, reverse: bool) -> None:
    ((original, ours),) = replacements(torch.func.vmap).items()
    x = torch.randn(3, length, 2)
    mine, torchs = (
        f(lambda a, b: a * 0.5 + b, x, 1, reverse=reverse, combine_mode="generic")
        for f in (ours, original)
    )
    assert torch.equal(mine, torchs)


def test_what_eager_mode_refuses_is_refused() -> None:
    (ours,) = replacements(torch.func.vmap).values()
    with pytest.raises(ValueError, match="pointwise"):
        ours(lambda a, b: a + b, torch.randn(4), 0)
