"""A job without values is captured in little memory.

Its structure must equal that of a smaller job that was proven.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.capture.sized import Block, Stack, job_of, large, small
from tests.ranks import ran
from torch import Tensor, nn

from trainload.autograd_trace.derivation.aot import fake_mode
from trainload.capture.job.definition import Job
from trainload.capture.job.hollow import hollow
from trainload.capture.program import Program
from trainload.capture.tracing.abstract_job import AbstractProof, capture_abstract
from trainload.capture.tracing.structure import difference, pattern, structure_of
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:1 parameters get no gradient")


@pytest.fixture(scope="module")
def proven() -> Program:
    """The reduced job, captured and compared with eager."""
    return capture(small())


@pytest.fixture(scope="module")
def abstract(proven: Program) -> tuple[Program, AbstractProof]:
    """The large job, captured without values."""
    return capture_abstract(large(), proven)


@pytest.fixture(scope="module")
def in_turn() -> Program:
    """A reduced job with alternating layers of two kinds."""
    return capture(small(depth=4, special=2))


def refusal(job: Job, reduced: Program) -> str:
    with pytest.raises(CaptureError, match="differs from the reduced one") as raised:
        capture_abstract(job, reduced)
    return str(raised.value)


# Models without values


def test_a_hollow_model_has_ordinary_tensors_and_is_put_back() -> None:
    model = large().model
    before = dict(model.named_parameters(remove_duplicate=False))
    with hollow(model):
        inside = dict(model.named_parameters(remove_duplicate=False))
        assert {p.device.type for p in inside.values()} == {"cpu"}
        assert {n: p.shape for n, p in inside.items()} == {n: p.shape for n, p in before.items()}
        assert inside["head.weight"] is inside["embedding.weight"]
    assert all(p is before[n] for n, p in model.named_parameters(remove_duplicate=False))


def test_a_hollow_model_is_put_back_after_an_error() -> None:
    model = large().model
    with pytest.raises(KeyError), hollow(model):
        raise KeyError
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_model_with_values_keeps_them() -> None:
    model = small().model
    before = list(model.parameters())
    with hollow(model):
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def tell_what_hollow_takes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16384, 16384) for _ in range(64)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with hollow(model):
        pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_a_hollow_model_takes_no_memory(tmp_path: Path) -> None:
    status, told = ran(tell_what_hollow_takes, cwd=tmp_path)
    assert status == 0, told
    assert int(told) < 64 * 1024  # KiB, for 64 GiB of parameters


# Capture


def test_an_abstract_program_has_the_shapes_and_no_state(
    abstract: tuple[Program, AbstractProof],
) -> None:
    program, _ = abstract
    assert dict(program.state) == {}
    assert {p.name: p.shape for p in program.parameters}["blocks.2.up.weight"] == (128, 64)
    assert program.aliases == {"head.weight": "embedding.weight"}


def test_an_abstract_program_is_for_the_cpu_as_any_other(
    abstract: tuple[Program, AbstractProof],
) -> None:
    program, _ = abstract
    values = [
        n.meta["val"]
        for n in program.graphs["train"].exported.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
    ]
    assert {value.device.type for value in values} == {"cpu"}


def test_a_parameter_is_trained_where_its_like_is(abstract: tuple[Program, AbstractProof]) -> None:
    program, _ = abstract
    assert [p.name for p in program.parameters if not p.trainable] == ["spare"]


@pytest.mark.slow  # another width has the structure of these graphs
def test_a_job_of_the_same_sizes_has_the_very_graphs(proven: Program) -> None:
    program, _ = capture_abstract(large(width=8, depth=2), proven)
    for name, graph in program.graphs.items():
        assert str(graph.exported.graph) == str(proven.graphs[name].exported.graph)


@pytest.mark.slow  # rare: models without values are usually made on the meta device
def test_a_model_of_fake_tensors_is_captured(proven: Program) -> None:
    with fake_mode():
        model = Stack(64, 3)
    program, _ = capture_abstract(job_of(model), proven)
    assert {p.name: p.shape for p in program.parameters}["blocks.2.up.weight"] == (128, 64)


def test_a_batch_without_values_is_captured(proven: Program) -> None:
    job = large()
    abstract, _ = capture_abstract(
        job_of(job.model, batch={"tokens": torch.zeros(4, 5, dtype=torch.long, device="meta")}),
        proven,
    )
    assert abstract.graphs["train"].inputs == proven.graphs["train"].inputs


def test_the_proof_counts_the_reduced_job(
    proven: Program, abstract: tuple[Program, AbstractProof]
) -> None:
    _, proof = abstract
    count = sum(p.numel() for p in small().model.parameters())
    assert proof == AbstractProof(count, structure_of(proven))


def test_a_model_that_cannot_be_traced_is_not_run(proven: Program) -> None:
    class Branching(Stack):
        def forward(self, tokens: Tensor) -> Tensor:
            assert torch.compiler.is_exporting(), "this model was run"
            logits = super().forward(tokens)
            return logits * 2 if logits.sum() > 0 else logits

    with torch.device("meta"):
        model = Branching(64, 3)
    with pytest.raises(CaptureError) as raised:
        capture_abstract(job_of(model), proven)
    assert raised.value.findings[0].cause == "data-dependent-branch"


# Structures


@pytest.mark.slow  # the large job is proven by the structure of the reduced one
@pytest.mark.parametrize("depth", [2, 3, 7, 16])
def test_any_number_of_equal_layers_has_one_structure(depth: int, proven: Program) -> None:
    assert structure_of(capture_abstract(large(depth=depth), proven)[0]) == structure_of(proven)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [4, 6, 10])
def test_layers_of_two_kinds_in_turn_have_one_structure(depth: int, in_turn: Program) -> None:
    capture_abstract(large(depth=depth, special=2), in_turn)


def under_autocast(depth: int, act: Callable[[Tensor], Tensor] = torch.relu) -> Job:
    """Return the job `small` under autocast.

    The parameters of the layers are operands of one region, whose number grows with the depth.
    """

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch["tokens"][:, :-1])
        return nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch["tokens"][:, 1:].flatten()
        )

    torch.manual_seed(0)
    model = Stack(8, depth)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.act = act
    return job_of(model, loss=loss)


@pytest.fixture(scope="module")
def region() -> Program:
    return capture(under_autocast(2))


@pytest.mark.slow
def test_any_number_of_layers_under_autocast_has_one_structure(region: Program) -> None:
    assert difference(capture(under_autocast(3)), region) is None


@pytest.mark.slow  # tests below cover this outside of regions
def test_another_activation_under_autocast_is_a_difference(region: Program) -> None:
    found = difference(capture(under_autocast(2, torch.tanh)), region)
    assert found is not None
    assert "tanh" in found.abstract


@pytest.mark.slow  # tests below cover other layers
def test_layers_in_another_order_of_kinds_are_refused(in_turn: Program) -> None:
    text = refusal(large(depth=6, special=3), in_turn)
    assert "the eval graph, module blocks.*" in text


@pytest.mark.slow  # test_abstract_package.py freezes such a pair
def test_one_layer_is_not_enough_for_several() -> None:
    assert "eval graph" in refusal(large(depth=3), capture(small(depth=1)))


def test_another_activation_is_refused_by_its_module(proven: Program) -> None:
    job = large()
    for block in job.model.blocks:  # type: ignore[union-attr]  # a module list
        assert isinstance(block, Block)
        block.act = torch.sigmoid
    text = refusal(job, proven)
    assert "module blocks.*" in text
    assert "aten.sigmoid" in text
    assert "aten.relu" in text


def test_another_parameter_is_refused_by_its_name(proven: Program) -> None:
    job = large()
    job.model.register_parameter("more", nn.Parameter(torch.empty(3, device="meta")))
    assert "parameter more" in refusal(job, proven)


@pytest.mark.slow  # parameters' records are compared as a whole; a test above compares their names
def test_another_dtype_is_refused(proven: Program) -> None:
    job = large()
    job.model.bfloat16()
    assert "bfloat16" in refusal(job, proven)


@pytest.mark.slow
def test_a_tie_that_the_reduced_job_lacks_is_refused() -> None:
    untied = small()
    untied.model.head.weight = nn.Parameter(torch.randn(32, 8))  # type: ignore[union-attr]  # a module
    assert "head.weight" in refusal(large(), capture(untied))


class Restarting(Block):
    """Adds its residual to the output of its last layer instead of its input."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.act(self.up(self.norm(x))))
        return hidden + nn.functional.dropout(hidden * self.get_buffer("scale"), 0.1, self.training)


