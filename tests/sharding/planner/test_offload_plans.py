"""Plans with activation offload: when they are chosen, their time, and what is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.sharding.planner.test_loss_chunks import device as without_host
from tests.sharding.rewriting.test_recompute import layers_job

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.planner import device as devices
from trainload.sharding.planner.device import DeviceProfile, Link
from trainload.sharding.planner.make_plan import make_plan
from trainload.sharding.planner.plan_costs import Costs
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.replan import replan
from trainload.sharding.planner.search import Choice, Wanted, evaluate, search
from trainload.sharding.plans.plan import Cluster, Plan

ROWS = 512
ONE = Cluster()
FAST = Link(seconds=0.0, bytes_per_second=1e15)
SLOW = Link(seconds=0.0, bytes_per_second=1e6)
WANTED = Wanted(accumulate=1, recompute="job", loss_chunks=1)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(layers_job(6), tmp_path_factory.mktemp("layers") / "layers.tl")


@pytest.fixture(scope="module")
def source(layers: Package) -> Source:
    return Source(layers)


def device(memory: int = 2**40, host: Link | None = FAST) -> DeviceProfile:
    return without_host(memory).model_copy(update={"host": host})


def costs(source: Source, offload: float, host: Link | None = FAST) -> Costs:
    choice = Choice("single", offload=offload)
    return evaluate(source, ONE, device(host=host), choice, ROWS).costs


def between(source: Source) -> int:
    """Return a number of bytes that suffices with offload only."""
    return (costs(source, 0.0).memory.peak + costs(source, 1.0).memory.peak) // 2


def test_offload_is_chosen_where_nothing_else_fits(source: Source) -> None:
    best = search(source, ONE, device(between(source)), WANTED, global_batch=ROWS, exact=1).best
    assert best is not None
    assert best.choice.offload == best.plan.offload > 0


def test_the_fraction_that_waits_less_is_chosen(source: Source) -> None:
    fits_half = costs(source, 0.5).memory.peak
    slow = device(fits_half, Link(seconds=0.0, bytes_per_second=7e7))
    best = search(source, ONE, slow, WANTED, global_batch=ROWS).best
    assert best is not None
    assert best.choice.offload == 0.5


@pytest.mark.slow
def test_recomputation_is_chosen_where_copies_take_longer(source: Source) -> None:
    wanted = Wanted(accumulate=1, loss_chunks=1)
    best = search(source, ONE, device(between(source), SLOW), wanted, global_batch=ROWS).best
    assert best is not None
    assert (best.choice.offload, best.choice.recompute != "job") == (0.0, True)


@pytest.mark.parametrize(
    ("memory", "host"), [(2**40, FAST), (2**20, None)], ids=["enough memory", "no host"]
)
def test_offload_is_not_tried_without_need_or_means(
    source: Source, memory: int, host: Link | None
) -> None:
    found = search(source, ONE, device(memory, host), WANTED, global_batch=ROWS)
    assert {c.choice.offload for c in found.candidates} == {0.0}


@pytest.mark.slow
def test_an_offload_that_is_decided_already_stays(source: Source) -> None:
    wanted = Wanted(accumulate=1, offload=0.25)
    found = search(source, ONE, device(), wanted, global_batch=ROWS, exact=1)
    assert {c.plan.offload for c in found.candidates} == {0.25}


def test_copies_beside_kernels_take_no_time(source: Source) -> None:
    without, offloaded = costs(source, 0.0), costs(source, 1.0)
    assert offloaded.time.exposed == 0
    assert offloaded.time.seconds == pytest.approx(without.time.seconds, rel=1e-3)


def test_a_device_waits_for_a_slow_link(source: Source) -> None:
    offloaded = costs(source, 1.0, SLOW)
    copied = 2 * offloaded.memory.host / SLOW.bytes_per_second
    assert offloaded.time.exposed == pytest.approx(copied, rel=0.3), "to the host, and back"


def test_memory_of_the_host_is_counted_apart(source: Source) -> None:
    without, offloaded = costs(source, 0.0).memory, costs(source, 1.0).memory
    assert without.host == 0
    assert offloaded.host > without.peak - offloaded.peak


def test_every_gpu_has_a_link_to_its_host() -> None:
    profiles = map(devices.read, devices.names())
    assert {p.kind for p in profiles if p.host is None} == {"cpu"}


def test_a_plan_for_other_nodes_has_the_offload_of_the_first(layers: Package) -> None:
    plan = make_plan(layers, ONE, global_batch=ROWS, offload=0.5)
    assert replan(layers, plan, Cluster(devices_per_node=2)).offload == 0.5


def test_the_command_writes_a_plan_with_offload(layers: Package, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert cli.run(["plan", str(layers.path), "--offload", "0.5", "-o", str(path)]) == 0
    assert Plan.model_validate_json(path.read_bytes()).offload == 0.5


def test_offload_in_a_pipeline_is_rejected(layers: Package) -> None:
    two = Cluster(devices_per_node=2)
    with pytest.raises(PlanError, match="cannot be offloaded in a pipeline"):
        make_plan(layers, two, global_batch=ROWS, pipeline_ranks=2, offload=1.0)


def test_a_search_for_offload_in_a_pipeline_is_rejected(source: Source) -> None:
    two = Cluster(devices_per_node=2)
    with pytest.raises(PlanError, match="cannot be offloaded in a pipeline"):
        search(source, two, device(), Wanted(pipeline=2, offload=1.0), global_batch=ROWS)


def test_a_file_with_offload_in_a_pipeline_is_rejected(layers: Package) -> None:
    two = Cluster(devices_per_node=2)
    plan = make_plan(layers, two, global_batch=ROWS, pipeline_ranks=2)
    with pytest.raises(ValidationError, match="offload is set"):
        Plan.model_validate(plan.model_dump() | {"offload": 1.0})
