"""Parameters that a tensor axis divides."""

from __future__ import annotations

import pytest
import torch
from tests.capture.jobs import job
from torch import Tensor, nn

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.tracing.trace import capture
from trainload.core.errors import PlanError
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import Shard
from trainload.sharding.tensor.choose import candidates, choose

ROWS, COLUMNS = Shard(dim=0), Shard(dim=1)
GPT = {
    "mix_in.weight": Shard(dim=0, blocks=3),
    "mix_out.weight": COLUMNS,
    "narrow.weight": COLUMNS,
    "tokens.weight": ROWS,
    "widen.bias": ROWS,
    "widen.weight": ROWS,
}
"""Division of the transformer's parameters.

It divides the heads of a fused projection and of the layer after it, the hidden features of the
block, and the vocabulary of the tied table.
"""


class Attending(nn.Module):
    """Four query heads, two key and value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        k, v = (each[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        loss: Tensor = self.out(mixed.transpose(1, 2).flatten(2)).mean()
        return loss


class Twice(nn.Module):
    """A square weight that is added to its transpose: shares of it are not shares of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.hidden, self.out = (
            nn.Linear(16, 16, bias=False),
            nn.Linear(16, 64),
            nn.Linear(64, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = x @ (self.square.weight + self.square.weight.t())
        loss: Tensor = self.out(torch.relu(self.hidden(mixed))).mean()
        return loss


class Grown(nn.Module):
    """Hidden features that are concatenated to an empty tensor, like in a cache of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        grown = torch.cat([torch.zeros(0), torch.relu(self.hidden(x))], dim=-1)
        loss: Tensor = self.out(grown).mean()
        return loss


def step_of(model: nn.Module, *shape: int) -> StepGraph:
    return derive(
        capture(job(model, batch={"x": torch.randn(*shape)}, loss=lambda m, b: m(b["x"]))),
        "train",
        torch.device("cpu"),
    )


@pytest.fixture(scope="module")
def gpt_step(gpt_source: Source) -> StepGraph:
    return gpt_source.steps(["train"])["train"]


def test_heads_hidden_features_and_vocabulary_are_found(gpt_step: StepGraph) -> None:
    assert choose([gpt_step], 2) == GPT


def test_what_does_not_divide_is_left_whole(gpt_step: StepGraph) -> None:
    found = choose([gpt_step], 3)
    assert found == {
        "tokens.weight": ROWS,
        "mix_in.weight": ROWS,
    }, "24 tokens, and queries, keys and values; not 2 heads or 64 features"


def test_no_dim_of_the_batch_is_divided(gpt_step: StepGraph) -> None:
    assert all(candidate.shards.get("positions") != ROWS for candidate in candidates(gpt_step, 2))


@pytest.mark.slow
def test_grouped_heads_are_divided_by_their_groups() -> None:
    found = choose([step_of(Attending(), 4, 6, 16)], 2)
    weights = {name: shard for name, shard in found.items() if name.endswith("weight")}
    assert weights == {
        "query.weight": ROWS,
        "key.weight": ROWS,
        "value.weight": ROWS,
        "out.weight": COLUMNS,
    }


def test_an_empty_tensor_that_cat_passes_over_hinders_nothing() -> None:
    found = choose([step_of(Grown(), 4, 16)], 2)
    assert found == {"hidden.bias": ROWS, "hidden.weight": ROWS, "out.weight": COLUMNS}


def test_a_class_that_a_value_has_twice_is_not_divided() -> None:
    found = choose([step_of(Twice(), 4, 16)], 2)
    assert "square.weight" not in found
    assert found["hidden.weight"] == ROWS


def test_what_must_be_whole_is(gpt_step: StepGraph) -> None:
    found = choose([gpt_step], 2, whole=["narrow.weight"])
    assert found == {
        name: shard
        for name, shard in GPT.items()
        if name not in ("narrow.weight", "widen.weight", "widen.bias")
    }


def test_a_rule_for_what_must_be_whole_is_refused(gpt_step: StepGraph) -> None:
    with pytest.raises(PlanError, match=r"narrow\.weight: a parameter's optimizer needs it whole"):
        choose([gpt_step], 2, whole=["narrow.weight"], rules={"narrow.*": COLUMNS})


def test_a_rule_keeps_a_parameter_whole_and_what_is_divided_with_it(gpt_step: StepGraph) -> None:
    found = choose([gpt_step], 2, rules={"mix_*": None})
    assert found == {name: shard for name, shard in GPT.items() if not name.startswith("mix_")}


def test_a_rule_divides_what_would_not_be(gpt_step: StepGraph) -> None:
    found = choose([gpt_step], 2, rules={"tokens.weight": COLUMNS})
    assert found["tokens.weight"] == found["mix_in.weight"] == COLUMNS


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ({"nothing.*": None}, "nothing.*: a rule of the tensor axis matches no parameter"),
        (
            {"mix_in.weight": Shard(dim=0, blocks=2)},
            "mix_in.weight: a parameter cannot be divided as requested",
        ),
        (
            {"tokens.weight": Shard(dim=5)},
            "tokens.weight: a parameter cannot be divided as requested",
        ),
        (
            {"tokens.weight": ROWS, "narrow.bias": ROWS},
            "a parameter cannot be divided as requested",
        ),
    ],
    ids=["no such parameter", "blocks", "no such dim", "two that meet"],
)
def test_a_rule_that_cannot_be_followed_is_refused_by_its_name(
    gpt_step: StepGraph, rules: dict[str, Shard | None], line: str
) -> None:
    with pytest.raises(PlanError, match=line.replace("*", r"\*")):
        choose([gpt_step], 2, rules=rules)


def test_what_is_decided_for_one_graph_holds_for_the_next(gpt_step: StepGraph) -> None:
    assert choose([gpt_step, gpt_step], 2) == GPT
    assert choose([gpt_step, gpt_step], 2, rules={"tokens.weight": None}) == {
        n: s for n, s in GPT.items() if n != "tokens.weight"
    }


def test_all_parameters_of_a_class_are_divided_together(gpt_step: StepGraph) -> None:
    inputs = {p.name for p in gpt_step.inputs if p.role is Role.PARAMETER}
    for candidate in candidates(gpt_step, 2):
        assert candidate.shards.keys() <= inputs
        assert candidate.flops >= 0 and candidate.exchanged >= 0
