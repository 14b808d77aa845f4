"""Random numbers in step graphs depend on the row, not on how the batch is split.

They are the same in backward, and need no generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from tests.autograd_trace.step_graph_calls import CPU, program_of, run
from tests.capture.jobs import Batch, Model, job
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, map, scan
from torch.export import Dim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.program import Program
from trainload.core.errors import CaptureError


def recurrent(operator: Any, m: Model, x: Tensor) -> Tensor:
    """Apply two layers with dropout between them to two time steps of four values each.

    The parameters of the layers are slices of those of `m`.
    """
    gates = 4 if operator is torch.lstm else 3
    hidden = torch.zeros(2, x.shape[0], 2)
    weights = [
        m.first.weight.flatten()[: gates * 8].view(-1, 4),
        *(m.last.weight.flatten()[i : i + gates * 4].view(-1, 2) for i in range(3)),
    ]
    layers = [weights[0], weights[1], weights[2], weights[3]]
    state = (hidden, hidden) if operator is torch.lstm else hidden
    out, *_ = operator(x.view(-1, 2, 4), state, layers, False, 2, 0.5, m.training, False, True)
    result: Tensor = out.flatten(1).repeat(1, 2)
    return result


def time_first(x: Tensor) -> Tensor:
    return x.view(-1, 2, 4).transpose(0, 1).flatten(0, 1)


def in_a_region(m: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(
        lambda y: functional.dropout(y, 0.5, m.training), x, use_reentrant=False
    )
    return result


def stacked_in_a_region(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cat([x, x * 2])


def in_a_branch(m: Any, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(
        x.sum() < 1e9, lambda t: functional.dropout(t, 0.5, m.training), lambda t: t * 1, (x,)
    )
    return result


def in_a_loop(m: Any, x: Tensor) -> Tensor:
    found: Tensor = torch.while_loop(  # type: ignore[no-untyped-call]  # torch's own
        lambda i, _: i < 3,
        lambda i, y: (i + 1, functional.dropout(y, 0.3, m.training)),
        (torch.tensor(0), x),
    )[1]
    return found


def in_a_scan(m: Any, x: Tensor) -> Tensor:
    """Scan over eight time steps, with a carry for each row."""

    def step(carry: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
        carry = functional.dropout(carry + entry, 0.5, m.training)
        return carry, carry * 2

    found: Tensor = scan(step, torch.zeros_like(x[:, 0]), x.t().contiguous())[1].t()
    return found


def in_a_scan_over_rows(m: Any, x: Tensor) -> Tensor:
    found: Tensor = scan(
        lambda c, row: (c + 1, functional.dropout(row, 0.5, m.training)), torch.zeros(()), x
    )[1]
    return found


def in_a_map(m: Any, x: Tensor) -> Tensor:
    found: Tensor = map(lambda t, *_: functional.dropout(t, 0.5, m.training), x)
    return found


def in_a_branch_of_a_scan(m: Any, x: Tensor) -> Tensor:
    def step(carry: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
        carry = in_a_branch(m, carry + entry)
        return carry, carry * 2

    found: Tensor = scan(step, torch.zeros_like(x[:, 0]), x.t().contiguous())[1].t()
    return found


IN_CONTROL_FLOW: dict[str, Callable[[Any, Tensor], Any]] = {
    "in a branch": in_a_branch,
    "in a loop": in_a_loop,
    "in a scan": in_a_scan,
    "in a scan over rows": in_a_scan_over_rows,
    "in a branch of a scan": in_a_branch_of_a_scan,
    "in a map": lambda m, x: in_a_map(m, x.t().contiguous()).t(),
    "in a map over rows": in_a_map,
    "alpha dropout in a scan": (
        lambda m, x: scan(
            lambda c, t: (functional.alpha_dropout(c + t, 0.3, m.training), c * 2),
            torch.zeros_like(x[:, 0]),
            x.t().contiguous(),
        )[1].t()
    ),
}

DRAWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "dropout": lambda m, x: functional.dropout(x, 0.5, m.training),
    "dropout in place": lambda m, x: functional.dropout(x * 1, 0.5, m.training, inplace=True),
    "alpha dropout of features in place": (
        lambda m, x: functional.feature_alpha_dropout(
            (x * 1).view(-1, 2, 4), 0.5, m.training, inplace=True
        ).reshape(x.shape)
    ),
    "inner rows": lambda m, x: (
        functional.dropout(x.view(-1, 2, 4).transpose(0, 1), 0.5, m.training)
        .transpose(0, 1)
        .reshape(x.shape)
    ),
    "merged rows": lambda m, x: functional.dropout(x.view(-1, 4), 0.5, m.training).view(x.shape),
    "dropout1d": (
        lambda m, x: functional.dropout1d(x.view(-1, 2, 4), 0.5, m.training).reshape(x.shape)
    ),
    "attention": (
        lambda m, x: functional.scaled_dot_product_attention(
            x.view(-1, 2, 4),
            x.view(-1, 2, 4),
            x.view(-1, 2, 4),
            dropout_p=0.5 if m.training else 0.0,
        ).reshape(x.shape)
    ),
    "noise": lambda m, x: x + torch.randn_like(x) if m.training else x,
    "gumbel": lambda m, x: functional.gumbel_softmax(x) if m.training else x,
    "bernoulli": lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.5)) if m.training else x,
    "alpha dropout": lambda m, x: functional.alpha_dropout(x, 0.5, m.training),
    "alpha dropout of features": (
        lambda m, x: functional.feature_alpha_dropout(x.view(-1, 2, 4), 0.5, m.training).reshape(
            x.shape
        )
    ),
    "rrelu": lambda m, x: functional.rrelu(x, training=m.training),
    "normal": lambda m, x: x + torch.normal(x.detach(), 0.5) if m.training else x,
    "multinomial": lambda m, x: (
        x * torch.multinomial(x.detach().sigmoid(), 2).sum(1, keepdim=True) if m.training else x
    ),
    "multinomial with replacement": lambda m, x: (
        x * (torch.multinomial(x.sigmoid(), 2, True) if m.training else x).sum(1, keepdim=True)
    ),
    "LSTM": lambda m, x: recurrent(torch.lstm, m, x),
    "GRU": lambda m, x: recurrent(torch.gru, m, x),
    "two stacked views": lambda m, x: sum(
        functional.dropout(torch.cat([x, x * 2]), 0.5, m.training).chunk(2)
    ),
    "views of merged rows": lambda m, x: (
        functional.dropout(torch.cat([x.view(-1, 4)] * 2), 0.5, m.training).view(2, -1, 8).sum(0)
    ),
    "a repeated batch": lambda m, x: (
        functional.dropout(x.repeat(3, 1), 0.5, m.training).view(3, -1, 8).sum(0)
    ),
    "rows merged inside": lambda m, x: (
        functional.dropout(time_first(x), 0.5, m.training).view(2, -1, 4).sum(0).repeat(1, 2)
    ),
    "views stacked outside of a region": lambda m, x: sum(
        in_a_region(m, torch.cat([x, x * 2])).chunk(2)
    ),
    "views stacked inside of a region": lambda m, x: sum(
        functional.dropout(stacked_in_a_region(x), 0.5, m.training).chunk(2)
    ),
    "randint": lambda m, x: x * torch.randint(0, 3, (x.shape[0], 1)) if m.training else x,
    "two stacked views in a branch": lambda m, x: sum(
        in_a_branch(m, torch.cat([x, x * 2])).chunk(2)
    ),
    "two views stacked in a branch": lambda m, x: (
        functional.dropout(
            torch.cond(
                x.sum() < 1e9, lambda t: torch.cat([t, t * 2]), lambda t: torch.cat([t, t]), (x,)
            ),
            0.5,
            m.training,
        )
        .view(2, -1, 8)
        .sum(0)
    ),
    **IN_CONTROL_FLOW,
}


SOME = (
    "dropout",
    "multinomial",
    "views stacked inside of a region",
    "in a scan",
)
SCANS = frozenset(name for name in IN_CONTROL_FLOW if "scan" in name)
NO_SCANS = Version(torch.__version__).release < (2, 13)
"""True if torch rejects scans that draw random numbers: it takes their results for views."""
some_draws = pytest.mark.matrix(when=lambda name: name in SOME)


def skip_without_scans(name: str) -> None:
    if name in SCANS and NO_SCANS:
        pytest.skip("this torch rejects scans that draw")


@functools.cache
def drawing(name: str) -> tuple[Program, StepGraph]:
    skip_without_scans(name)
    program = program_of(job(Model(DRAWS[name])))
    return program, derive(program, "train", CPU)


@pytest.mark.skipif(not NO_SCANS, reason="this torch takes scans that draw")
def test_a_scan_that_torch_rejects_is_an_error_with_its_graph() -> None:
    program = program_of(job(Model(DRAWS["in a scan"])))
    with pytest.raises(CaptureError, match=r"graph train: torch .* derives no gradients of it"):
        derive(program, "train", CPU)


@some_draws
@pytest.mark.parametrize("name", DRAWS)
def test_a_split_batch_gives_the_gradients_of_the_whole(name: str) -> None:
    program, graph = drawing(name)
    batch = {"x": torch.randn(6, 8)}
    whole = run(graph, program, batch)
    parts = [
        run(graph, program, {"x": batch["x"][s]}, row=s.start) for s in (slice(0, 2), slice(2, 6))
    ]
    # Random numbers are drawn: other rows have another loss.
    assert not torch.equal(run(graph, program, batch, row=6)["loss/loss"], whole["loss/loss"])
    for key, value in whole.items():
        if key.startswith("gradient/"):
            torch.testing.assert_close(parts[0][key] + parts[1][key], value, rtol=1e-4, atol=1e-5)


@some_draws
@pytest.mark.parametrize("name", DRAWS)
def test_a_step_graph_reads_no_generator(name: str) -> None:
    graph = drawing(name)[1].module.graph
    overloads = [n.target for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert [
        o
        for o in overloads
        if torch.Tag.nondeterministic_seeded in o.tags and "attention" not in str(o)
    ] == []


def test_a_batch_of_fixed_size_draws_anew_for_every_call() -> None:
    program = program_of(job(Model(DRAWS["dropout"]), dynamic={"x": {0: Dim.STATIC}}))
    graph = derive(program, "train", CPU)
    batch = {"x": torch.randn(4, 8)}
    assert not torch.equal(
        run(graph, program, batch)["loss/loss"], run(graph, program, batch, row=4)["loss/loss"]
    )


def test_dropout_over_two_orders_of_rows_is_refused_with_its_line() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rows = model(batch["x"])
        return (
            functional.dropout(
                rows.transpose(0, 1).flatten(0, 1) + rows.flatten(0, 1), 0.5, model.training
            )
            .square()
            .mean()
        )

    program = program_of(job(Model(), batch={"x": torch.randn(4, 3, 8)}, loss=loss))
    with pytest.raises(CaptureError, match=r"\.py.*inner part"):
        derive(program, "train", CPU)


def test_a_random_operator_without_a_stateless_form_is_refused_with_its_line() -> None:
    program = program_of(
        job(Model(lambda m, x: torch.empty_like(x).log_normal_() + x if m.training else x))
    )
    with pytest.raises(CaptureError, match=r"jobs\.py.*log_normal"):
        derive(program, "train", CPU)


@pytest.mark.matrix(when=lambda name: name in ("in a branch", "in a scan"))
@pytest.mark.parametrize(
    "name", [name for name in IN_CONTROL_FLOW if name != "alpha dropout in a scan"]
)
def test_what_a_body_draws_is_the_same_in_backward(name: str) -> None:
    """The gradient times the parameters is the loss, which is linear in them (Euler's theorem)."""

    def loss(model: Any, batch: Batch) -> Tensor:
        total: Tensor = IN_CONTROL_FLOW[name](model, model.first(batch["x"])).sum()
        return total

    skip_without_scans(name)
    program = program_of(job(Model(), loss=loss))
    out = run(derive(program, "train", CPU), program, {"x": torch.randn(4, 8)})
    products = [
        (program.state[key.removeprefix("gradient/")] * value).sum()
        for key, value in out.items()
        if key.startswith("gradient/")
    ]
    torch.testing.assert_close(sum(products) / 4, out["loss/loss"], rtol=1e-4, atol=1e-4)


def test_iterations_of_a_loop_draw_numbers_of_their_own() -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        def step(carry: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
            drawn = torch.rand_like(entry)
            return torch.maximum(carry, (drawn - entry).abs()), drawn

        x = batch["x"].t().contiguous()
        variance: Tensor = scan(step, torch.zeros_like(x[0]), x)[1].var(0).mean()
        total: Tensor = variance + 0 * model.first.weight.sum()
        return total

    program = program_of(job(Model(), loss=loss, batch={"x": torch.randn(4, 200)}))
    out = run(derive(program, "train", CPU), program, {"x": torch.randn(40, 200)})
    assert out["loss/loss"] == pytest.approx(1 / 12, rel=0.02)  # the variance of a uniform number


def test_a_combination_that_draws_is_refused_with_its_line() -> None:
    def combined(m: Any, x: Tensor) -> Tensor:
        found: Tensor = associative_scan(
            lambda a, b: a + functional.dropout(b, 0.5, True), x, 0, combine_mode="generic"
        )
        return found

    with pytest.raises(CaptureError, match=r"jobs\.py|test_step_graph_draws\.py"):
        derive(
            program_of(job(Model(lambda m, x: combined(m, x) if m.training else x))), "train", CPU
        )


def test_an_evaluation_that_draws_draws_the_same_for_a_row_in_every_batch() -> None:
    program = program_of(
        job(Model(lambda _, x: functional.dropout(x, 0.5)), loss=lambda m, b: m(b["x"]).sum())
    )
    step = derive(program, "eval", CPU)
    x = torch.randn(4, 8)

    def loss(rows: slice) -> Tensor:
        given = {
            Role.SEED: torch.tensor(1),
            Role.STEP: torch.tensor(0),
            Role.ROW: torch.tensor(rows.start),
            Role.BATCH: x[rows],
        }
        arguments = [
            program.state[p.name] if p.role is Role.PARAMETER else given[p.role]
            for p in step.inputs
        ]
        result: Tensor = step.module(*arguments)[0]
        return result

    assert torch.allclose(loss(slice(0, 2)) + loss(slice(2, 4)), loss(slice(0, 4)), rtol=1e-5)
    assert loss(slice(0, 2)) != loss(slice(2, 4))
