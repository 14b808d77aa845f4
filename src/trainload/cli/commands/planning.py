"""The command that plans: a requested plan, or the best possible one."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from trainload.cli.commands import shared
from trainload.cli.commands.overview import DenseCommand
from trainload.cli.commands.page_files import check_libraries, check_page_path, write_page
from trainload.cli.commands.shared import (
    CountOf,
    LocalPath,
    NamedCount,
    OneOf,
    Setting,
    any_package_argument,
    items,
    json_option,
    located,
    out,
    package_argument,
    positive,
    print_json,
    working,
    write_text,
)
from trainload.cli.view import tables as view
from trainload.core.errors import PlanError, StorageError
from trainload.sharding.plans.strategies import (
    BATCH_NORMS,
    DIVIDES,
    RECOMPUTES,
    SCHEDULES,
    STRATEGIES,
)

if TYPE_CHECKING:
    from trainload.packaging.package import Package
    from trainload.sharding.plans.plan import Pipeline, Plan
    from trainload.sharding.plans.strategies import BatchNorm, Divide, Recompute, Schedule, Strategy

KINDS = ("cpu", "cuda")
settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    type=Setting(),
    metavar="KEY=VALUE",
    help="Setting of the launch: trainload settings.",
)
plan_file_option = click.option(
    "--plan",
    "plan_file",
    type=LocalPath(),
    metavar="FILE",
    required=True,
    help="Plan from `trainload plan`.",
)


def complete_device(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the kinds of devices, and the names of the profiles that come with trainload."""
    from trainload.sharding.planner.device import names

    return items([*KINDS, *names()], incomplete)


