"""The package derived from a frozen one with adapters: its graphs, plans and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.launch.settings.adapters_by_hand import ADAPTERS, LAYERS
from torch import Tensor, nn

import trainload
from trainload.launching.node.build_key import build_target
from trainload.launching.settings.adapter_weights import first_values
from trainload.packaging.package import Package
from trainload.packaging.signatures.verify import verify_package

TWO = trainload.Cluster(devices_per_node=2)


def test_the_tensor_axis_divides_adapters_with_their_layers(package: Package) -> None:
    plan = trainload.plan(
        trainload.Overrides(adapters=ADAPTERS).apply(package), TWO, tensor_ranks=2
    )
    shards = {name: shard.dim for name, shard in plan.tensor_shards.items()}
    assert {"second.weight", "third.weight"} <= shards.keys()
    assert shards["second.weight"] == shards["second.lora_B.weight"] == 0  # output dim is divided
    assert shards["third.weight"] == shards["third.lora_A.weight"] == 1  # input dim is divided


def test_the_optimizer_has_state_for_what_is_trained_alone(package: Package) -> None:
    whole = trainload.plan(package, trainload.Cluster(), "single").estimate
    changed = trainload.Overrides(adapters=ADAPTERS).apply(package)
    few = trainload.plan(changed, trainload.Cluster(), "single").estimate
    trained = [ADAPTERS.rank * side for name in LAYERS for side in package.weights.shape(name)]
    assert few.optimizer_bytes == 2 * 4 * sum(
        -(-length // 16) * 16 for length in trained
    )  # Adam's moments; each starts at a multiple of 16 elements
    assert few.optimizer_bytes < whole.optimizer_bytes / 2
    assert few.gradient_bytes < whole.gradient_bytes / 2


def test_a_gradient_of_a_frozen_matrix_is_nowhere_in_the_graph(package: Package) -> None:
    from trainload.sharding.plans.device_step_graphs import step_graphs

    changed = trainload.Overrides(adapters=ADAPTERS).apply(package)
    step = step_graphs(changed, torch.device("cpu"))["train"]
    shapes = [
        tuple(node.meta["val"].shape)
        for node in step.module.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
    ]
    computed = [
        n for n in step.module.graph.nodes if n.op == "call_function" and "mm" in str(n.target)
    ]
    assert shapes and all(
        tuple(node.meta["val"].shape) not in [(12, 12), (8, 12)] for node in computed
    )


def test_the_changed_package_is_a_sound_one(package: Package) -> None:
    changed = trainload.Overrides(adapters=ADAPTERS).apply(package)
    assert not verify_package(changed.path).problems
    assert changed.manifest.parent == package.digest
    assert [entry.options["rank"] for entry in changed.manifest.passes] == [3]
    batch = {"x": torch.randn(5, 8), "y": torch.randn(5, 8)}
    (loss,) = changed.graph("eval").module(check_guards=False)(batch)
    (before,) = package.graph("eval").module(check_guards=False)(batch)
    torch.testing.assert_close(loss, before)


def test_the_changed_package_is_made_once(package: Package) -> None:
    overrides = trainload.Overrides(adapters=ADAPTERS)
    first = overrides.apply(package)
    made = (first.path / "manifest.json").stat().st_mtime_ns
    assert trainload.Overrides(adapters=ADAPTERS, lr=0.1).apply(package).path == first.path
    assert (overrides.apply(package).path / "manifest.json").stat().st_mtime_ns == made


@pytest.mark.slow
def test_its_bytes_follow_from_the_package_and_the_seed(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = trainload.Overrides(adapters=ADAPTERS).apply(package)
    other = trainload.Overrides(adapters=ADAPTERS, seed=11).apply(package)
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path))
    there = trainload.Overrides(adapters=ADAPTERS).apply(package)
    assert there.path != here.path and there.digest == here.digest
    plan = trainload.plan(here, trainload.Cluster(), "single")
    assert other.digest != here.digest
    # nothing is compiled again
    assert build_target(other, plan, torch.device("cpu")) == build_target(
        here, plan, torch.device("cpu")
    )


@pytest.mark.slow
def test_one_that_was_damaged_is_made_again(package: Package) -> None:
    adapters = trainload.Overrides(adapters=ADAPTERS.model_copy(update={"rank": 2}))
    made = adapters.apply(package)
    (made.path / "manifest.json").write_bytes(b"{}")
    assert adapters.apply(package).digest == made.digest


def test_adapters_begin_within_kaiming_s_bound(package: Package) -> None:
    values = first_values(ADAPTERS.chosen(package.manifest), package.manifest, 3)
    for name in ("second", "third", "last"):
        down, up = values[f"{name}.lora_A.weight"], values[f"{name}.lora_B.weight"]
        bound = nn.init.calculate_gain("leaky_relu", 5**0.5) * 3**0.5 / down.shape[1] ** 0.5
        assert not up.any()
        assert 0.5 * bound < down.abs().max() <= bound and down.min() < 0 < down.max()
    assert not torch.equal(values["second.lora_A.weight"], values["third.lora_A.weight"])
