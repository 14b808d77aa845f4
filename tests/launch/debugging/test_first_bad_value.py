"""`debug` finds the operator, the line and the rows of the first value that is not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.launch.debugging.planted_faults import (
    LAYERS,
    ROWS,
    WIDTH,
    Attention,
    Chain,
    attention_loss,
    chain_loss,
    embedding_loss,
    freeze,
    linear,
    masked,
    plain_batch,
    products_loss,
    root_loss,
    save,
)
from torch import nn

import trainload
from trainload.core.errors import DataError, RequestError
from trainload.launching.debugging.bad_value import Finding
from trainload.packaging.package import Package

NOBODY = LAYERS
"""Value of `layer` of rows that are never divided by zero."""


def found(package: Package, data: Path, above: float | None = None) -> Finding:
    finding = trainload.debug(package, data=data, above=above).finding
    assert finding is not None
    return finding


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    batch = plain_batch() | {"layer": torch.full((ROWS,), NOBODY)}
    return freeze(tmp_path_factory.mktemp("chain"), Chain(), chain_loss, batch)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=3),
    number=st.integers(0, LAYERS - 1),
)
def test_the_first_of_several_layers_that_divide_by_zero_is_found(
    chain: Package, tmp_path: Path, rows: set[int], number: int
) -> None:
    layer = np.full(ROWS, NOBODY)
    layer[list(rows)] = number
    x = np.random.default_rng(number).standard_normal((ROWS, WIDTH), dtype=np.float32)
    sighting = found(chain, save(tmp_path / "rows.npz", x=x, layer=layer)).sighting
    assert (sighting.module, sighting.part) == (f"layers.{number}", "forward")
    assert sighting.operator == "aten.div.Tensor"
    assert sighting.line.endswith("divided: Tensor = y / torch.where(broken, 0.0, 1.0)[:, None]")
    assert set(sighting.rows) == rows


def test_nothing_is_found_in_a_step_without_a_fault(chain: Package, tmp_path: Path) -> None:
    x = np.ones((ROWS, WIDTH), np.float32)
    data = save(tmp_path / "rows.npz", x=x, layer=np.full(ROWS, NOBODY))
    diagnosis = trainload.debug(chain, data=data)
    assert diagnosis.finding is None
    assert diagnosis.loss is not None and np.isfinite(diagnosis.loss)


def test_a_row_that_is_no_number_is_found_in_the_data(chain: Package, tmp_path: Path) -> None:
    x = np.ones((ROWS, WIDTH), np.float32)
    x[6, 1] = np.nan
    data = save(tmp_path / "rows.npz", x=x, layer=np.full(ROWS, NOBODY))
    finding = found(chain, data)
    assert finding.what == "batch x has 1 NaN"
    assert finding.where == f"row 6 of {data}"


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    return freeze(tmp_path_factory.mktemp("attention"), Attention(), attention_loss, masked())


def test_infinities_of_a_mask_are_no_finding(attention: Package, tmp_path: Path) -> None:
    data = save(tmp_path / "rows.npz", **masked())
    assert trainload.debug(attention, data=data).finding is None


def test_a_row_that_is_masked_everywhere_is_found_where_it_becomes_nan(
    attention: Package, tmp_path: Path
) -> None:
    batch = masked()
    batch["allowed"][5] = False
    sighting = found(attention, save(tmp_path / "rows.npz", **batch)).sighting
    assert sighting.line.endswith("mixed: Tensor = torch.softmax(scores, -1) @ x")
    assert sighting.rows == (5,)
    assert sighting.inputs[0].infinities == 9 + (ROWS - 1) * 3


def test_an_overflow_is_found_where_it_is_computed(attention: Package, tmp_path: Path) -> None:
    batch = masked()
    batch["x"][2] *= 1e25
    sighting = found(attention, save(tmp_path / "rows.npz", **batch)).sighting
    assert "scores = self.query(x) @ self.key(x).transpose(1, 2)" in sighting.line
    assert sighting.rows == (2,)


def test_a_gradient_that_is_not_defined_is_found_in_backward(tmp_path: Path) -> None:
    package = freeze(tmp_path, linear(), root_loss, plain_batch())
    x = np.ones((ROWS, WIDTH), np.float32)
    x[4] = 0
    finding = found(package, save(tmp_path / "rows.npz", x=x))
    assert finding.sighting.part == "backward"
    assert finding.sighting.line.endswith("return (y * y).sum(1).sqrt().mean()")
    assert finding.sighting.rows == (4,)
    assert finding.parameters == ("weight",)


def test_rows_are_found_by_bisection_if_the_value_has_no_dim_of_rows(tmp_path: Path) -> None:
    package = freeze(tmp_path, linear(), products_loss, plain_batch())
    x = np.ones((ROWS, WIDTH), np.float32)
    x[3] = 1e25
    sighting = found(package, save(tmp_path / "rows.npz", x=x)).sighting
    assert sighting.operator == "aten.mm.default"
    assert sighting.rows == (3,)


def test_an_update_that_makes_weights_nan_is_found(tmp_path: Path) -> None:
    def without_epsilon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.0)

    package = freeze(tmp_path, linear(), root_loss, plain_batch(), optimizer=without_epsilon)
    x = np.ones((ROWS, WIDTH), np.float32)
    x[:, 0] = 0  # the gradients of its weights are 0, and divided by 0
    finding = found(package, save(tmp_path / "rows.npz", x=x))
    assert finding.sighting.part == "update"
    assert finding.parameters == ("weight",)


def test_the_first_value_above_a_limit_is_found(chain: Package, tmp_path: Path) -> None:
    x = np.ones((ROWS, WIDTH), np.float32)
    x[1] = 50
    data = save(tmp_path / "rows.npz", x=x, layer=np.full(ROWS, NOBODY))
    finding = found(chain, data, above=40.0)
    assert finding.what == "batch x has values above the limit"
    assert finding.sighting.rows == (1,)


def test_a_bad_index_is_an_error_that_names_its_row(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {name: torch.randint(0, 9, (ROWS,)) for name in ("word", "next")}
    package = freeze(tmp_path, nn.Embedding(9, 9), embedding_loss, batch)
    word = np.arange(ROWS)
    word[5] = 9
    data = save(tmp_path / "rows.npz", word=word, next=np.arange(ROWS))
    with pytest.raises(
        DataError, match=r"row 5 of .*: the value 9 of input 'word' is out of range"
    ):
        trainload.debug(package, data=data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "data: a package needs data"),
        ({"data": "x.npz", "step": 0}, "step: there is no such step"),
        ({"data": "x.npz", "above": -1.0}, "above: it is not a limit"),
    ],
)
def test_a_wrong_request_is_rejected(
    chain: Package, options: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        trainload.debug(chain, **options)  # type: ignore[arg-type]  # wrong on purpose
