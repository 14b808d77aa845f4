"""Run one measurement of `freeze.py`.

A measurement is a whole freeze, its unavoidable parts, or operations on a package:

    python benchmarks/freeze_parts.py whole --layers 24 --hidden 512 --out FILE
    python benchmarks/freeze_parts.py parts --layers 24 --hidden 512 --out FILE
    python benchmarks/freeze_parts.py package --package FOLDER --out FILE

Imports, building the model and torch's first trace (of one linear layer) are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import PeakMemory, see_example
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.export import Dim, ExportedProgram
from torch.optim.adamw import adamw
from transformers import LlamaConfig, LlamaForCausalLM

see_example()

import trainload  # noqa: E402  # found by the line above
from trainload.huggingface import job_of  # noqa: E402

VOCABULARY = 32_000
LENGTH = 128
ROWS = 2
REPLAYED = (ROWS + 1, ROWS)
"""Numbers of rows of the batches with which the default parity check compares a graph with eager.

In this order.
"""
HEAD = 64
GROUPS = 2
"""Number of AdamW's parameter groups: with weight decay, and without.

Each is stored as two graphs: the first update, and the following ones.
"""


def llama(layers: int, hidden: int) -> nn.Module:
    """Return a randomly initialized fp32 Llama.

    Its heads have 64 dims, the width of its MLP is 2.75 times the hidden size, and its tokens are 0
    to 31,999.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD,
        max_position_embeddings=LENGTH,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def job_for(model: nn.Module) -> Any:
    """Return the job that `transformers.Trainer` would train: AdamW with two groups, and warmup.

    The graphs are train, eval and predict.
    """
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    settings = types.SimpleNamespace(
        max_steps=1000, learning_rate=3e-4, warmup_steps=100, weight_decay=0.1
    )
    return job_of(model, {"input_ids": ids, "labels": ids.clone()}, settings)


class Clock:
    """Sums of seconds by name: `cpu` (CPU time of this process) and `wall`.

    On one thread of an idle machine they differ only by disk waits; on a busy machine only CPU time
    measures the cost.
    """

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}

    @contextlib.contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """Add the time spent in the context to the entries of this name."""
        began, ran = time.perf_counter(), time.process_time()
        yield
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - ran
        self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - began

    def wrapped(self, module: Any, function: str, name: Callable[..., str]) -> None:
        """Time every call of a module's function; `name` receives the call's arguments."""
        before = getattr(module, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.counted(name(*args, **kwargs)):
                return before(*args, **kwargs)

        setattr(module, function, call)


class Function(nn.Module):
    """A function of a job's model and a batch, as a module of the batch."""

    def __init__(
        self,
        model: nn.Module,
        function: Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, ...]],
    ) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return self._function(self.model, batch)


