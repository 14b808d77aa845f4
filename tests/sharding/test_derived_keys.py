"""A derived graph is reused only where torch would choose the same operators."""

from __future__ import annotations

import pytest
import torch

from trainload.autograd_trace.derivation.aot import derive
from trainload.capture.job.ambient import deterministic_algorithms
from trainload.packaging.derived import _KEY, read_derived
from trainload.packaging.package import Package
from trainload.sharding.analysis.collectives import graph_digest
from trainload.sharding.plans.device_step_graphs import derived_key

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def keys(monkeypatch: pytest.MonkeyPatch, *, device: torch.device = GPU) -> set[str]:
    """Return the keys for two architectures, deterministic or not."""
    found = set()
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        for mode in (False, True):
            with deterministic_algorithms(mode):
                found.add(derived_key("train", device))
    return found


def test_gpus_of_other_architectures_and_determinism_have_other_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(keys(monkeypatch)) == 4


def test_graphs_for_cpus_depend_on_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(keys(monkeypatch, device=CPU)) == 1


def test_all_of_them_are_names_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(_KEY.fullmatch(key) for key in keys(monkeypatch))


@pytest.mark.parametrize("name", ["small_package", "gpt"])
def test_a_graph_that_was_stored_is_the_one_that_is_derived_anew(
    name: str, request: pytest.FixtureRequest
) -> None:
    package: Package = request.getfixturevalue(name)
    for graph in package.manifest.training_graphs():
        stored = read_derived(package, derived_key(graph, CPU))
        assert stored is not None
        derived = derive(package.program(), graph, CPU, is_deterministic=False)
        assert graph_digest(stored.module) == graph_digest(derived.module)
