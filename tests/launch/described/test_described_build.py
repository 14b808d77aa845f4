"""A child process tells its parent how a build for a described GPU goes."""

from __future__ import annotations

import io
import pickle
import re

import pytest

from trainload.core.errors import PlanError
from trainload.launching.described import described_gpu
from trainload.launching.described.described_build import receive
from trainload.launching.described.described_gpu import MODE, described, environment_with
from trainload.sharding.planner.device import names, read


def messages(*values: object) -> io.BytesIO:
    return io.BytesIO(b"".join(map(pickle.dumps, values)))


def test_the_parts_of_a_build_are_told_in_order() -> None:
    told: list[tuple[str, float]] = []
    receive(
        messages(("stage", "shard", 0.5), ("stage", "compile eval", 2.0)),
        lambda *part: told.append(part),
    )
    assert told == [("shard", 0.5), ("compile eval", 2.0)]


def test_the_child_s_error_is_raised_as_it_was() -> None:
    error = PlanError("the plan is of another package", where="plan", got="x", hint="Plan again.")
    with pytest.raises(PlanError, match=re.escape(str(error))):
        receive(messages(("error", error)), lambda *_: None)


def test_a_child_does_not_inherit_that_launches_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "dry")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(described_gpu, "_library", lambda *_: described_gpu._SOURCE)
    assert MODE not in environment_with(described("h100"), described_gpu._SOURCE.parent)


@pytest.mark.parametrize("name", [each for each in names() if read(each).architecture is not None])
def test_every_gpu_with_an_architecture_has_the_facts_of_the_library(name: str) -> None:
    source = described_gpu._SOURCE.read_text()
    facts = described_gpu._facts(described(name))
    assert all(fact in source for fact in facts)
    assert facts["GPU_BLOCKS"] in {16, 24, 32}
