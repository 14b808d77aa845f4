"""Losses in chunks of rows have the values of whole ones, and logits are never whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.autograd_trace.memory import peak_bytes
from tests.capture.jobs import job
from tests.sharding import given
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainload.autograd_trace.compiling.inductor import compile_graph, load_compiled
from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.job.definition import Job, Loss
from trainload.core.errors import PlanError
from trainload.launching.node.determinism import deterministic
from trainload.sharding.analysis.graph_nodes import computed_from
from trainload.sharding.analysis.liveness import held
from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.planner.plan_costs import sizes_of
from trainload.sharding.rewriting.chunked_loss import Chunked, check_chunked, chunk_losses

ROWS, POSITIONS, WIDTH, WORDS = 4, 6, 8, 40

Batch = dict[str, Tensor]


class Head(nn.Module):
    """Embedding, one layer and an output layer: (rows, positions) -> logits (..., WORDS)."""

    def __init__(self, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=bias)
        self.prior = nn.Parameter(torch.zeros(WORDS))
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.norm(torch.tanh(self.layer(self.embed(tokens))))
        return found

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.hidden(tokens))
        return found


def flat(logits: Tensor, batch: Batch, **options: Any) -> Tensor:
    found: Tensor = functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), **options
    )
    return found


def usual(model: Any, batch: Batch) -> Any:
    return flat(model(batch["tokens"]), batch)


def summed(model: Any, batch: Batch) -> Any:
    count = (batch["labels"] != -100).sum()
    return Loss(flat(model(batch["tokens"]), batch, reduction="sum") / count, weight=count)


def smoothed(model: Any, batch: Batch) -> Any:
    return flat(model(batch["tokens"]), batch, label_smoothing=0.1)


def weighted(model: Any, batch: Batch) -> Any:
    weight = torch.linspace(0.5, 2.0, WORDS)
    return flat(model(batch["tokens"]), batch, weight=weight)


def masked_mean(model: Any, batch: Batch) -> Any:
    each = flat(model(batch["tokens"]), batch, reduction="none")
    mask = (batch["labels"].flatten() != -100).float()
    return (each * mask).sum() / mask.sum()


def by_hand(model: Any, batch: Batch) -> Any:
    logits = model(batch["tokens"])
    labels = batch["labels"].clamp_min(0)
    picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (logits.logsumexp(-1) - picked).mean()


def with_z_loss(model: Any, batch: Batch) -> Any:
    logits = model(batch["tokens"])
    return flat(logits, batch) + 1e-2 * logits.logsumexp(-1).square().mean()


def soft_capped(model: Any, batch: Batch) -> Any:
    logits = 5 * torch.tanh(model(batch["tokens"]) / 5)
    return flat(logits.float(), batch)


def in_bfloat16(model: Any, batch: Batch) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch["tokens"])
    return flat(logits.float(), batch)


def one_hot(model: Any, batch: Batch) -> Any:
    targets = functional.one_hot(batch["labels"].clamp_min(0), WORDS).float()
    return -(model(batch["tokens"]).log_softmax(-1) * targets).sum(-1).mean()


def with_metrics(model: Any, batch: Batch) -> Any:
    logits = model(batch["tokens"])
    with torch.no_grad():
        hits = (logits.argmax(-1) == batch["labels"]).float().mean()
        best = (logits.topk(5, -1).indices == batch["labels"].unsqueeze(-1)).any(-1).float().mean()
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    metrics = {"accuracy": hits, "best of five": best, "entropy": entropy.mean()}
    return Loss(flat(logits, batch), metrics=metrics)


def with_prior(model: Any, batch: Batch) -> Any:
    return flat(model(batch["tokens"]) + model.prior, batch)


def distilled(model: Any, batch: Batch) -> Any:
    student = model(batch["tokens"]).log_softmax(-1)
    with torch.no_grad():
        teacher = functional.linear(batch["features"], model.embed.weight).log_softmax(-1)
    return functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def without_the_last(model: Any, batch: Batch) -> Any:
    logits = model(batch["tokens"])[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def shifted(model: Any, batch: Batch) -> Any:
    logits = model(batch["tokens"])[..., :-1, :].contiguous()
    labels = batch["labels"][..., 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def classes_second(model: Any, batch: Batch) -> Any:
    return functional.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["labels"])


def of_sequences(model: Any, batch: Batch) -> Any:
    """Mean of each row's log-probabilities, with labels that are never flattened."""
    scores = model(batch["tokens"])[:, :-1].log_softmax(-1)
    labels, mask = batch["labels"][:, 1:], (batch["labels"][:, 1:] != -100).float()
    picked = scores.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -((picked * mask).sum(-1) / mask.sum(-1)).mean()


