"""Models with checkpoints under ZeRO-3: two ranks compute the gradients of one process.

Backward gathers the weights for recomputation itself.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.autograd_trace.checkpoints import Blocks, checkpointed
from tests.capture.jobs import job
from tests.ranks import on_ranks
from torch import Tensor

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.named_groups import bind_groups
from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.autograd_trace.recompute.hold import hold_back
from trainload.autograd_trace.recompute.rematerialisation import RECOMPUTES
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.sharding.plans.buckets import make_buckets, parameter_order
from trainload.sharding.plans.plan import NO_ESTIMATE, Cluster, Plan
from trainload.sharding.rewriting.rewrite import RankGraph, rewrite

WORLD, ROWS = 2, 8
BATCH = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
C10D = torch.ops._c10d_functional


@functools.cache
def captured() -> tuple[Program, StepGraph]:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = capture(job(Blocks(checkpointed, count=2)))
    return program, derive(program, "train", torch.device("cpu"))


def plan_of(world: int) -> Plan:
    program, _ = captured()
    names = [p.name for p in program.parameters]
    buckets = make_buckets(
        program.parameters,
        dict.fromkeys(names, "group0"),
        parameter_order(program.graphs["train"]),
        world,
        1,
    )
    return Plan(
        package="0" * 64,
        cluster=Cluster(devices_per_node=world),
        strategy="zero3",
        global_batch=ROWS,
        buckets=buckets,
        estimate=NO_ESTIMATE,
    )


def run_rank(graph: RankGraph, plan: Plan, rank: int) -> dict[str, Tensor]:
    """Return bucket -> the rank's share of its flat gradient."""
    program, _ = captured()
    rows = ROWS // plan.world_size
    values: dict[tuple[Role, str], Tensor] = {
        (Role.SEED, "seed"): torch.tensor(7),
        (Role.STEP, "step"): torch.tensor(0),
        (Role.ROW, "row"): torch.tensor(rank * rows),
        (Role.SCALE, "scale"): torch.tensor(1.0 / ROWS),
        (Role.BATCH, "x"): BATCH[rank * rows : (rank + 1) * rows],
    }
    for bucket in plan.buckets:
        flat = torch.zeros(bucket.length)
        for slot in bucket.slots:
            flat[slot.offset : slot.offset + slot.length] = program.state[slot.parameter].flatten()
        length = bucket.length // plan.world_size
        values[Role.BUCKET, bucket.name] = flat[rank * length : (rank + 1) * length].clone()
    with torch.no_grad():
        results = graph.module(*(values[p.role, p.name] for p in graph.inputs))
    return {
        p.name: r
        for p, r in zip(graph.outputs, results, strict=True)
        if p.role is Role.BUCKET_GRADIENT
    }


def prepare(_folder: Path) -> None:
    captured()


def rank_main(rank: int, _world: int, folder: Path) -> None:
    plan = plan_of(WORLD)
    bind_groups(plan.groups())
    graph = rewrite(captured()[1], plan)
    save_file(run_rank(graph, plan, rank), folder / f"plain-{rank}.safetensors")
    hold_back(graph.module)
    save_file(run_rank(graph, plan, rank), folder / f"held-{rank}.safetensors")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(WORLD, rank_main, folder, prepare)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "held"])
def test_gradients_of_two_ranks_are_those_of_one_process(ranks: Path, kind: str) -> None:
    alone = plan_of(1)
    expected = run_rank(rewrite(captured()[1], alone), alone, 0)
    parts = [load_file(ranks / f"{kind}-{rank}.safetensors") for rank in range(WORLD)]
    plan = plan_of(WORLD)
    assert parts[0].keys() == expected.keys()
    for bucket in plan.buckets:
        flat = torch.cat([part[bucket.name] for part in parts])
        for slot in bucket.slots:
            wanted = expected[bucket.name][slot.offset : slot.offset + slot.length]
            torch.testing.assert_close(
                flat[slot.offset : slot.offset + slot.length], wanted, rtol=1e-5, atol=1e-7
            )


def test_what_is_computed_again_uses_the_weights_that_backward_gathers() -> None:
    graph = rewrite(captured()[1], plan_of(WORLD))
    nodes = list(graph.module.graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    begin = next(i for n, i in place.items() if n.name == "tangent")
    again = [n for n in nodes if RECOMPUTES in n.meta and n.target is torch.ops.aten.addmm.default]
    assert len(again) == 2
    for node in again:
        stack, gathers = [node], []
        while stack:
            here = stack.pop()
            if here.target is C10D.all_gather_into_tensor.default:
                gathers.append(here)
            elif RECOMPUTES in here.meta or here.target in (
                C10D.wait_tensor.default,
                torch.ops.aten.view.default,
                torch.ops.aten.slice.Tensor,
            ):
                stack += here.all_input_nodes
        assert gathers
        assert all(place[g] > begin for g in gathers)


def test_no_gathered_weight_lives_from_forward_to_backward() -> None:
    graph = rewrite(captured()[1], plan_of(WORLD))
    nodes = list(graph.module.graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    begin = next(i for n, i in place.items() if n.name == "tangent")
    waits = [n for n in nodes[:begin] if n.target is C10D.wait_tensor.default]
    views = [v for w in waits for v in w.users]
    users = [u for v in views for u in [v, *v.users]]
    assert users
    assert all(place[u] < begin for u in users)
