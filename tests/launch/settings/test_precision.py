"""A run launched in a precision trains like a job frozen in it, or is rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch import graph_jobs, optimizer_jobs
from tests.launch.optimizer_jobs import Model, adam, loss, make_job
from tests.laws.gpt import gpt_job
from tests.laws.gpt import loss as gpt_loss
from tests.laws.runs import Run, curve, difference, train
from torch import Tensor, nn
from torch.nn import functional

import trainload
from trainload import Graph
from trainload.cli import main as cli
from trainload.core.errors import JobError
from trainload.packaging.package import Package
from trainload.packaging.signatures.verify import verify_package
from trainload.sharding.plans.device_step_graphs import step_graphs

pytestmark = pytest.mark.slow

BF16, FP32 = trainload.Overrides(precision="bf16"), trainload.Overrides(precision="fp32")
SAME = 1e-6
TWO = trainload.Cluster(devices_per_node=2)
Capture = pytest.CaptureFixture[str]


class Guarded(Model):
    """Model with a part that is never under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            x = x.float() + functional.gelu(
                self.third(torch.tanh(self.second(self.norm(x.float()))))
            )
        out: Tensor = self.last(x)
        return out


class Part(Model):
    """Model with a part under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with torch.autocast("cpu", torch.bfloat16):
            x = x + functional.gelu(self.third(torch.tanh(self.second(self.norm(x)))))
        out: Tensor = self.last(x.float())
        return out


def low(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, batch)


def in_low(job: trainload.Job) -> trainload.Job:
    """Return the job with autocast in its loss."""
    return dataclasses.replace(job, loss=low)


def launched(
    package: Package, rows: Path, run_dir: Path, overrides: trainload.Overrides, **options: Any
) -> list[float]:
    plan = trainload.plan(overrides.apply(package), trainload.Cluster(), "single")
    given: dict[str, Any] = {
        "compile": False,
        "backend": "local",
        "overrides": overrides,
        **options,
    }
    trainload.launch(
        package, plan, rows, run_dir=run_dir, output=run_dir.with_suffix(".tl"), **given
    )
    return curve(run_dir)


@pytest.fixture(scope="module")
def high(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return optimizer_jobs.frozen(tmp_path_factory)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(in_low(make_job(adam)), tmp_path_factory.mktemp("low") / "job.tl")


@pytest.fixture(scope="module")
def curves(
    high: Package, lowered: Package, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[float]]:
    """Name -> losses of the two jobs as they were frozen."""
    folder = tmp_path_factory.mktemp("frozen")
    return {
        name: launched(p, rows, folder / name, trainload.Overrides())
        for name, p in {"high": high, "low": lowered}.items()
    }


def test_bf16_is_the_run_of_a_job_with_autocast_in_its_loss(
    high: Package, curves: dict[str, list[float]], rows: Path, tmp_path: Path
) -> None:
    found = launched(high, rows, tmp_path / "run", BF16)
    assert difference(curves["low"], found) <= SAME
    assert difference(curves["high"], found) > 1e-4


def test_fp32_is_the_run_of_the_job_without_autocast(
    lowered: Package, curves: dict[str, list[float]], rows: Path, tmp_path: Path
) -> None:
    assert difference(curves["high"], launched(lowered, rows, tmp_path / "run", FP32)) <= SAME


@pytest.mark.parametrize(("kind", "tolerance"), [(Part, SAME), (Guarded, 5e-3)])
def test_what_the_model_says_of_autocast_itself_holds_inside(
    kind: type[Model], tolerance: float, rows: Path, tmp_path: Path
) -> None:
    frozen = [
        trainload.freeze(job, tmp_path / f"{i}.tl")
        for i, job in enumerate((make_job(adam, kind), in_low(make_job(adam, kind))))
    ]
    expected = launched(frozen[1], rows, tmp_path / "expected", trainload.Overrides())
    found = launched(frozen[0], rows, tmp_path / "run", BF16)
    assert found[0] == expected[0]
    # Two `.float()` of one tensor, no-ops at capture, were merged: the tensor's gradient is
    # rounded to bfloat16 only once.
    assert difference(expected, found) <= tolerance


def test_a_gpt_with_dropout_buffers_and_tied_weights_is_the_one_that_was_frozen_so(
    gpt: Package, gpt_data: Path, tmp_path: Path
) -> None:
    def lower(model: nn.Module, batch: dict[str, Tensor]) -> trainload.Loss:
        with torch.autocast("cpu", torch.bfloat16):
            return gpt_loss(model, batch)

    frozen = trainload.freeze(dataclasses.replace(gpt_job(), loss=lower), tmp_path / "low.tl")
    options: dict[str, Any] = {"steps": 6, "eval_data": gpt_data}
    expected = launched(frozen, gpt_data, tmp_path / "expected", trainload.Overrides(), **options)
    assert difference(expected, launched(gpt, gpt_data, tmp_path / "run", BF16, **options)) <= SAME
    wanted, found = (
        trainload.open(tmp_path / f"{name}.tl").weights for name in ("expected", "run")
    )
    torch.testing.assert_close(found.tensor("mean"), wanted.tensor("mean"))
    assert torch.equal(found.tensor("calls"), wanted.tensor("calls"))


def test_two_workers_and_a_compiler_have_the_same_losses(
    high: Package, curves: dict[str, list[float]], rows: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(BF16.apply(high), TWO, "zero3")
    train(
        2,
        [
            Run(
                tmp_path / "pair",
                high,
                plan,
                rows,
                {"overrides": {"precision": "bf16"}, "steps": 6},
            )
        ],
        tmp_path,
    )
    compiled = launched(high, rows, tmp_path / "compiled", BF16, compile=True, steps=6)
    for found in (curve(tmp_path / "pair"), compiled):
        # rows are summed in another order, in bfloat16
        assert difference(curves["low"][:6], found) <= 1e-2


def test_parameters_gradients_and_state_are_in_float32(high: Package) -> None:
    changed = BF16.apply(high)
    step = step_graphs(changed, torch.device("cpu"))["train"]
    output = next(node for node in step.module.graph.nodes if node.op == "output")
    gradients = [
        n.meta["val"].dtype
        for n, port in zip(output.args[0], step.outputs, strict=True)
        if port.role == "gradient"
    ]
    assert len(gradients) == 10 and set(gradients) == {torch.float32}
    products = [n.meta["val"].dtype for n in step.module.graph.nodes if "mm" in str(n.target)]
    assert products and set(products) == {torch.bfloat16}
    assert {entry.dtype for entry in changed.manifest.parameters} == {"float32"}
    assert changed.manifest.updates == high.manifest.updates


def test_the_changed_package_is_a_sound_one(high: Package, lowered: Package) -> None:
    for package, overrides in ((high, BF16), (lowered, FP32)):
        changed = overrides.apply(package)
        assert not verify_package(changed.path).problems
        assert [dict(entry.options) for entry in changed.manifest.passes] == [
            {"precision": overrides.precision}
        ]
    graph = BF16.apply(high).graph("eval")
    batch = {"x": torch.randn(5, 8), "y": torch.randn(5, 8)}
    (found,) = graph.module(check_guards=False)(batch)
    (expected,) = lowered.graph("eval").module(check_guards=False)(batch)
    torch.testing.assert_close(found, expected)


def test_adapters_go_with_it(high: Package, lowered: Package, rows: Path, tmp_path: Path) -> None:
    adapters = trainload.Adapters(rank=3, layers=("second.weight", "last.weight"), alpha=6.0)
    expected = launched(
        lowered, rows, tmp_path / "expected", trainload.Overrides(adapters=adapters)
    )
    both = trainload.Overrides(adapters=adapters, precision="bf16")
    assert difference(expected, launched(high, rows, tmp_path / "run", both)) <= SAME


def test_the_trained_package_computes_as_it_was_frozen(
    high: Package, rows: Path, tmp_path: Path
) -> None:
    launched(high, rows, tmp_path / "run", BF16, steps=2)
    after = trainload.open(tmp_path / "run.tl")
    assert after.manifest.program_digest == high.manifest.program_digest
    assert after.manifest.training is not None and after.manifest.training.changed[0].settings == {
        "precision": "bf16"
    }


class Explicit(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x.to(torch.bfloat16))


class Between(Model):
    """Model with an operator whose two tensors must have the same dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, super().forward(x), 0.5)


