"""Rewritten graphs on four real ranks compute the same values as one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.sharding.cases import (
    CASES,
    ROWS,
    WORLD,
    captured,
    case_file,
    make_plan,
    reference,
    unflatten,
)
from torch import Tensor

from trainload.sharding.plans.plan import Plan
from trainload.sharding.plans.strategies import Strategy
from trainload.sharding.rewriting.rewrite import update_length

pytestmark = pytest.mark.slow  # test_law_3.py runs two ranks in every run of the suite

Case = tuple[Strategy, int, int, int]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))


def plan_of(case: Case) -> Plan:
    strategy, accumulate, prefetch, bucket_bytes = case
    return make_plan(strategy, WORLD, accumulate, prefetch, bucket_bytes)


def found(folder: Path, case: Case) -> list[dict[str, Tensor]]:
    return [load_file(case_file(folder, case, rank)) for rank in range(WORLD)]


def gathered(folder: Path, case: Case, kind: str) -> dict[str, Tensor]:
    """Return parameter -> tensor, from the slices of the ranks."""
    plan, parts = plan_of(case), found(folder, case)
    flats = {}
    for bucket in plan.buckets:
        name = f"{kind}/{bucket.name}"
        if name in parts[0]:
            assert parts[0][name].numel() == update_length(plan, bucket)
            flats[bucket.name] = torch.cat([p[name] for p in parts[: plan.shard_degree]])
    return unflatten(plan, flats)


@each_case
def test_gradients_are_those_of_one_process(ranks: Path, case: Case) -> None:
    program, *_ = captured()
    expected, _ = reference(dict(program.state))
    got = gathered(ranks, case, "gradient")
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@each_case
def test_totals_are_those_of_one_process(ranks: Path, case: Case) -> None:
    program, *_ = captured()
    _, expected = reference(dict(program.state))
    torch.testing.assert_close(found(ranks, case)[0]["totals"], expected, rtol=1e-5, atol=1e-5)


@each_case
def test_the_norm_is_the_same_on_every_rank_and_that_of_one_process(
    ranks: Path, case: Case
) -> None:
    program, *_ = captured()
    expected, totals = reference(dict(program.state))
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt() / (
        totals[-1] / ROWS
    )
    norms = [f["norm"] for f in found(ranks, case)]
    assert all(torch.equal(norms[0], other) for other in norms[1:])
    torch.testing.assert_close(norms[0], norm, rtol=1e-5, atol=1e-6)


@each_case
def test_updated_parameters_are_those_of_torchs_adamw_after_clipping(
    ranks: Path, case: Case
) -> None:
    program, _, recipe, _ = captured()
    gradients, totals = reference(dict(program.state))
    parameters = {n: torch.nn.Parameter(program.state[n].clone()) for n in gradients}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name] / (totals[-1] / ROWS)
    torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
    decay = {"group0": 0.1, "group1": 0.0}
    rates = {"group0": 0.01, "group1": 0.02}
    groups = [
        {
            "params": [parameters[p] for p in g.parameters],
            "weight_decay": decay[g.name],
            "lr": rates[g.name],
        }
        for g in recipe.groups
    ]
    torch.optim.AdamW(groups).step()
    got = gathered(ranks, case, "new")
    for name, parameter in parameters.items():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=name)
