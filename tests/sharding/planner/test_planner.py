"""Results of the planner for small jobs whose correct results are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainload.autograd_trace.graphs import StepGraph
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.planner.device import (
    DeviceProfile,
    Link,
    Span,
    names,
    read,
    seconds_of,
    span_of,
)
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.search import (
    Candidate,
    Choice,
    Found,
    Wanted,
    costs_of,
    evaluate,
    in_order,
    search,
    smallest,
)
from trainload.sharding.plans.device_step_graphs import step_graphs
from trainload.sharding.plans.plan import Cluster, Shard
from trainload.sharding.tensor.partition import Partitioned, partition

MIB = 2**20


@pytest.fixture
def source(small_source: Source) -> Source:
    return small_source


def device(
    memory: int = 2**40,
    link: float = 1e9,
    far: float = 1e9,
    latency: float = 0.0,
    flops: float = 1e9,
) -> DeviceProfile:
    """Return a device whose figures make sums easy."""
    return DeviceProfile(
        name="d",
        kind="cpu",
        source="made up",
        memory_bytes=memory,
        flops={"float32": flops},
        memory_bytes_per_second=1e9,
        node=Link(seconds=latency, bytes_per_second=link),
        network=Link(seconds=latency, bytes_per_second=far),
    )


def choices(found: Found) -> list[str]:
    return [str(candidate.choice) for candidate in found.candidates]


def cluster(devices: int, nodes: int = 1) -> Cluster:
    return Cluster(nodes=nodes, devices_per_node=devices)


# Devices


@pytest.mark.parametrize("name", names())
def test_figures_of_known_devices_come_along(name: str) -> None:
    profile = read(name)
    assert profile.name == name
    assert max(profile.flops.values()) > profile.rate("float32")


@pytest.mark.parametrize("name", [name for name in names() if read(name).kind == "cuda"])
def test_a_gpu_reaches_a_part_of_what_its_data_sheet_says(name: str) -> None:
    profile = read(name)
    assert profile.product_names
    assert all(
        0.4 < rate / profile.peak_flops[dtype] < 0.9 for dtype, rate in profile.flops.items()
    )


def test_an_unknown_device_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(PlanError, match=r"no such device.*a100.*got h800"):
        read("h800")


def test_a_file_without_figures_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"name": "d", "kind": "cpu"}')
    with pytest.raises(PlanError, match="memory_bytes"):
        read(str(tmp_path / "d.json"))


@pytest.mark.parametrize(
    ("operator", "span", "seconds"),
    [
        ("all_gather_into_tensor", Span(4, 4), 0.75),
        ("reduce_scatter_tensor", Span(4, 4), 0.75),
        ("all_reduce", Span(4, 4), 1.5),
        ("all_reduce", Span(4, 1), 15.0),
        ("all_reduce", Span(4, 2), 7.5),
        ("send", Span(2, 1), 10.0),
        ("all_reduce", Span(1, 1), 0.0),
    ],
    ids=str,
)
def test_a_ring_takes_its_share_of_the_slowest_link(
    operator: str, span: Span, seconds: float
) -> None:
    assert seconds_of(operator, 1e9, span, device(link=1e9, far=1e8)) == pytest.approx(seconds)


def test_a_group_lies_where_its_ranks_do() -> None:
    assert span_of([(0, 1), (2, 3)], devices_per_node=4) == Span(2, 2)
    assert span_of([(0, 4), (1, 5)], devices_per_node=4) == Span(2, 1)
    assert span_of([tuple(range(8))], devices_per_node=4) == Span(8, 4)


# Costs


def test_a_pipelines_bubble_is_that_of_the_textbook(source: Source) -> None:
    fast = device(link=1e15)
    found = {
        microbatches: evaluate(
            source,
            cluster(2),
            fast,
            Choice("single", pipeline=2, accumulate=microbatches, schedule=("gpipe", None)),
            8,
        )
        for microbatches in (2, 4)
    }
    for microbatches, candidate in found.items():
        time = candidate.costs.time
        uneven = 0.2  # the two stages are not exactly equal
        assert time.bubble / (time.compute + time.exposed) == pytest.approx(
            1 / microbatches, abs=uneven
        )
    assert found[4].costs.time.bubble < found[2].costs.time.bubble


def test_exposed_communication_is_what_compute_does_not_hide(source: Source) -> None:
    exposed = {
        link: evaluate(
            source, cluster(4), device(link=link, flops=1e9), Choice("zero3"), 8
        ).costs.time.exposed
        for link in (1e4, 1e6, 1e12)
    }
    assert exposed[1e4] > 10 * exposed[1e6] > 0
    assert exposed[1e12] < 1e-6


def test_more_ranks_of_zero3_hold_less_each(source: Source) -> None:
    held = [
        evaluate(source, cluster(ranks), device(), Choice("zero3"), 8).costs.memory
        for ranks in (2, 8)
    ]
    assert held[0].parameters == pytest.approx(4 * held[1].parameters, rel=0.2)
    assert held[0].optimizer == pytest.approx(4 * held[1].optimizer, rel=0.2)


def test_microbatches_hold_fewer_activations(source: Source) -> None:
    once, often = (
        evaluate(source, cluster(1), device(), Choice("single", accumulate=n), 8).costs.memory
        for n in (1, 8)
    )
    assert often.activations < once.activations
    assert often.gradients > once.gradients == 0, "between microbatches gradients are held"


@pytest.mark.slow
def test_a_pipelines_ranks_hold_the_microbatches_that_are_under_way(source: Source) -> None:
    def held(schedule: str) -> int:
        choice = Choice("single", pipeline=2, accumulate=8, schedule=(schedule, None))  # type: ignore[arg-type]
        return evaluate(source, cluster(2), device(), choice, 8).costs.memory.activations

    assert held("1f1b") < held("gpipe"), "gpipe keeps all eight, 1f1b two"


def test_costs_of_a_plan_are_those_of_its_candidate(source: Source) -> None:
    candidate = evaluate(source, cluster(2), device(), Choice("zero1"), 8)
    assert costs_of(source, candidate.plan, device()).time == candidate.costs.time


# The search


@pytest.mark.slow
def test_with_fast_links_and_room_nothing_is_repeated(source: Source) -> None:
    best = search(
        source, cluster(2), device(link=1e12), Wanted(strategy="zero0", tensor=1, pipeline=1)
    ).best
    assert best is not None
    assert best.choice.recompute == "job"


def test_little_memory_is_worth_a_repetition(source: Source) -> None:
    room = evaluate(source, cluster(1), device(), Choice("single"), 8).costs.memory.peak
    tight = evaluate(
        source, cluster(1), device(), Choice("single", recompute="full"), 8
    ).costs.memory.peak
    asked = Wanted(accumulate=1)
    best = search(source, cluster(1), device(memory=(room + tight) // 2), asked).best
    assert best is not None
    assert best.choice.recompute != "job"
    assert best.costs.memory.peak <= (room + tight) // 2


@pytest.mark.slow
def test_slow_links_make_many_small_messages_dear(source: Source) -> None:
    found = search(source, cluster(4), device(link=1e12, latency=1.0), exact=3)
    assert found.best is not None
    assert found.best.choice.strategy in ("zero0", "single")
    assert found.best.choice.tensor == 1


def test_what_is_decided_already_stays(source: Source) -> None:
    found = search(
        source, cluster(4), device(), Wanted(strategy="zero3", tensor=2, recompute="selective")
    )
    assert {(c.choice.strategy, c.choice.tensor, c.choice.recompute) for c in found.candidates} == {
        ("zero3", 2, "selective")
    }


@pytest.mark.slow
def test_a_tensor_axis_stays_within_a_node(source: Source) -> None:
    found = search(
        source, cluster(2, nodes=2), device(), Wanted(strategy="zero0", pipeline=1, recompute="job")
    )
    assert {c.choice.tensor for c in found.candidates} == {1, 2}


@pytest.mark.slow
def test_an_axis_that_is_asked_for_divides_what_is_asked_for(source: Source) -> None:
    wanted = Wanted(
        strategy="zero0", tensor=2, divide="context", pipeline=1, recompute="job", accumulate=1
    )
    (found,) = search(source, cluster(4), device(), wanted).candidates
    assert (found.plan.divide, found.plan.tensor_shards, str(found.choice)) == (
        "context",
        {},
        "zero0, context 2",
    )


@pytest.mark.slow
def test_sequence_parallel_holds_less_than_the_tensor_axis_alone(source: Source) -> None:
    choice = Choice("single", tensor=2)
    alone, also = (
        evaluate(source, cluster(2), device(), each, 8)
        for each in (choice, replace(choice, divide="sequence"))
    )
    assert also.costs.memory.activations < 0.8 * alone.costs.memory.activations


def test_what_cannot_be_made_is_told_with_its_reason(source: Source) -> None:
    found = search(source, cluster(7), device(), global_batch=14, exact=1)
    (refused,) = (each for each in found.refused if each.choice == "tensor 7")
    assert "nothing to divide" in refused.reason


@pytest.mark.parametrize(
    ("seconds", "peaks", "order"),
    [
        ([1.0, 1.01, 1.03], [30, 20, 10], [1, 0, 2]),
        ([1.0, 1.03, 1.01], [20, 10, 30], [0, 2, 1]),
        ([1.0, 1.01, 1.02], [50, 30, 20], [2, 1, 0]),
        ([2.0, 1.0, 3.0], [60, 50, 55], [1, 2, 0]),
    ],
    ids=[
        "as fast, and smaller",
        "the smaller ones are slower",
        "the fastest does not fit",
        "none fits",
    ],
)
def test_of_plans_as_fast_as_the_fastest_the_smallest_comes_first(
    source: Source, seconds: list[float], peaks: list[int], order: list[int]
) -> None:
    made = evaluate(source, cluster(1), device(), Choice("single"), 8)
    none = replace(
        made.costs.memory,
        parameters=0,
        optimizer=0,
        buffers=0,
        gradients=0,
        activations=0,
        communication=0,
        reserved=0,
    )
    time = replace(made.costs.time, exposed=0.0, bubble=0.0, update=0.0)
    candidates = [
        replace(
            made,
            costs=replace(
                made.costs, time=replace(time, compute=each), memory=replace(none, activations=peak)
            ),
        )
        for each, peak in zip(seconds, peaks, strict=True)
    ]
    assert [candidates.index(each) for each in in_order(candidates, device(memory=40))] == order


def test_a_search_says_what_it_does(source: Source) -> None:
    told: list[str] = []
    found = search(
        source, cluster(2), device(), Wanted(pipeline=1, recompute="job"), exact=2, say=told.append
    )
    assert told[:2] == ["estimating plans without a tensor axis", "estimating plans with tensor 2"]
    assert [line.partition("; ")[2].partition(": ")[0] for line in told[2:]] == [
        "simulating number 1 of the best 2",
        "simulating number 2 of the best 2",
    ]
    assert told[2].startswith(f"{found.judged:,} plans estimated")


def test_a_graph_is_partitioned_once_for_all_plans_with_one_tensor_axis(
    small_package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(
        step: StepGraph, ranks: int, shards: Mapping[str, Shard], *, positions: bool = False
    ) -> Partitioned:
        made.append(ranks)
        return partition(step, ranks, shards, positions=positions)

    monkeypatch.setattr("trainload.sharding.planner.plan_source.partition", counted)
    search(Source(small_package), cluster(2), device(), Wanted(tensor=2, pipeline=1), exact=1)
    # Once for all estimates, whose graphs are then released, and once for the plan that is
    # simulated.
    assert made == [2, 2]


@pytest.mark.slow
def test_a_search_without_evaluation_derives_no_graph_of_it(
    small_package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def noted(package: Package, device: torch.device, names: Iterable[str]) -> dict[str, StepGraph]:
        asked.extend(wanted := list(names))
        return step_graphs(package, device, wanted)

    monkeypatch.setattr("trainload.sharding.planner.plan_source.step_graphs", noted)
    found = search(
        Source(small_package, evaluates=False),
        cluster(2),
        device(),
        Wanted(pipeline=2, recompute="job"),
        exact=1,
    )
    assert found.best is not None and set(asked) == set(small_package.manifest.training_graphs())


def test_those_that_fit_come_first_and_the_fastest_of_them(source: Source) -> None:
    asked = Wanted(pipeline=1, tensor=1)
    room = sorted(
        c.costs.memory.peak for c in search(source, cluster(2), device(), asked, exact=4).candidates
    )
    found = search(source, cluster(2), device(memory=room[len(room) // 2]), asked, exact=4)
    fits = [found.fits(c) for c in found.candidates]
    times = [c.costs.time.seconds for c in found.candidates if found.fits(c)]
    assert fits == sorted(fits, reverse=True)
    assert times == sorted(times)


@pytest.mark.slow
def test_what_fits_nowhere_fits_on_more_nodes(source: Source) -> None:
    everything = evaluate(
        source, cluster(1), device(), Choice("single", accumulate=8, recompute="full"), 8
    ).costs.memory
    little = device(memory=int(0.6 * everything.peak))
    assert search(source, cluster(1), little).best is None
    found: Candidate | None = smallest(source, cluster(1), little)
    assert found is not None
    assert found.plan.cluster.nodes in (2, 4, 8)
    assert found.costs.memory.peak <= little.memory_bytes


@pytest.mark.slow
def test_a_plan_that_was_chosen_is_one_that_can_be_checked(source: Source) -> None:
    from trainload.sharding.planner.check_plan import check_plan

    package: Package = source.package
    for candidate in search(source, cluster(4), device(), exact=4).candidates:
        check_plan(candidate.plan, package)
