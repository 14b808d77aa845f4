"""Resources that a rank's process keeps from one attempt of a run to the next."""

from __future__ import annotations

from typing import Any

import pytest
from tests.launch.cluster.simulated_cluster import spec_of

from trainload.launching.run.run_spec import RunSpec
from trainload.launching.worker.preparation import Keeper


@pytest.fixture
def spec(tmp_path: Any) -> RunSpec:
    return spec_of(tmp_path)


def test_the_next_attempt_of_a_rank_finds_what_is_open(spec: RunSpec) -> None:
    keeper = Keeper()
    opened = keeper.opened(spec, 0)
    later = spec.model_copy(update={"had_checkpoint": True})
    assert keeper.opened(later, 0) is opened


@pytest.mark.parametrize("change", ["rank", "run"])
def test_another_rank_or_run_opens_its_own(spec: RunSpec, change: str) -> None:
    keeper = Keeper()
    opened = keeper.opened(spec, 0)
    if change == "rank":
        assert keeper.opened(spec, 1) is not opened
    else:
        assert keeper.opened(spec.model_copy(update={"steps": 7}), 0) is not opened
