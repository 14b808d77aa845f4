"""Packages with any option set of torch's optimizer database are updated as in eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.torch_samples.samples import OptionSet, job_of_optimizer, option_sets
from tests.trained import assert_trains_as_eager


@pytest.mark.slow  # tests/autograd_trace/optimizer/test_optimizer.py covers each optimizer
@pytest.mark.parametrize("options", option_sets(), ids=str)
def test_four_updates_are_those_of_eager(options: OptionSet, tmp_path: Path) -> None:
    job = job_of_optimizer(options)
    assert_trains_as_eager(job, job.batch, tmp_path)