class FirstUpdate(nn.Module):
    """AdamW's first update of a flat tensor, computed by torch's own function."""

    def forward(self, param: Tensor, gradient: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
        return updated(
            param, gradient, rate, torch.zeros_like(param), torch.zeros_like(param), torch.zeros(())
        )


class FollowingUpdate(nn.Module):
    """AdamW's later updates."""

    def forward(
        self, param: Tensor, gradient: Tensor, rate: Tensor, state: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        return updated(param, gradient, rate, *state)


def updated(
    param: Tensor, gradient: Tensor, rate: Tensor, mean: Tensor, square: Tensor, step: Tensor
) -> tuple[Tensor, ...]:
    param, mean, square, step = (t.clone() for t in (param, mean, square, step))
    options = {
        "amsgrad": False,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "maximize": False,
    }
    adamw(
        [param],
        [gradient],
        [mean],
        [square],
        [],
        [step],
        foreach=False,
        capturable=True,
        lr=rate,
        **options,
    )
    return param, mean, square, step


def export(module: nn.Module, batch: dict[str, Tensor], *, training: bool) -> ExportedProgram:
    """Export a module the way a user would, with a dynamic number of rows."""
    rows = Dim("rows", min=2)
    with torch.set_grad_enabled(training):
        return torch.export.export(
            module, (batch,), dynamic_shapes=({name: {0: rows} for name in batch},), strict=False
        )


def export_updates() -> None:
    flat, rate, count = torch.randn(64), torch.tensor(0.1), {0: Dim("count", min=2)}
    state = (torch.zeros(64), torch.zeros(64), torch.zeros(()))
    torch.export.export(
        FirstUpdate(), (flat, flat.clone(), rate), dynamic_shapes=(count, count, None), strict=False
    )
    shapes = (count, count, None, (count, count, None))
    torch.export.export(
        FollowingUpdate(), (flat, flat.clone(), rate, state), dynamic_shapes=shapes, strict=False
    )


def trace_joint(exported: ExportedProgram, batch: dict[str, Tensor]) -> None:
    """Trace AOTAutograd's joint forward-backward graph with the exported graph's fake tensors."""
    module = exported.module(check_guards=False)
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    given = dict(
        zip(batch, (node.meta["val"] for node in placeholders[-len(batch) :]), strict=True)
    )
    with placeholders[0].meta["val"].fake_mode:
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
            for name, buffer in list(part._buffers.items()):
                if buffer is not None:
                    part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    with contextlib.ExitStack() as stack:
        aot_export_joint_with_descriptors(stack, module, (given,))


def warm_up() -> None:
    """Trigger the one-time costs of a process.

    torch imports many modules at its first trace, and starts its threads at its first matrix
    product.
    """
    layer = Function(nn.Linear(4, 4), lambda model, batch: (model(batch["x"]).sum(),))
    batch = {"x": torch.randn(2, 4)}
    trace_joint(export(layer, batch, training=True), batch)
    torch.randn(512, 512) @ torch.randn(512, 512)


def parts(layers: int, hidden: int) -> dict[str, Any]:
    """Measure the unavoidable parts of a freeze, each done once with torch's own functions."""
    model = llama(layers, hidden)
    job = job_for(model)

    def loss(of: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        result = job.loss(of, batch)
        return result.value, result.weight

    def predict(of: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(job.predict(of, batch).values())

    batch = dict(job.batch)
    inputs = {name: batch[name] for name in job.predict_inputs}
    batches = [
        {name: tensor[torch.arange(rows) % ROWS] for name, tensor in batch.items()}
        for rows in REPLAYED
    ]
    warm_up()
    memory = PeakMemory()
    memory.reset()
    clock = Clock()
    with clock.counted("export train"):
        exported = export(Function(model.train(), loss), batch, training=True)
    with clock.counted("joint trace of train"):
        trace_joint(exported, batch)
    with clock.counted("export eval"):
        export(Function(model.eval(), loss), batch, training=False)
    with clock.counted("export predict"):
        export(Function(model, predict), inputs, training=False)
    for _ in range(GROUPS):
        with clock.counted(f"export {2 * GROUPS} update graphs"):
            export_updates()
    for each in batches:
        model.train()
        with clock.counted(f"eager forward+backward of train, {len(batches)} batches"):
            loss(model, each)[0].backward()  # type: ignore[no-untyped-call]  # torch's
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            with clock.counted(f"eager forward of eval, {len(batches)} batches"):
                loss(model, each)
            with clock.counted(f"eager forward of predict, {len(batches)} batches"):
                predict(model, {name: each[name] for name in inputs})
    return {
        "cpu": clock.cpu,
        "wall": clock.wall,
        "memory": memory.read(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def whole(layers: int, hidden: int, keep: Path | None) -> dict[str, Any]:
    """Measure a freeze by stage."""
    from trainload.capture.tracing import trace
    from trainload.freezing import freeze as freezing
    from trainload.freezing import prove as proving

    job = job_for(llama(layers, hidden))
    warm_up()
    clock, rest = Clock(), Clock()
    clock.wrapped(trace, "export_graph", lambda target, *_: f"capture {target.name}")
    clock.wrapped(trace, "check_parity", lambda captured, *_: f"replay {captured.name}")
    clock.wrapped(
        proving, "capture_optimizer", lambda *_: "capture and check the optimizer's updates"
    )
    clock.wrapped(proving, "derive", lambda _, graph, __: f"derive {graph}")
    clock.wrapped(proving, "check_step", lambda *_: "check the joint graph")
    clock.wrapped(freezing, "write_package", lambda *_, **__: "write the package")
    clock.wrapped(proving, "write_derived", lambda *_: "write the derived graph")
    memory = PeakMemory()
    memory.reset()
    with tempfile.TemporaryDirectory(
        prefix="trainload-freeze-", dir=keep.parent if keep is not None else None
    ) as folder:
        path = Path(folder) / "package.tl"
        with rest.counted("everything"):
            freezing.freeze(job, path)
        peak = memory.read()
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if keep is not None:
            path.rename(keep)
    other = {
        kind: sum(vars(rest)[kind].values()) - sum(vars(clock)[kind].values())
        for kind in ("cpu", "wall")
    }
    return {
        "cpu": clock.cpu | {"other": other["cpu"]},
        "wall": clock.wall | {"other": other["wall"]},
        "memory": peak,
        "bytes": size,
    }


def package(path: Path) -> dict[str, Any]:
    """Measure the operations on a package before a run."""
    from trainload.autograd_trace.derivation.aot import derive
    from trainload.packaging.derived import read_derived
    from trainload.packaging.signatures.verify import verify_package
    from trainload.sharding.plans.device_step_graphs import derived_key

    cpu = torch.device("cpu")
    warm_up()
    clock = Clock()
    with clock.counted("trainload.open"):
        opened = trainload.open(path)
    with clock.counted("verify"):
        assert verify_package(path).ok
    with clock.counted("plan, ZeRO-3 on 8 workers"):
        trainload.plan(
            opened,
            trainload.Cluster(nodes=2, devices_per_node=4, device="cpu"),
            "zero3",
            global_batch=16,
        )
    with clock.counted("load the captured graphs"):
        program = opened.program()
    for graph in ("train", "eval", "predict"):
        with clock.counted(f"derive {graph}"):
            derive(program, graph, cpu)
    with clock.counted("read the derived graph of train"):
        assert read_derived(opened, derived_key("train", cpu)) is not None
    return {"cpu": clock.cpu, "wall": clock.wall}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["whole", "parts", "package"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--package", type=Path, help="package that `package` opens and that `whole` writes"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.what == "whole":
        found = whole(arguments.layers, arguments.hidden, arguments.package)
    elif arguments.what == "parts":
        found = parts(arguments.layers, arguments.hidden)
    else:
        found = package(arguments.package)
    arguments.out.write_text(json.dumps({**found, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