@click.command(short_help="Plan for a cluster.", cls=DenseCommand)
@any_package_argument
@click.option("--nodes", type=positive, metavar="N", default=1, help="Number of nodes. Default: 1.")
@click.option(
    "--devices-per-node",
    type=positive,
    metavar="N",
    default=1,
    help="Devices per node. Default: 1.",
)
@click.option(
    "--device",
    metavar="D",
    shell_complete=complete_device,
    default="cpu",
    help="cpu, cuda, or a profile: h100, FILE, ...",
)
@click.option(
    "--strategy",
    type=NamedCount(STRATEGIES),
    metavar="S[/N]",
    help="single, zero0 to zero3, hybrid[/shard size].",
)
@click.option(
    "--tensor",
    type=CountOf(DIVIDES),
    metavar="N[/W]",
    help="Tensor parallel; /sequence, context, expert.",
)
@click.option(
    "--tensor-rule",
    "rules",
    multiple=True,
    metavar="RULE",
    help="PATTERN=DIM, =DIM/BLOCKS or =whole.",
)
@click.option("--pipeline", type=positive, metavar="N", help="Pipeline parallel ranks. Default: 1.")
@click.option(
    "--schedule",
    type=NamedCount(SCHEDULES),
    metavar="S[/N]",
    help="gpipe, 1f1b, zero-bubble, zbv, dualpipev.",
)
@click.option(
    "--recompute",
    type=OneOf(RECOMPUTES),
    metavar="R",
    help=f"One of {', '.join(RECOMPUTES)}. Default: job.",
)
@click.option(
    "--loss-chunks",
    type=positive,
    metavar="N",
    help="Compute logits in N parts. Default: 1.",
)
@click.option(
    "--offload",
    type=click.FloatRange(0, 1),
    metavar="X",
    help="Activations kept on the host, 0 to 1.",
)
@click.option(
    "--batch-norm",
    type=OneOf(BATCH_NORMS),
    default="averaged",
    metavar="S",
    help=f"{', '.join(BATCH_NORMS)}. Default: averaged.",
)
@click.option(
    "--global-batch", type=positive, metavar="N", help="Rows per update. Default: the job's."
)
@click.option(
    "--accumulate", type=positive, metavar="N", help="Microbatches per update. Default: by plan."
)
@click.option(
    "--bucket-mib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Size of parameter buckets. Default: 25.",
)
@click.option(
    "--prefetch",
    type=click.IntRange(min=0),
    metavar="N",
    help="Buckets gathered ahead. Default: 1.",
)
@settings_option
@click.option(
    "--explain", type=positive, metavar="N", help="Show costs of candidate N, node by node."
)
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="FILE",
    help="Write the plan to FILE, as JSON.",
)
@click.option(
    "--html",
    "page",
    type=LocalPath(),
    metavar="FILE",
    help="Write a page about the plan to FILE.",
)
@json_option
def plan(
    package: str,
    nodes: int,
    devices_per_node: int,
    device: str,
    strategy: tuple[Strategy, int | None] | None,
    tensor: tuple[int, Divide] | None,
    rules: tuple[str, ...],
    pipeline: int | None,
    schedule: tuple[Schedule, int | None] | None,
    recompute: Recompute | None,
    loss_chunks: int | None,
    offload: float | None,
    batch_norm: BatchNorm,
    global_batch: int | None,
    accumulate: int | None,
    bucket_mib: float | None,
    prefetch: int | None,
    settings: tuple[str, ...],
    explain: int | None,
    output: Path | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Plan the distribution of a package over a cluster. No cluster is needed."""
    from trainload.sharding.plans.coupled_rows import note_on_coupled_rows

    if output is not None and output.exists():
        raise StorageError(
            "it exists already", where=str(output), hint="Choose another path, or remove it."
        )
    if page is not None:
        check_libraries()
        check_page_path(page)
    name, shard_ranks = strategy or (None, None)
    options: dict[str, Any] = {
        "shard_ranks": shard_ranks,
        "tensor_rules": dict(_parse_rule(text) for text in rules),
        "batch_norm": batch_norm,
    }
    if bucket_mib is not None:
        options["bucket_bytes"] = max(1, int(bucket_mib * 2**20))
    ranks, divide = tensor or (None, "tensor")
    if prefetch is not None:
        options["prefetch"] = prefetch
    opened = changed_by(settings, shared.open_package(located(package)[1]))
    if device not in KINDS:
        choices: dict[str, Any] = {
            "strategy": name,
            "tensor": ranks,
            "divide": divide,
            "pipeline": pipeline,
            "accumulate": accumulate,
        }
        choices |= {
            "recompute": recompute,
            "schedule": schedule,
            "loss_chunks": loss_chunks,
            "offload": offload,
        }
        cluster = {"nodes": nodes, "devices_per_node": devices_per_node}
        searched = {"global_batch": global_batch, "options": options}
        _plan_best(
            opened,
            cluster,
            device,
            choices,
            searched,
            _OutputOptions(explain, output, page, as_json),
        )
        return
    if explain is not None:
        raise click.UsageError(
            "--explain needs a device profile: --device h100, another profile that comes with"
            " trainload, or a file."
        )
    options |= {
        "global_batch": global_batch,
        "accumulate": accumulate,
        "recompute": recompute or "job",
        "loss_chunks": loss_chunks or 1,
        "offload": offload or 0.0,
    }
    options |= {
        "tensor_ranks": ranks or 1,
        "divide": divide if ranks != 1 else "tensor",
        "pipeline_ranks": pipeline or 1,
    }
    options |= dict(zip(("schedule", "stages_per_rank"), schedule or (None, None), strict=True))
    with working("making the plan"):
        planned = make_plan(opened, nodes, devices_per_node, device, name, **options)
    if output is not None:
        write_text(output, planned.model_dump_json(indent=2) + "\n")
    if page is not None:
        _write_page(page, opened, planned)
    if as_json:
        print_json(planned)
        return
    rows = _describe(planned)
    if (note := note_on_coupled_rows(opened.manifest, planned)) is not None:
        rows.append(("note", note))
    if output is not None:
        rows.append(("plan", str(output)))
    if page is not None:
        rows.append(("page", str(page)))
    out().print(view.table(rows))


def changed_by(
    settings: tuple[str, ...], package: Package, allowed: Set[str] = frozenset()
) -> Package:
    """Return the package as a launch with these settings trains it. `allowed`: settings of the run
    that are used otherwise.
    """
    from trainload.launching.settings.parse import parse_settings

    parsed = parse_settings(settings)
    if others := [*(name for name in parsed.run if name not in allowed), *parsed.batch]:
        raise click.UsageError(
            f"--set {others[0]}: only settings of the training can be set for a plan; pass this one"
            " to the launch, or use its option."
        )
    return parsed.overrides.apply(package)


def make_plan(
    package: Package,
    nodes: int,
    devices: int,
    device: str,
    strategy: Strategy | None,
    **options: Any,
) -> Plan:
    """Return the requested plan for a cluster of devices of one kind."""
    from trainload.sharding.planner import make_plan as plans
    from trainload.sharding.plans.plan import Cluster

    cluster = Cluster.model_validate(
        {"nodes": nodes, "devices_per_node": devices, "device": device}
    )
    return plans.make_plan(package, cluster, strategy, **options)


def _describe(planned: Plan) -> list[tuple[str, Any]]:
    cluster = planned.cluster
    return [
        ("cluster", f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device}"),
        (
            "strategy",
            f"{planned.strategy}{f', {planned.replicas} copies' if planned.shard_ranks else ''}",
        ),
        (
            "batch",
            (
                f"{planned.global_batch} rows = {planned.data_ranks} ranks x {planned.accumulate}"
                f" microbatches x {planned.rows_per_call} rows"
            ),
        ),
        *_describe_tensor_axis(planned),
        *(
            [("pipeline", _format_pipeline(planned.pipeline))]
            if planned.pipeline is not None
            else []
        ),
        *([("recompute", planned.recompute)] if planned.recompute != "job" else []),
        *([("loss chunks", planned.loss_chunks)] if planned.loss_chunks > 1 else []),
        *([("offload", f"{planned.offload:g}")] if planned.offload else []),
        ("buckets", len(planned.buckets)),
        *view.as_json(planned.estimate).items(),
    ]


def _describe_tensor_axis(planned: Plan) -> list[tuple[str, Any]]:
    if planned.tensor_ranks == 1:
        return []
    divided = f"{len(planned.tensor_shards)} parameters" if planned.tensor_shards else "positions"
    remarks = (
        ", and positions elsewhere" if planned.tensor_shards and planned.divide != "tensor" else ""
    )
    remarks += (
        "; some are on several nodes, whose links are slow"
        if planned.cluster.devices_per_node % planned.tensor_ranks
        else ""
    )
    products = [
        f"{each.operator.removesuffix('.default')} x {each.nodes}"
        for each in planned.replicated
        if each.operations
    ][:4]
    rows = [(planned.divide, f"{planned.tensor_ranks} ranks divide {divided}{remarks}")]
    return [*rows, ("products that each does whole", ", ".join(products) or "none")]


def _format_pipeline(pipeline: Pipeline) -> str:
    return f"{pipeline.ranks} ranks, {len(pipeline.stage_ranks)} stages, {pipeline.schedule}"


def _parse_rule(text: str) -> tuple[str, Any]:
    """Parse PATTERN=DIM, PATTERN=DIM/BLOCKS or PATTERN=whole for `make_plan`."""
    from trainload.sharding.plans.plan import Shard

    pattern, _, how = text.rpartition("=")
    match = re.fullmatch(r"(?P<whole>whole)|(?P<dim>[0-9]{1,2})(/(?P<blocks>[0-9]{1,6}))?", how)
    if not pattern or match is None or match["blocks"] == "0":
        raise PlanError(
            "this is not a rule of the tensor axis",
            where="--tensor-rule",
            expected="PATTERN=DIM, PATTERN=DIM/BLOCKS, PATTERN=whole",
            got=text,
        )
    return pattern, (
        None if match["whole"] else Shard(dim=int(match["dim"]), blocks=int(match["blocks"] or 1))
    )


@click.command(short_help="Check a plan's ranks.")
@package_argument
@plan_file_option
@click.option(
    "--set",
    "settings",
    multiple=True,
    type=Setting(),
    metavar="KEY=VALUE",
    help="Setting that the plan was made with.",
)
@json_option
def simulate(package: Path, plan_file: Path, settings: tuple[str, ...], as_json: bool) -> None:
    """Build the graphs of every rank of a plan, without tensor data or a cluster, and check that
    their collectives match.

    Shows the collectives in the graphs. A plan that would hang, or exchange wrong values, is
    rejected.
    """
    from trainload.sharding.planner.simulate import simulate
    from trainload.sharding.plans.plan import read_plan

    planned = read_plan(plan_file)
    began = time.perf_counter()
    with working("simulating the ranks"):
        simulation = simulate(changed_by(settings, shared.open_package(package)), planned)
    took = time.perf_counter() - began
    graphs = sum(len(rank.ranks) + len(rank.updates) for rank in simulation.ranks)
    if as_json:
        print_json(
            {
                "ranks": planned.world_size,
                "graphs": graphs,
                "collectives": simulation.counts(),
                "seconds": took,
            }
        )
        return
    rows: list[tuple[str, Any]] = [
        ("ranks", planned.world_size),
        ("graphs", f"{graphs} of {len(simulation.ranks)} places in a pipeline"),
    ]
    for group, counts in simulation.counts().items():
        size = len(planned.groups()[group][0])
        rows.append(
            (
                group,
                (
                    f"{size} ranks:"
                    f" {', '.join(f'{count} {operator}' for operator, count in counts.items())}"
                ),
            )
        )
    rows += [("differences", "none"), ("time", f"{took:.1f} s")]
    out().print(view.table(rows))


# The planner


def _plan_best(
    package: Package,
    cluster: Mapping[str, int],
    device: str,
    choices: dict[str, Any],
    options: dict[str, Any],
    show: _OutputOptions,
) -> None:
    """Search for plans, and show the results."""
    from trainload.cli.view import plans as plans_view
    from trainload.sharding.planner.device import read
    from trainload.sharding.planner.plan_source import Source
    from trainload.sharding.planner.search import Wanted, search, smallest
    from trainload.sharding.planner.simulate import simulate
    from trainload.sharding.plans.coupled_rows import note_on_coupled_rows
    from trainload.sharding.plans.plan import Cluster

    profile, source = read(device), Source(package, evaluates=False)
    shape, wanted = Cluster(**cluster, device=profile.kind), Wanted(**choices)
    with working("reading the package") as status:
        result = search(source, shape, profile, wanted, **options, say=status.update)
    if show.explain is not None:
        if show.explain > len(result.candidates):
            raise click.UsageError(
                f"--explain {show.explain}: there are {len(result.candidates)} candidates."
            )
        candidate = result.candidates[show.explain - 1]
        (
            print_json(plans_view.explained(candidate))
            if show.as_json
            else plans_view.print_explained(out(), candidate)
        )
        return
    best = result.best
    if best is not None and best.plan.pipeline is not None:
        with working("partitioning the evaluation graphs"):
            simulate(package, best.plan)
    if best is not None and show.output is not None:
        write_text(show.output, best.plan.model_dump_json(indent=2) + "\n")
    if best is not None and show.page is not None:
        _write_page(show.page, package, best.plan, profile, result, source)
    (
        print_json(plans_view.as_record(result))
        if show.as_json
        else plans_view.print_found(out(), result, show.output)
    )
    if (
        best is not None
        and not show.as_json
        and (note := note_on_coupled_rows(package.manifest, best.plan)) is not None
    ):
        out().print(note, markup=False)
    if best is None:
        raise plans_view.nothing_fits(result, smallest(source, shape, profile, wanted, **options))


def _write_page(path: Path, package: Package, planned: Plan, *found: Any) -> None:
    """Write the page of a plan. `found`: further arguments of `plan_page`."""
    from trainload.report.plans.plan_page import plan_page

    with working("simulating the plan"):
        text = plan_page(package, planned, *found)
    write_page(path, text.encode())


@dataclass(frozen=True, slots=True)
class _OutputOptions:
    """Show the results of a search, and write the best plan to its file."""

    explain: int | None
    output: Path | None
    page: Path | None
    as_json: bool
