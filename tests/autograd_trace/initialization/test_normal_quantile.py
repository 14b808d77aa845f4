"""Quantiles of the normal distribution, from operations that round alike everywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from trainload.autograd_trace.initialization.normal_quantile import (
    LEAST,
    logarithm,
    normal_quantile,
)

PROBABILITIES = torch.cat(
    [
        torch.linspace(LEAST, 1 - LEAST, 100_001, dtype=torch.float64),
        2.0 ** torch.linspace(-36, -1, 1001, dtype=torch.float64),
        torch.tensor([0.075, 0.925, 0.5], dtype=torch.float64),
    ]
)
DIGEST = """
import hashlib, torch
from trainload.autograd_trace.initialization.drawn_values import drawn_values
from trainload.capture.initialization.construction_draws import Draw
index = torch.arange(2**15 + 7)
kinds = {"normal": (0.0, 1.0), "truncated normal": (0.0, 1.0, -0.5, 2.0), "exponential": (1.0,),
         "uniform": (-1.0, 2.0), "geometric": (0.25,)}
digest = hashlib.sha256()
for kind, parameters in kinds.items():
    draw = Draw(kind, parameters, (len(index),), torch.float32)
    digest.update(drawn_values(draw, 3, 1, index).numpy().tobytes())
print(digest.hexdigest())
"""


def test_they_agree_with_torchs() -> None:
    found, expected = normal_quantile(PROBABILITIES), torch.special.ndtri(PROBABILITIES)
    assert float((found - expected).abs().max()) < 1e-13


def test_the_logarithm_agrees_with_torchs() -> None:
    found, expected = logarithm(PROBABILITIES), PROBABILITIES.log()
    assert float((found - expected).abs().max()) < 1e-14


def test_probabilities_beyond_the_least_one_have_its_quantile() -> None:
    ends = normal_quantile(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert torch.isfinite(ends).all()
    assert float(ends[0]) == float(normal_quantile(torch.tensor([LEAST], dtype=torch.float64)))


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_draws_have_the_same_bits_for_every_length_of_vectors(capability: str) -> None:
    script = [sys.executable, "-c", DIGEST]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    digests = {
        subprocess.run(
            script, env=each, capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for each in (environment, dict(os.environ))
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == hashlib.sha256().digest_size * 2
