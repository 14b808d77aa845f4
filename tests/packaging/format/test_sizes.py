"""Graphs whose sizes were declared in every way are written and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.jobs import job
from tests.capture.shape_jobs import Parts
from torch.export import Dim

import trainload

HALF = Dim("half", min=2, max=64)
# the loss uses only part of the model
pytestmark = pytest.mark.filterwarnings("ignore:.* get no gradient")


def loss(model: Any, batch: dict[str, Any]) -> Any:
    return model.linear(batch["x"]).square().mean() + batch["y"].mean()


@pytest.mark.matrix("derived of what no input has", "hints")
@pytest.mark.parametrize(
    ("dynamic", "lengths"),
    [
        ({"x": {1: Dim("seq", max=64)}}, (9, 12)),
        ({"x": {1: HALF}, "y": {1: 2 * HALF}}, (9, 18)),
        ({"x": {1: 2 * HALF}, "y": {1: 4 * HALF}}, (10, 20)),
        ({"x": {0: Dim.AUTO, 1: Dim.AUTO(max=64)}, "y": {1: Dim.DYNAMIC}}, (9, 7)),
        ({"x": {1: Dim.STATIC}, "y": {1: 12}}, (6, 12)),
    ],
    ids=["named", "derived", "derived of what no input has", "hints", "fixed"],
)
def test_a_package_takes_every_size_that_was_declared(
    dynamic: dict[str, Any], lengths: tuple[int, int], tmp_path: Path
) -> None:
    given = job(
        Parts(),
        batch={"x": torch.randn(4, 6, 8), "y": torch.randn(4, 12)},
        loss=loss,
        dynamic=dynamic,
    )
    package = trainload.freeze(given, tmp_path / "sizes.tl")
    x, y = torch.randn(3, lengths[0], 8), torch.randn(3, lengths[1])
    exported = package.graph("train")
    state = {name: package.weights.tensor(name) for name in exported.state_dict}
    values = iter([x, y])
    specs = exported.graph_signature.input_specs
    arguments = [state[spec.target] if spec.target is not None else next(values) for spec in specs]
    assert exported.graph_module(*arguments)[0].item() == pytest.approx(
        loss(given.model, {"x": x, "y": y}).item(), rel=1e-6
    )


def test_a_dim_that_torch_fixed_is_a_number_of_the_manifest(tmp_path: Path) -> None:
    def positioned(model: Any, batch: dict[str, Any]) -> Any:
        return (model.linear(batch["x"]) + model.positions).square().mean()

    given = job(
        Parts(), batch={"x": torch.randn(4, 16, 8)}, loss=positioned, dynamic={"x": {1: Dim.AUTO}}
    )
    package = trainload.freeze(given, tmp_path / "fixed.tl")
    assert package.manifest.graphs["train"].inputs[0].shape == ("batch", 16, 8)
