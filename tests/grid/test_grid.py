"""Short form of `make grid`: the cells that no other test covers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.grid.models import MODELS
from tests.grid.run import row
from tests.laws.runs import TOLERANCE

pytestmark = pytest.mark.slow


def test_synchronised_batch_norms_train_as_one_process(tmp_path: Path) -> None:
    cells = row(MODELS["convolutions, batch norm"], 12, tmp_path, ["ZeRO-3", "PP 2"])
    assert all(isinstance(cell, float) and cell <= TOLERANCE for cell in cells.values()), cells
