"""A small job and its runs on ranks.

Its step graph has all constructs that a rewrite must distinguish.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.optimizers import optimizer_of
from torch import Tensor, nn
from torch.nn import functional

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.named_groups import bind_groups
from trainload.autograd_trace.graphs import Recipe, Role, StepGraph, UpdateGraph
from trainload.capture.job.definition import Job, Loss
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.sharding.plans.buckets import make_buckets, parameter_order
from trainload.sharding.plans.plan import NO_ESTIMATE, Cluster, Plan
from trainload.sharding.plans.strategies import Strategy
from trainload.sharding.rewriting.rank_update import Lacking, UpdateStep
from trainload.sharding.rewriting.rewrite import Phase, RankGraph, accumulated_length, rewrite

ROWS = 8
TIME = 6
SEED = 7
Arguments = dict[str, Tensor]


class Model(nn.Module):
    """Tied embeddings, dropout of a (time, rows, width) value, a frozen scale, and a counter.

    One parameter is not used by the loss.
    """

    count: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.down = nn.Linear(24, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.full((8,), 1.5), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(-1, 1, 8), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.count.add_(1)
        x = self.emb(tokens).transpose(0, 1)
        x = functional.dropout(x, 0.25, self.training)
        x = x + self.down(torch.relu(self.norm(self.up(x)))) * self.scale + self.table
        logits: Tensor = self.head(x.transpose(0, 1))
        return logits


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    logits = model(batch["tokens"])
    each = functional.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), reduction="none"
    )
    kept = batch["kept"].flatten()
    penalty = sum(
        (p.square().sum() for p in model.parameters() if p.requires_grad and p.ndim > 1),
        torch.zeros(()),
    )
    hits = (logits.argmax(-1) == batch["targets"]).float()
    value = (each * kept).sum() / kept.sum() + 1e-3 * penalty
    return Loss(
        value, weight=kept.sum(), metrics={"hits": (hits.flatten() * kept).sum() / kept.sum()}
    )


def make_batch(rows: int = ROWS, seed: int = 0) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 16, (2, rows, TIME), generator=generator)
    kept = (torch.rand(rows, TIME, generator=generator) < 0.7).float()
    kept[:, 0] = 1.0  # every row has a weight
    return {"tokens": tokens[0], "targets": tokens[1], "kept": kept}


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2]},
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


@functools.cache
def planned() -> tuple[Job, Program, Recipe, tuple[UpdateGraph, ...]]:
    """Return the job, its program, recipe and updates, from which plans are made."""
    torch.manual_seed(1)
    job = Job(
        model=Model(),
        batch=make_batch(),
        loss=loss,
        optimizer=optimizer,
        predict=lambda m, b: {"weight": m.get_parameter("down.weight"), "logits": m(b["tokens"])},
        predict_inputs=["tokens"],
        clip_norm=0.5,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = capture(job)
    return job, program, *optimizer_of(job, program)


@functools.cache
def captured() -> tuple[Program, StepGraph, Recipe, tuple[UpdateGraph, ...]]:
    _, program, recipe, updates = planned()
    return program, derive(program, "train", torch.device("cpu")), recipe, updates


def make_plan(
    strategy: Strategy, world: int, accumulate: int = 1, prefetch: int = 1, bucket_bytes: int = 1
) -> Plan:
    _, program, recipe, _ = planned()
    buckets = make_buckets(
        program.parameters,
        {p: (g.name,) for g in recipe.groups for p in g.parameters},
        parameter_order(program.graphs["train"]),
        world,
        bucket_bytes,
    )
    shard_ranks = max(1, world // 2) if strategy == "hybrid" else None
    return Plan(
        package="0" * 64,
        cluster=Cluster(devices_per_node=world),
        strategy=strategy,
        shard_ranks=shard_ranks,
        global_batch=ROWS,
        accumulate=accumulate,
        prefetch=prefetch,
        buckets=buckets,
        estimate=NO_ESTIMATE,
    )


def flat_buckets(plan: Plan, state: Arguments) -> Arguments:
    """Return bucket -> the full flat tensor."""
    found = {}
    for bucket in plan.buckets:
        flat = torch.zeros(bucket.length, dtype=getattr(torch, bucket.dtype))
        for slot in bucket.slots:
            flat[slot.offset : slot.offset + slot.length] = state[slot.parameter].flatten()
        found[bucket.name] = flat
    return found


def unflatten(plan: Plan, flats: Arguments) -> Arguments:
    """Return parameter -> tensor, from full flat tensors."""
    return {
        s.parameter: flats[b.name][s.offset : s.offset + s.length].view(s.shape)
        for b in plan.buckets
        if b.name in flats
        for s in b.slots
    }


def share(plan: Plan, flat: Tensor, rank: int) -> Tensor:
    length = flat.numel() // plan.shard_degree
    index = plan.shard_index(rank)
    return flat[index * length : (index + 1) * length].clone()


def call(graph: RankGraph, values: Arguments) -> Arguments:
    """Run a graph on values named "role/name", and return its outputs with such names."""
    arguments = [values[f"{p.role.value}/{p.name}"] for p in graph.inputs]
    with torch.no_grad():
        results = graph.module(*arguments)
    return {f"{p.role.value}/{p.name}": r for p, r in zip(graph.outputs, results, strict=True)}


def scalars(row: int, step: int = 0) -> Arguments:
    return {
        "seed/seed": torch.tensor(SEED),
        "step/step": torch.tensor(step),
        "row/row": torch.tensor(row),
        "scale/scale": torch.tensor(1.0 / ROWS),
    }


def everything(plan: Plan) -> Lacking:
    """Return everything that the first update of a run creates."""
    return Lacking(
        frozenset((b.name, g) for b in plan.buckets for g in b.groups),
        frozenset(b.name for b in plan.buckets),
    )


def run_rank(plan: Plan, rank: int, state: Arguments, step: int = 0) -> tuple[Arguments, Tensor]:
    """Run one accumulated step.

    Returns: this rank's synchronized flat gradients by bucket, and totals.
    """
    _, graph, _, _ = captured()
    values = {f"buffer/{n}": state[n] for n in ("count", "table")}
    for name, flat in flat_buckets(plan, state).items():
        values[f"bucket/{name}"] = share(plan, flat, rank) if plan.shards_parameters else flat
    for bucket in plan.buckets:
        values[f"bucket_gradient/{bucket.name}"] = torch.zeros(accumulated_length(plan, bucket))
    totals = torch.zeros(3)
    batch = make_batch()
    for micro in range(plan.accumulate):
        start = (micro * plan.world_size + rank) * plan.rows_per_call
        phase = (
            Phase.ONLY
            if plan.accumulate == 1
            else Phase.SYNCHRONISE
            if micro == plan.accumulate - 1
            else Phase.ACCUMULATE
        )
        values |= scalars(start, step) | {
            f"batch/{n}": t[start : start + plan.rows_per_call] for n, t in batch.items()
        }
        out = call(rewrite(graph, plan, phase), values)
        totals = totals + out["totals/totals"]
        values |= out
    return {b.name: values[f"bucket_gradient/{b.name}"] for b in plan.buckets if b.groups}, totals


def reference(state: Arguments, step: int = 0) -> tuple[Arguments, Tensor]:
    """Run the whole batch through the step graph itself.

    Returns: gradients by parameter, and totals.
    """
    _, graph, _, _ = captured()
    values = {f"parameter/{n}": t for n, t in state.items()} | {
        f"buffer/{n}": state[n] for n in ("count", "table")
    }
    values |= scalars(0, step) | {f"batch/{n}": t for n, t in make_batch().items()}
    out = call(RankGraph(graph.module, graph.inputs, graph.outputs), values)
    weight = out["weight/weight"]
    gradients = {
        p.name: out[f"gradient/{p.name}"] for p in graph.outputs if p.role is Role.GRADIENT
    }
    return gradients, torch.stack([out["loss/loss"] * weight, out["metric/hits"] * weight, weight])


CASES: list[tuple[Strategy, int, int, int]] = [
    ("zero0", 1, 1, 1),
    ("zero0", 2, 1, 1),
    ("zero1", 1, 1, 1),
    ("zero1", 2, 1, 1),
    ("zero2", 1, 1, 1),
    ("zero2", 2, 1, 1),
    ("zero3", 1, 1, 1),
    ("zero3", 2, 1, 1),
    ("zero3", 1, 0, 1),
    ("zero3", 2, 3, 1),
    ("zero3", 1, 1, 600),
    ("hybrid", 1, 1, 1),
    ("hybrid", 2, 1, 600),
]
"""(strategy, accumulate, prefetch, bucket_bytes)"""
WORLD = 4
"""Number of ranks of each case. Hybrid has two copies, each on two ranks."""
ASKED = "asked.json"


def write_asked(folder: Path, cases: Sequence[object]) -> None:
    """Write the cases that `rank_main` should run."""
    (folder / ASKED).write_text(json.dumps(cases))


def prepare(_folder: Path) -> None:
    """Compute what all ranks share."""
    captured()


def rank_main(rank: int, world: int, folder: Path) -> None:
    """Compute every selected case on one rank of the group, and write its results to a file."""
    program, _, recipe, updates = captured()
    state = dict(program.state)
    asked = json.loads((folder / ASKED).read_text())
    cases = [case for case in CASES if list(case) in asked]
    bind_groups(
        {
            name: ranks
            for case in cases
            for name, ranks in make_plan(case[0], world).groups().items()
        }
    )
    for case in cases:
        strategy, accumulate, prefetch, bucket_bytes = case
        plan = make_plan(strategy, world, accumulate, prefetch, bucket_bytes)
        gradients, totals = run_rank(plan, rank, state)
        update = UpdateStep(plan, updates, recipe, "train", everything(plan))
        flats = flat_buckets(plan, state)
        params = [
            share(plan, p, rank) if plan.shards_state else p
            for p in (flats[x.bucket.name] for x in update.parts)
        ]
        with torch.no_grad():
            norm, *new = update(
                totals[-1] / ROWS,
                torch.tensor([0.01, 0.02]),
                torch.tensor(plan.shard_index(rank)),
                *params,
                *(gradients[x.bucket.name] for x in update.parts),
            )
        found = {f"gradient/{n}": g for n, g in gradients.items()} | {
            "totals": totals,
            "norm": norm,
        }
        found |= {f"new/{x.bucket.name}": p for x, p in zip(update.parts, new, strict=False)}
        save_file({n: t.clone() for n, t in found.items()}, case_file(folder, case, rank))


def case_file(folder: Path, case: Sequence[object], rank: int) -> Path:
    return folder / f"{'-'.join(map(str, case))}-{rank}.safetensors"
