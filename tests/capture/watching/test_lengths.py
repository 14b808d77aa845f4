"""`len` of a tensor is a size during tracing."""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from torch import Tensor
from torch.export import Dim

from trainload.capture.parity.replays import Check
from trainload.capture.substitutes.lengths import lengths
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError
from trainload.freezing.prove import prove


def in_branches(_: Any, x: Tensor) -> Any:
    return torch.cond(
        x.sum() > 0, lambda y: y.reshape(len(y), -1) * len([y, y]), lambda y: y / len(y), (x,)
    )


def in_a_loop(_: Any, x: Tensor) -> Any:
    loop: Any = torch.while_loop
    return (
        loop(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, y * 0.5 + len(y)),
            (torch.tensor(0), x.detach()),
        )[1]
        + x
    )


@pytest.mark.matrix("reshape", "arithmetic")
@pytest.mark.parametrize(
    "middle",
    [
        lambda _, x: x.reshape(len(x), -1),
        lambda _, x: x * len(x),
        lambda _, x: x + torch.arange(len(x)).unsqueeze(1),
        lambda _, x: x.sum(0, keepdim=True).expand(len(x), -1),
        lambda _, x: x * (2 * len(x) + 1) / len(x),
        lambda _, x: torch.no_grad()(torch.tanh)(x).reshape(len(x), -1) + x,
        lambda _, x: torch.func.vmap(lambda row: row * len(row))(x),
        in_branches,
        in_a_loop,
    ],
    ids=[
        "reshape",
        "product",
        "arange",
        "expand",
        "arithmetic",
        "beside no_grad",
        "vmap",
        "cond",
        "while_loop",
    ],
)
def test_len_of_a_batch_is_right_on_every_number_of_rows(middle: Any) -> None:
    program = prove(job(Model(middle)), Check.THOROUGH).program
    assert {
        name: graph.tracing.mode
        for name, graph in program.graphs.items()
        if graph.tracing is not None
    } == {
        "train": "non-strict",
        "eval": "non-strict",
    }
    assert str(program.graphs["train"].guard) == "x float32[batch, 8]"


class Library:
    """Mimics cffi's object for a C library: it claims to be a module and rejects attributes."""

    __class__ = property(lambda self: types.ModuleType)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"library has no {name}")


def test_a_library_that_says_it_is_a_module_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    assert isinstance(library, types.ModuleType)
    monkeypatch.setitem(sys.modules, "some_library.lib", library)
    with lengths():
        assert "len" not in vars(library)


def test_len_in_the_loss_is_a_size() -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        total: Tensor = model(**batch).square().sum() / len(batch["x"])
        return total

    prove(job(Model(), loss=loss), Check.THOROUGH)


@pytest.mark.slow  # the first test also covers a list, in one of its branches
def test_len_of_a_list_is_its_length() -> None:
    prove(job(Model(lambda _, x: torch.stack([x, x]).sum(0) / len([x, x]))), Check.USUAL)


def test_a_branch_on_len_is_refused_with_the_sizes_it_takes() -> None:
    with pytest.raises(CaptureError) as raised:
        capture(job(Model(lambda _, x: x.relu() if len(x) > 2 else x)), strict=False)
    assert raised.value.findings[0].cause == "violated-constraint"


def test_a_branch_on_len_that_all_declared_sizes_take_is_captured() -> None:
    capture(
        job(
            Model(lambda _, x: x.relu() if len(x) > 2 else x),
            dynamic={"x": {0: Dim("batch", min=3)}},
        ),
        strict=False,
    )


def test_a_module_with_a_len_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("some_model")
    module.len = len
    monkeypatch.setitem(sys.modules, "some_model", module)
    with lengths():
        assert module.len is builtins.len


def test_the_name_is_gone_afterwards() -> None:
    with lengths():
        assert "len" in globals()
    assert "len" not in globals()


def test_a_tensor_without_dims_has_no_length() -> None:
    with lengths(), pytest.raises(TypeError):
        len(torch.zeros(()))
