"""Every module in torch's database trains as in eager PyTorch."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.coverage.eager import is_static
from tests.coverage.models.masks import StatelessDraws
from tests.torch_samples.samples import (
    LAZY,
    TRAINABLE,
    ModuleSample,
    gives_nan,
    has_fixed_rows,
    job_of_module,
)
from tests.trained import assert_trains_as_eager, train_eagerly

import trainload
from trainload import Job
from trainload.capture.job.leading_rows import arranged
from trainload.core.errors import CaptureError, DivergedError

pytestmark = [
    # a TransformerEncoder warns about its options
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    # the scale of a floating-point input that is only a mask
    pytest.mark.filterwarnings("ignore:1 parameters get no gradient"),
    # a KLDivLoss warns about its default
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]
FINITE = [sample for sample in TRAINABLE if not gives_nan(sample)]
MODULES = list(dict.fromkeys(sample.module for sample in FINITE))


def stateless(job: Job, step: int, rows: int) -> AbstractContextManager[Any]:
    """Make eager PyTorch draw the same random numbers as a package."""
    return StatelessDraws(job.seed, step, 0, rows, static=is_static(job))


@pytest.mark.matrix(
    when=lambda sample: MODULES.index(sample.module) % 10 == 0 and sample.number == 0
)
@pytest.mark.parametrize("sample", FINITE, ids=str)
def test_four_updates_of_a_module_are_those_of_eager(sample: ModuleSample, tmp_path: Path) -> None:
    job = job_of_module(sample, static=has_fixed_rows(sample))
    assert_trains_as_eager(job, arranged(job).batch, tmp_path, draws=stateless)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The loss of Job.batch is nan")
@pytest.mark.parametrize("sample", [sample for sample in TRAINABLE if gives_nan(sample)], ids=str)
def test_what_is_no_number_in_eager_ends_a_run(sample: ModuleSample, tmp_path: Path) -> None:
    job = job_of_module(sample, static=has_fixed_rows(sample))
    batch = arranged(job).batch
    assert math.isnan(train_eagerly(job_of_module(sample), batch).losses[0])
    with pytest.raises(DivergedError, match="step 1: the loss is nan"):
        assert_trains_as_eager(job, batch, tmp_path)


@pytest.mark.matrix(when=lambda sample: sample is LAZY[0])
@pytest.mark.parametrize("sample", LAZY, ids=str)
def test_a_lazy_module_is_refused(sample: ModuleSample, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"has no shape yet \(it belongs to a lazy module\)"):
        trainload.freeze(job_of_module(sample), tmp_path / "job.tl")