class AlongTime(Block):
    """Ends with a softmax over the words of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class AlongWidth(Block):
    """Ends with a softmax over the features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


def stack_of(kind: type[Block], width: int, depth: int) -> Job:
    stack = Stack(width, depth)
    stack.blocks = nn.ModuleList(kind(width, torch.relu) for _ in range(depth))
    return job_of(stack)


@pytest.mark.matrix("Restarting-Block")
@pytest.mark.parametrize(("kind", "reduced"), [(Restarting, Block), (AlongWidth, AlongTime)])
def test_the_same_operators_on_other_values_or_dims_are_refused(
    kind: type[Block], reduced: type[Block], proven: Program
) -> None:
    torch.manual_seed(0)
    proven = proven if reduced is Block else capture(stack_of(reduced, 8, 1))
    with torch.device("meta"):
        job = stack_of(kind, 64, 3 if reduced is Block else 1)
    assert "module blocks.*" in refusal(job, proven)


def test_a_program_has_no_difference_from_itself(proven: Program) -> None:
    assert difference(proven, proven) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.17.weight", "layers.*.weight"),
        ("0.1.bias", "*.*.bias"),
        ("conv2d.weight1", "conv2d.weight1"),
        ("h.3", "h.*"),
    ],
)
def test_numbers_between_dots_are_left_out_of_a_name(name: str, expected: str) -> None:
    assert pattern(name) == expected