class Branching(Model):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.cond(
            x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (super().forward(x),)
        )
        return out


class Half(Model):
    """Model whose parameters are in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16)).float()


@pytest.mark.parametrize(
    ("make", "precision", "line"),
    [
        (
            lambda: make_job(adam),
            "fp32",
            (
                "it has no effect: everything that autocast would compute in float32 was already"
                " frozen that way"
            ),
        ),
        (
            lambda: in_low(make_job(adam)),
            "bf16",
            (
                "it has no effect: everything that autocast would compute in bfloat16 was already"
                " frozen that way"
            ),
        ),
        (
            lambda: make_job(adam, Explicit),
            "fp32",
            "a value stays in bfloat16: it was not converted by autocast .*aten.to",
        ),
        (lambda: make_job(adam, Half), "bf16", "it has no effect"),
        (lambda: make_job(adam, Half), "fp32", "it has no effect"),
        (
            lambda: make_job(adam, Branching),
            "bf16",
            r"the graph has control flow, .*got cond at File .*in forward",
        ),
        (
            lambda: make_job(adam, Between),
            "bf16",
            (
                r"an operator does not accept the dtypes that it would receive: .*aten.lerp.Scalar"
                r" at File"
            ),
        ),
    ],
)
def test_what_a_graph_does_not_allow_is_refused(
    make: Callable[[], trainload.Job], precision: Any, line: str, tmp_path: Path
) -> None:
    package = trainload.freeze(make(), tmp_path / "job.tl")
    with pytest.raises(JobError, match=line):
        trainload.Overrides(precision=precision).apply(package)


def test_what_a_graph_gives_to_others_keeps_its_dtype(tmp_path: Path) -> None:
    def lower(call: Any) -> Any:
        def under(model: nn.Module, batch: dict[str, Tensor]) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                found = call(model, batch)
            return (
                {name: value.float() for name, value in found.items()}
                if isinstance(found, dict)
                else found
            )

        return under

    def lowered(graph: Graph) -> Graph:
        return dataclasses.replace(
            graph,
            loss=graph.loss and lower(graph.loss),
            compute=graph.compute and lower(graph.compute),
        )

    job = graph_jobs.distillation()
    package = trainload.freeze(job, tmp_path / "job.tl")
    low = dataclasses.replace(
        graph_jobs.distillation(),
        graphs={name: lowered(graph) for name, graph in job.graphs.items()},
    )
    frozen = trainload.freeze(low, tmp_path / "low.tl")
    data = graph_jobs.write_digits(tmp_path / "digits.npz", {"image", "label"})
    expected = launched(frozen, data, tmp_path / "expected", trainload.Overrides())
    assert difference(expected, launched(package, data, tmp_path / "run", BF16)) <= SAME


def test_the_command_line_sets_it(
    high: Package, curves: dict[str, list[float]], rows: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = [
        "launch",
        str(high.path),
        "--data",
        str(rows),
        "--run-dir",
        str(tmp_path / "run"),
        "--backend",
        "local",
        "--no-compile",
    ]
    assert cli.run([*command, "--set", "precision=fp16"]) == 2
    assert "--set precision=fp16: Input should be 'bf16' or 'fp32'" in capsys.readouterr().err
    assert cli.run([*command, "--set", "precision=bf16"]) == 0, capsys.readouterr().err
    assert difference(curves["low"], curve(tmp_path / "run")) <= SAME
