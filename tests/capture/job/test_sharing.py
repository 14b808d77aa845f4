"""A tensor that training changes must not share memory with another one.

A model that violates this is rejected with the names of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainload import CaptureError, Job
from trainload.capture.job.shared_memory import check_memory
from trainload.capture.tracing.trace import capture


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.extra: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.layer(x))
        for tensor in self.extra if isinstance(self.extra, list) else [self.extra]:
            hidden = hidden if tensor is None else hidden * tensor.sum()
        loss: Tensor = hidden.square().mean()
        return loss


def buffer_of_a_weight(model: Model) -> None:
    del model.extra
    model.register_buffer("extra", model.layer.weight.detach())


def attribute_of_a_weight(model: Model) -> None:
    model.extra = model.layer.weight.detach()


def row_of_a_weight(model: Model) -> None:
    model.extra = model.layer.weight.data[1]


def list_of_data(model: Model) -> None:
    model.extra = [p.data for p in model.layer.parameters()]


def weight_through_numpy(model: Model) -> None:
    model.extra = torch.from_numpy(model.layer.weight.detach().numpy())


def view_of_a_written_buffer(model: Model) -> None:
    del model.extra
    mean = model.norm.running_mean
    assert mean is not None
    model.register_buffer("extra", mean[:2])


def written_buffer_of_two_names(model: Model) -> None:
    model.extra = None
    model.other = model.norm


def attribute_of_a_written_buffer(model: Model) -> None:
    model.extra = [model.norm.running_var]


def parameter_of_a_parameter(model: Model) -> None:
    del model.extra
    model.extra = nn.Parameter(model.layer.weight.data.t())


def frozen_parameter_of_a_parameter(model: Model) -> None:
    del model.extra
    model.extra = nn.Parameter(model.layer.weight.data, requires_grad=False)


REFUSED: list[tuple[Callable[[Model], None], str, str]] = [
    (buffer_of_a_weight, "parameter layer.weight", "buffer extra"),
    (attribute_of_a_weight, "parameter layer.weight", "test_sharing.py"),
    (row_of_a_weight, "parameter layer.weight", "test_sharing.py"),
    (list_of_data, "parameter layer.", "test_sharing.py"),
    (weight_through_numpy, "parameter layer.weight", "test_sharing.py"),
    (view_of_a_written_buffer, "buffer norm.running_mean", "buffer extra"),
    (written_buffer_of_two_names, "buffer norm.", "buffer other."),
    (attribute_of_a_written_buffer, "buffer norm.running_var", "test_sharing.py"),
    (parameter_of_a_parameter, "parameter layer.weight", "parameter extra"),
    (frozen_parameter_of_a_parameter, "parameter layer.weight", "parameter extra"),
]


def job(model: nn.Module, loss: Any = None) -> Job:
    return Job(
        model,
        {"x": torch.randn(6, 4)},
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        loss=loss,
    )


@pytest.mark.parametrize(
    ("share", "first", "second"), REFUSED, ids=lambda value: getattr(value, "__name__", None)
)
def test_both_names_are_said(share: Callable[[Model], None], first: str, second: str) -> None:
    model = Model()
    share(model)
    with pytest.raises(CaptureError) as refused:
        capture(job(model))
    assert "share memory" in str(refused.value)
    assert first in str(refused.value).replace("\n", " ")
    assert second in str(refused.value).replace("\n", " ")


def test_a_closure_of_the_loss_is_seen() -> None:
    model = Model()
    anchor = model.layer.weight.data  # never cloned

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(batch["x"]) + (model.layer.weight - anchor).square().sum()
        return found

    with pytest.raises(CaptureError, match=r"parameter layer\.weight"):
        capture(job(model, loss))


def test_several_tensors_that_a_line_uses_are_each_seen() -> None:
    model = Model()
    twin = nn.Linear(4, 4).requires_grad_(False)  # not part of the model
    twin.weight.data = model.layer.weight.data

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(batch["x"]) + twin(batch["x"]).square().mean()
        return found

    with pytest.raises(CaptureError, match=r"parameter layer\.weight"):
        capture(job(model, loss))


@pytest.mark.parametrize(
    ("path", "name"),
    [("layer.weight", "parameter layer.weight"), ("norm.running_mean", "buffer norm.running_mean")],
)
def test_an_input_that_all_rows_share_is_seen(path: str, name: str) -> None:
    model = Model()
    batch = {
        "x": torch.randn(6, 4),
        "scale": dict([*model.named_parameters(), *model.named_buffers()])[path].detach(),
    }

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(batch["x"] * batch["scale"].sum())
        return found

    with pytest.raises(CaptureError, match=name):
        capture(
            Job(
                model,
                batch,
                lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
                loss=loss,
                shared=["scale"],
            )
        )


def test_a_clone_is_captured() -> None:
    model = Model()
    model.extra = [p.data.clone() for p in model.layer.parameters()]
    assert capture(job(model)).constants


def test_buffers_that_nobody_writes_may_share_memory() -> None:
    model = Model()
    del model.extra
    table = torch.randn(8)
    model.register_buffer("extra", table)
    model.register_buffer("other", table[2:])
    assert {b.name for b in capture(job(model)).buffers} >= {"extra", "other"}


def test_frozen_parameters_may_share_memory() -> None:
    model = Model()
    del model.extra
    model.extra = nn.Parameter(model.layer.weight.data, requires_grad=False)
    model.layer.weight.requires_grad_(False)
    assert {p.name for p in capture(job(model)).parameters if not p.trainable} == {
        "layer.weight",
        "extra",
    }


def test_disjoint_columns_of_one_tensor_are_captured() -> None:
    model = Model()
    fused = torch.randn(4, 8)
    del model.extra
    model.layer.weight = nn.Parameter(fused[:, :4])
    model.extra = nn.Parameter(fused[:, 4:])
    assert {p.name for p in capture(job(model)).parameters if p.trainable} >= {
        "layer.weight",
        "extra",
    }


def test_an_expanded_parameter_is_refused() -> None:
    model = Model()
    del model.extra
    model.extra = nn.Parameter(torch.ones(1, 4).expand(4, 4))
    with pytest.raises(CaptureError, match="parameter extra is expanded"):
        capture(job(model))


def elements(tensor: Tensor) -> set[int]:
    """Return the addresses of a tensor's elements by enumeration."""
    steps = [
        [i * stride for i in range(size)]
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return {int(tensor.storage_offset()) + sum(offsets) for offsets in itertools.product(*steps)}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_of_any_two_views_those_are_refused_that_have_an_element_in_common(
    data: st.DataObject,
) -> None:
    storage = torch.zeros(240)

    def view() -> Tensor:
        shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        strides = data.draw(st.lists(st.integers(1, 12), min_size=len(shape), max_size=len(shape)))
        return storage.as_strided(shape, strides, data.draw(st.integers(0, 100)))

    first, second = view(), view()
    common = elements(first) & elements(second)
    try:
        check_memory({"parameter a": first}, {"buffer b": second})
    except CaptureError:
        assert common
    else:
        assert not common


@pytest.mark.parametrize(
    "write",
    [lambda c, x: c.set_(x.detach()[0]), lambda c, _: c.resize_(2)],
    ids=["set_", "resize_"],
)
def test_other_memory_for_a_buffer_is_refused(
    write: Callable[[Tensor, Tensor], Tensor], request: pytest.FixtureRequest
) -> None:
    class Writes(Model):
        def forward(self, x: Tensor) -> Tensor:
            kept = self.get_buffer("kept")
            write(kept, x)
            return super().forward(x) + kept.sum()

    model = Writes()
    model.register_buffer("kept", torch.zeros(4))
    name = request.node.callspec.id
    with pytest.raises(
        CaptureError,
        match=(
            rf"test_sharing\.py.*forward replaces the memory of a tensor of the model with {name}"
        ),
    ):
        capture(
            Job(model, {"x": torch.randn(4, 4)}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        )