def of_a_given_teacher(model: Any, batch: Batch) -> Any:
    targets = batch["teacher"].softmax(-1)
    return -(model(batch["tokens"]).log_softmax(-1) * targets).sum(-1).mean()


def of_a_shifted_teacher(model: Any, batch: Batch) -> Any:
    with torch.no_grad():
        teacher = functional.linear(batch["features"], model.embed.weight)[:, 1:].softmax(-1)
    scores = model(batch["tokens"])[:, 1:].log_softmax(-1)
    return -(scores * teacher).sum(-1).mean()


def transposed(model: Any, batch: Batch) -> Any:
    scale = torch.linspace(0.5, 2.0, WORDS)
    logits = (model(batch["tokens"]).flatten(0, 1).t() * scale[:, None]).t()
    return functional.cross_entropy(logits, batch["labels"].flatten())


def checkpointed(model: Any, batch: Batch) -> Any:
    hidden = model.hidden(batch["tokens"])
    return checkpoint(lambda x: flat(model.head(x), batch), hidden, use_reentrant=False)


def in_float16(model: Any, batch: Batch) -> Any:
    with torch.autocast("cpu", dtype=torch.float16):
        return flat(model(batch["tokens"]), batch)


def in_float64(model: Any, batch: Batch) -> Any:
    return flat(model(batch["tokens"]).double(), batch)


def two_heads(model: Any, batch: Batch) -> Any:
    hidden = model.hidden(batch["tokens"])
    other = functional.linear(hidden, model.embed.weight)
    return flat(model.head(hidden), batch) + 0.3 * flat(other, batch)


def perplexity(model: Any, batch: Batch) -> Any:
    return usual(model, batch).exp()


def centred(model: Any, batch: Batch) -> Any:
    logits = model(batch["tokens"])
    return flat(logits - logits.mean((0, 1)), batch)


LOSSES: dict[str, Callable[[Any, Batch], Any]] = {
    each.__name__: each
    for each in (
        usual,
        summed,
        smoothed,
        weighted,
        masked_mean,
        by_hand,
        with_z_loss,
        soft_capped,
        in_bfloat16,
        one_hot,
        with_metrics,
        with_prior,
        distilled,
        without_the_last,
        shifted,
        classes_second,
        of_sequences,
        of_a_given_teacher,
        of_a_shifted_teacher,
        transposed,
        checkpointed,
        in_float16,
        in_float64,
        two_heads,
    )
}


DIFFERENT = (
    "with_metrics",
    "in_bfloat16",
    "shifted",
    "checkpointed",
    "two_heads",
)
"""Losses that together need many of the rules."""


def of_every_pair(model: Any, batch: Batch) -> Any:
    """Difference of each row's output and each row's target: rows x rows, by mistake or not."""
    first: Tensor = model(batch["tokens"])[:, 0, :1]
    return (first - batch["features"][:, 0, 0]).square().mean()


WHOLE = {"perplexity": perplexity, "centred": centred, "of_every_pair": of_every_pair}
"""Losses whose gradient, or value, needs all rows at once."""


def job_of(loss: Callable[[Any, Batch], Any], **options: bool) -> Job:
    torch.manual_seed(0)
    labels = torch.randint(0, WORDS, (ROWS, POSITIONS))
    labels[:, 0] = -100
    batch = {
        "tokens": torch.randint(0, WORDS, (ROWS, POSITIONS)),
        "labels": labels,
        "features": torch.randn(ROWS, POSITIONS, WIDTH),
        "teacher": torch.randn(ROWS, POSITIONS, WORDS),
    }
    return job(Head(**options), batch=batch, loss=loss)


@functools.cache
def captured(name: str) -> tuple[Job, list[Tensor], StepGraph]:
    of = job_of((LOSSES | WHOLE)[name], bias=name == "smoothed", tied=name == "usual")
    program, step = given.captured_step(of)
    values = [given.value(p, of, dict(program.state), program.constants) for p in step.inputs]
    return of, values, step


@functools.cache
def chunked(name: str, chunks: int) -> Chunked:
    return chunk_losses(captured(name)[2], chunks)


