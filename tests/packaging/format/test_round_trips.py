"""Programs read from a package stay the same when torch's own tools process them.

They are written again, exported again, unflattened and derived.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.jobs import Batch, Function, Model
from tests.capture.jobs import job as small_job
from tests.laws.gpt import TinyGPT, loss, token_rows
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import trainload
from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.decompose import spelled
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.capture.job.definition import Job
from trainload.capture.job.synthesise import synthesise
from trainload.capture.operators import calls_in
from trainload.core.canonical_json import canonical_json
from trainload.packaging.derived import read_derived
from trainload.packaging.graphs.graph_json import flat_to_json, graph_to_json
from trainload.packaging.package import Package
from trainload.passes import decompose
from trainload.sharding.plans.device_step_graphs import derived_key
from trainload.transforms.apply import Transformation

aten = torch.ops.aten


class Net(nn.Module):
    """Convolution, BatchNorm, a buffer that is written to, dropout, an autocast region."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.conv(x.view(-1, 2, 4))).relu()).flatten(1)
        with torch.no_grad():
            self.seen.add_(y.mean())
        with torch.autocast("cpu", torch.bfloat16):
            y = self.out(y)
        out: Tensor = y.float()
        return out


def tied(model: Any, x: Tensor) -> Tensor:
    y: Tensor = nn.functional.linear(x, model.first.weight)
    return y.sin()


def branched(model: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))
    return y


def gpt() -> Job:
    torch.manual_seed(0)
    return trainload.Job(
        model=TinyGPT(0.1),
        batch={"tokens": token_rows(4)},
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )


JOBS: dict[str, Callable[[], Job]] = {
    "tied": lambda: small_job(Model(tied)),
    "cond": lambda: small_job(Model(branched)),
    "net": lambda: small_job(Net()),
    "gpt": gpt,
    "static batch": lambda: small_job(Model(), dynamic={"x": {0: Dim.STATIC}}),
    "named dim": lambda: small_job(
        nn.Sequential(nn.Linear(8, 8), Function(lambda _, x: x.mean(1))),
        batch={"x": torch.randn(4, 6, 8)},
        dynamic={"x": {1: Dim("length")}},
    ),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "net" else pytest.mark.slow) for name in JOBS],
)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Package:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the models leave out is not tested here
        return trainload.freeze(JOBS[request.param](), tmp_path_factory.mktemp("round") / "p.tl")


@pytest.fixture(scope="module")
def batch(package: Package) -> Batch:
    return synthesise(package.program().graphs["train"], seed=0)


@pytest.fixture(scope="module")
def train(package: Package) -> ExportedProgram:
    return package.graph("train")


def run(
    module: nn.Module, batch: Batch
) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
    """Return loss, gradients and buffers after a call with a fixed seed.

    The module is left unchanged.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    torch.manual_seed(3)
    loss = module(batch)[0]
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    found = dict(
        zip(map(id, trained), torch.autograd.grad(loss, trained, allow_unused=True), strict=True)
    )
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    for name, buffer in module.named_buffers():
        buffer.detach().copy_(before[name])
    return (
        loss.detach(),
        {name: found.get(id(parameter)) for name, parameter in named.items()},
        buffers,
    )


def assert_same(first: nn.Module, second: nn.Module, batch: Batch) -> None:
    one, other = run(first, batch), run(second, batch)
    assert torch.equal(one[0], other[0])
    for mine, theirs in ((one[1], other[1]), (one[2], other[2])):
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            same = theirs[name]
            assert (tensor is None) == (same is None), name
            assert tensor is None or same is None or torch.equal(tensor, same), name
    assert any(gradient is not None and bool((gradient != 0).any()) for gradient in one[1].values())


def operators(exported: ExportedProgram) -> Counter[str]:
    return Counter(spelled(node.target) for node in calls_in(exported.graph_module))


def exported_again(exported: ExportedProgram, package: Package, batch: Batch) -> ExportedProgram:
    rows = Dim("batch", min=1)
    shapes: dict[str, dict[int, Any]] = {}
    for entry in package.manifest.graphs["train"].inputs:
        symbols = {dim: size for dim, size in enumerate(entry.shape) if isinstance(size, str)}
        shapes[entry.name] = {dim: rows if dim == 0 else Dim.AUTO for dim in symbols}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(
            exported.module(check_guards=False), (batch,), dynamic_shapes=(shapes,), strict=False
        )


def test_written_again_a_graph_has_the_same_bytes(package: Package) -> None:
    for name, capture in package.program().graphs.items():
        assert (
            canonical_json(graph_to_json(capture.exported).document)
            == (package.path / f"graphs/{name}.json").read_bytes()
        )


def test_exported_again_a_graph_has_the_same_operators(
    package: Package, train: ExportedProgram, batch: Batch
) -> None:
    def kept(exported: ExportedProgram) -> Counter[str]:
        found = operators(exported)
        del found["aten._guards_fn"], found["aten._assert_tensor_metadata.default"]
        return found

    assert kept(exported_again(train, package, batch)) == kept(train)


def test_exported_again_a_graph_gives_the_same_loss_and_gradients(
    package: Package, train: ExportedProgram, batch: Batch
) -> None:
    again = exported_again(train, package, batch)
    assert_same(train.module(check_guards=False), again.module(check_guards=False), batch)


def test_unflattened_a_graph_gives_the_same_loss_and_gradients(
    train: ExportedProgram, batch: Batch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unflattened = torch.export.unflatten(train)
    assert_same(train.module(check_guards=False), unflattened, batch)


def test_brought_to_core_aten_a_graph_gives_the_same_loss_and_gradients(package: Package) -> None:
    applied = Transformation(package).apply(decompose)
    assert applied.calls_after != applied.calls_before
    assert applied.entry.preserving, applied.worst


def test_a_step_graph_is_the_same_whether_derived_at_the_freeze_or_from_the_package(
    package: Package, batch: Batch
) -> None:
    cpu = torch.device("cpu")
    at_the_freeze, program = read_derived(package, derived_key("train", cpu)), package.program()
    assert at_the_freeze is not None
    later = derive(program, "train", cpu)
    assert (later.inputs, later.outputs) == (at_the_freeze.inputs, at_the_freeze.outputs)
    # Except for the ranges of sizes: torch's reader removes 0 and 1 from them.
    first, second = (
        flat_to_json(step.module).document["graph_module"] for step in (at_the_freeze, later)
    )
    assert canonical_json(first) == canonical_json(second)
    check_step(program, "train", later, batch)
