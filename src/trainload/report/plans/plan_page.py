"""The page of a plan: ranks by axes, memory over an update, a timeline, and the candidates that
were not chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup

from trainload.core.formatting import interval, size
from trainload.packaging.package import Package
from trainload.report.frame.page_frame import rendered
from trainload.report.frame.words import count, percent, ranks, sanitize
from trainload.report.plans.memory_chart import AREAS, memory_chart, memory_rows
from trainload.report.plans.rank_grid import grids_of
from trainload.report.plans.step_chart import LEGEND, step_chart, totals
from trainload.sharding.planner.device import DeviceProfile
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.search import Found
from trainload.sharding.planner.simulate import Simulation, simulate
from trainload.sharding.planner.step_memory import Kind, RankStep, rank_steps
from trainload.sharding.planner.verdicts import verdict_on
from trainload.sharding.plans.plan import Plan

_WIDE, _NARROW = 11.2, 4.6
"""Widths of the timeline in inches."""
_MOST_CHARTS, _MOST_OPERATORS, _MOST_GROUPS, _MOST_REFUSED = 8, 15, 40, 100
_LONGEST = 400


def plan_page(
    package: Package,
    plan: Plan,
    device: DeviceProfile | None = None,
    result: Found | None = None,
    source: Source | None = None,
) -> str:
    """Return the page of a plan as HTML.

    Args:
        package: the plan's package.
        plan: the plan.
        device: performance profile of the devices; None if only their kind is known, which gives
            memory, but no times.
        result: the search that found the plan; None if there was none.
        source: the package as the source of plans, if there is one whose graphs can be used again.

    Raises:
        PlanError: the plan is not for the package, or a graph cannot be made.
    """
    simulation = simulate(source or Source(package, evaluates=False), plan, training_only=True)
    steps = rank_steps(package, plan, simulation.ranks, device)
    shown = _chosen(steps)
    worst = max(steps, key=lambda step: sum(step.peak))
    timelines, kinds = _timelines(shown) if device is not None else ([], set())
    available = None if device is None else device.memory_bytes
    return rendered(
        "plans/plan.html",
        name=sanitize(package.path.name, _LONGEST),
        digest=package.digest,
        device=None if device is None else sanitize(device.name, _LONGEST),
        tiles=_tiles(plan, steps, worst, device),
        facts=_facts(plan, device),
        grids=grids_of(plan),
        formula=(plan.data_ranks, plan.tensor_ranks),
        groups=_groups(plan, simulation),
        # safe: ElementTree has escaped it
        memory=[
            (chart, Markup(chart.svg))
            for chart in (memory_chart(each, available, _title(plan, each)) for each in shown)
        ],
        memory_rows=[
            (_title(plan, each), moment, [size(n) for n in held], size(sum(held) + each.reserved))
            for each in shown
            for moment, held in memory_rows(each)
        ],
        kinds=[AREAS[kind][1] for kind in Kind],
        reserved=size(worst.reserved) if worst.reserved else "",
        charts_left_out=len(steps) - len(shown),
        left_out=steps[0].left_out,
        timelines=timelines,
        legend=[(kind, words) for kind, words in LEGEND.items() if kind in kinds],
        operators=[
            (sanitize(t.operator, _LONGEST), t.bound, f"{t.calls:,}", interval(t.seconds))
            for t in totals(shown, _MOST_OPERATORS)
        ],
        pipeline=plan.pipeline is not None,
        candidates=[] if result is None else _candidates(result),
        judged=0 if result is None else result.judged,
        refused=[]
        if result is None
        else [
            (sanitize(each.choice, _LONGEST), sanitize(each.reason, _LONGEST))
            for each in result.refused[:_MOST_REFUSED]
        ],
    )


def _chosen(steps: Sequence[RankStep]) -> list[RankStep]:
    """Return the ranks that are shown: all, or the first ones, the last one and the one that needs
    most memory.
    """
    if len(steps) <= _MOST_CHARTS:
        return list(steps)
    worst = max(steps, key=lambda step: sum(step.peak))
    chosen = {*range(_MOST_CHARTS - 2), worst.index, len(steps) - 1}
    return [steps[index] for index in sorted(chosen)]


def _title(plan: Plan, step: RankStep) -> str:
    return "every rank" if plan.pipeline is None else f"pipeline rank {step.index}"


def _timelines(steps: Sequence[RankStep]) -> tuple[list[tuple[str, Markup]], set[str]]:
    """Return (CSS class, SVG) of the timelines for wide and for narrow screens, and the kinds of
    their bars.
    """
    drawn = {name: step_chart(steps, name, width) for name, width in _WIDTHS.items()}
    # safe: ElementTree has escaped it
    return [(name, Markup(svg)) for name, (svg, _) in drawn.items()], drawn["wide"][1]


_WIDTHS = {"wide": _WIDE, "narrow": _NARROW}


def _tiles(
    plan: Plan, steps: Sequence[RankStep], worst: RankStep, device: DeviceProfile | None
) -> list[tuple[str, str, str]]:
    cluster, peak = plan.cluster, sum(worst.peak) + worst.reserved
    tiles = [
        ("ranks", f"{plan.world_size:,}", f"{cluster.nodes} x {cluster.devices_per_node}"),
        ("strategy", plan.strategy, f"recompute {plan.recompute}"),
        ("rows per update", f"{plan.global_batch:,}", f"{plan.rows_per_call} per call"),
        (
            "memory of a rank",
            size(peak),
            f"of {size(device.memory_bytes)}" if device is not None else "without the process",
        ),
    ]
    if device is not None:
        length = max(step.length for step in steps)
        tiles.append(("time of an update", interval(length), f"on {device.name}"))
    sent = plan.estimate.communication_bytes_per_step
    tiles.append(("sent by a rank", size(sent), "for an update"))
    return tiles


def _facts(plan: Plan, device: DeviceProfile | None) -> list[tuple[str, str]]:
    cluster = plan.cluster
    facts = [
        ("cluster", f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device}"),
        (
            "data axis",
            f"{plan.strategy}, ranks: {plan.data_ranks}"
            + (f", {plan.replicas} copies" if plan.replicas > 1 and plan.shard_degree > 1 else ""),
        ),
        (
            "tensor axis",
            f"{plan.tensor_ranks} ranks, divide {plan.divide}, {len(plan.tensor_shards)} parameters"
            if plan.tensor_ranks > 1
            else "none",
        ),
        (
            "pipeline axis",
            "none"
            if plan.pipeline is None
            else f"{plan.pipeline_ranks} ranks, {len(plan.pipeline.stage_ranks)} stages,"
            f" {plan.pipeline.schedule}",
        ),
        ("microbatches", f"{plan.accumulate} of {plan.rows_per_call} rows on each data rank"),
        ("recompute", plan.recompute),
        ("loss chunks", f"{plan.loss_chunks}"),
        ("offload", percent(plan.offload) if plan.offload else "none"),
        ("buckets", f"{len(plan.buckets):,}"),
        ("package", plan.package),
    ]
    if device is not None:
        facts.append(("figures of the device", sanitize(device.source, _LONGEST)))
    return facts


def _groups(plan: Plan, simulation: Simulation) -> list[tuple[str, str, str, str]]:
    """Return name, size, first group and collectives of the process groups."""
    counts = simulation.counts()
    return [
        (
            name.removeprefix("trainload."),
            f"{len(groups):,} x {len(groups[0]):,} ranks",
            _spelled(groups[0]),
            ", ".join(f"{n} {each}" for each, n in counts.get(name, {}).items()) or "messages only",
        )
        for name, groups in list(plan.groups().items())[:_MOST_GROUPS]
    ]


def _spelled(group: Sequence[int]) -> str:
    """Return the ranks of a group, with ranges; with a step, if they are evenly spread."""
    steps = {b - a for a, b in pairwise(group)}
    if len(group) > 4 and len(steps) == 1 and steps != {1}:
        return f"{group[0]}, {group[1]}, … {group[-1]}"
    return sanitize(ranks(group), _LONGEST)


def _candidates(result: Found) -> list[dict[str, str | bool]]:
    rows: list[dict[str, str | bool]] = []
    for number, each in enumerate(result.candidates, 1):
        choice, time = each.choice, each.costs.time
        rows.append(
            {
                "number": f"{number}",
                "is_best": each is result.best,
                "plan": str(choice),
                "calls": f"{choice.accumulate}",
                "recompute": choice.recompute,
                "memory": size(each.costs.memory.peak),
                "time": interval(time.seconds),
                "compute": percent(time.compute / time.seconds),
                "exposed": percent(time.exposed / time.seconds),
                "bubble": percent(time.bubble / time.seconds),
                "rate": f"{count(time.flops / time.seconds)}",
                "verdict": verdict_on(result, each),
            }
        )
    return rows