def results(step: StepGraph, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad(), deterministic():
        found: list[Tensor] = step.module(*inputs)
    return found


@pytest.mark.matrix(
    when=lambda name, chunks, rows: (
        (name in DIFFERENT and rows == 3) or (name == "in_bfloat16" and chunks == 2)
    )
)
@pytest.mark.parametrize(("chunks", "rows"), [(2, ROWS), (7, 3), (7, 1)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_chunks_has_the_results_of_a_whole_one(name: str, chunks: int, rows: int) -> None:
    _, values, step = captured(name)
    inputs = [
        value[:rows] if port.role is Role.BATCH else value
        for port, value in zip(step.inputs, values, strict=True)
    ]
    divided = chunked(name, chunks)
    assert divided.products, divided.reasons
    assert (divided.step.inputs, divided.step.outputs) == (step.inputs, step.outputs)
    bound = {"in_bfloat16": 2e-2, "in_float16": 2e-3}.get(name, 2e-5)
    for port, whole, parts in zip(
        step.outputs, results(step, inputs), results(divided.step, inputs), strict=True
    ):
        assert (whole.shape, whole.dtype) == (parts.shape, parts.dtype)
        scale = whole.abs().max().item() + 1e-9
        assert math.isclose((whole - parts).abs().max().item(), 0, abs_tol=bound * scale), port


@pytest.mark.matrix(when=lambda name: name in DIFFERENT)
@pytest.mark.parametrize("name", LOSSES)
def test_the_logits_are_never_whole(name: str) -> None:
    """No tensor has a whole batch of rows of the vocabulary's size."""
    step = chunked(name, 2).step
    inputs = zip(step.module.graph.find_nodes(op="placeholder"), step.inputs, strict=True)
    parameters = {node for node, port in inputs if port.role is Role.PARAMETER}
    whole = [
        node
        for node in step.module.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor)
        and any(size == WORDS for size in value.shape)
        and value.numel() >= ROWS * (POSITIONS - 1) * WORDS
        and computed_from([node]) & parameters
    ]
    assert not whole


@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_whose_gradient_needs_all_rows_stays_whole(name: str) -> None:
    divided = chunked(name, 2)
    assert divided.step is captured(name)[2]


def test_a_plan_for_such_a_loss_is_rejected_with_the_reason() -> None:
    with pytest.raises(PlanError, match="chunks of rows") as raised:
        check_chunked(captured("perplexity")[2], 2, "train")
    assert "needs a sum over all rows" in str(raised.value.got)


@pytest.mark.slow
def test_chunks_need_a_fraction_of_the_memory_of_the_logits() -> None:
    def logits_at_the_peak(step: StepGraph) -> float:
        rows = 512
        peak = held(step.module, sizes_of(step.module, step.inputs, rows)).peak
        return peak / (4 * rows * POSITIONS * WORDS)

    whole, parts = captured("usual")[2], chunked("usual", 8).step
    assert logits_at_the_peak(parts) < logits_at_the_peak(whole) - 2


@pytest.mark.slow
def test_compiled_chunks_hold_the_logits_of_one_chunk(tmp_path: Path) -> None:
    """The compiler neither moves the chunks' products apart nor makes one kernel of several."""
    _, values, step = captured("usual")
    rows = 512
    inputs = [
        value.repeat(rows // ROWS, *[1] * (value.ndim - 1)) if port.role is Role.BATCH else value
        for port, value in zip(step.inputs, values, strict=True)
    ]

    def peak(module: GraphModule, name: str) -> int:
        compile_graph(module, tmp_path / name, {})
        compiled = load_compiled(tmp_path / name)
        with torch.no_grad():
            compiled(*inputs)
            return peak_bytes(lambda: compiled(*inputs))

    logits = 4 * rows * POSITIONS * WORDS
    whole, parts = (
        peak(each.module, name)
        for name, each in (("whole", step), ("parts", chunked("usual", 8).step))
    )
    assert parts < whole - logits / 2, f"{parts} of {whole} bytes, of which {logits} are logits"


def test_a_loss_in_float64_is_summed_in_float64() -> None:
    _, inputs, step = captured("in_float64")
    whole, parts = (results(each, inputs) for each in (step, chunked("in_float64", 2).step))
    place = next(at for at, port in enumerate(step.outputs) if port.role is Role.LOSS)
    assert math.isclose(whole[place].item(), parts[place].item(), rel_tol=1e-14)


def test_nothing_is_computed_twice() -> None:
    """All products of a chunked graph together have as many operations as those of a whole one."""

    def operations(step: StepGraph) -> float:
        return sum(flops(node) for node in step.module.graph.nodes)

    whole, parts = captured("two_heads")[2], chunked("two_heads", 2).step
    assert operations(parts) == operations(whole)


def test_a_graph_without_gradients_is_divided_too() -> None:
    of = job_of(usual)
    program, _ = given.captured_step(of)
    step = derive(program, "eval", torch.device("cpu"))
    assert chunk_losses(step, 2).products == 1
