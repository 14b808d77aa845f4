"""The jobs that are compiled for a described GPU, and their plans.

    python -m tests.gpu_compile.jobs CASE FOLDER

freezes the job of a case as FOLDER/package.tl, and writes each of its plans as FOLDER/PLAN.json.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import trainload
from trainload.packaging.package import Package

ROOT = Path(__file__).resolve().parents[2]
NODES, DEVICES = 2, 8


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """A plan for 2 nodes of 8 GPUs, or fewer.

    Attributes:
        strategy: strategy of the plan.
        nodes: number of nodes.
        devices: number of GPUs of each.
        options: other arguments of `trainload.plan`.
        wide: True if some tensors of a call have more than 2**31 elements.
    """

    strategy: str
    nodes: int = NODES
    devices: int = DEVICES
    options: dict[str, Any] = field(default_factory=dict)
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A job.

    Attributes:
        folder: folder, in the repository, of the module that has it.
        module: name of the module.
        function: function that returns the job, or freezes it to a path.
        plans: its plans, by their names.
        runs: True if a rank's steps are also made, with kernels that do nothing.
    """

    folder: str
    module: str
    function: str
    plans: dict[str, PlanOptions]
    runs: bool


CASES = {
    "demo": Case(
        "examples/gpt",
        "job",
        "job",
        {
            "single": PlanOptions("single", 1, 1),
            "zero3x16": PlanOptions("zero3"),
            "tensor2-zero3": PlanOptions("zero3", 1, 4, {"tensor_ranks": 2}),
            "pipeline2": PlanOptions("zero1", 1, 2, {"pipeline_ranks": 2, "accumulate": 4}),
            "accumulate4": PlanOptions("zero1", 1, 2, {"accumulate": 4}),
            "offload": PlanOptions("single", 1, 1, {"offload": 1.0}),
        },
        runs=True,
    ),
    "gpt2": Case(
        "benchmarks",
        "gpu_jobs",
        "gpt2",
        {
            "zero3x16": PlanOptions("zero3"),
            "single": PlanOptions("single", 1, 1),
            "loss-in-chunks": PlanOptions("single", 1, 1, {"loss_chunks": 8}),
            "offload": PlanOptions("single", 1, 1, {"loss_chunks": 8, "offload": 1.0}),
            "half-offload": PlanOptions("single", 1, 1, {"loss_chunks": 8, "offload": 0.5}),
        },
        runs=True,
    ),
    "gpt2-64-rows": Case(
        "benchmarks",
        "gpu_jobs",
        "gpt2_large_batch",
        {"single": PlanOptions("single", 1, 1, wide=True)},
        runs=False,
    ),
    "llama": Case(
        "benchmarks",
        "llama8b",
        "freeze_four_layers",
        {"zero3x16": PlanOptions("zero3")},
        runs=False,
    ),
}


_NARROW = (torch.bfloat16, torch.float16)


def _empty_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return memory for a product, in float32 if the operands have fewer bits."""
    dtype = torch.float32 if left.dtype in _NARROW else left.dtype
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


def _product_in_float32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = _empty_product(left, right)
    return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out).to(left.dtype)


def _sum_in_float32(
    term: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    out = _empty_product(left, right)
    operands = (each.to(out.dtype) for each in (term, left, right))
    return torch.addmm(*operands, beta=beta, alpha=alpha, out=out).to(left.dtype)


def products_in_float32() -> Any:
    """Compute products of bfloat16 and float16 in float32 as long as the result exists.

    A freeze makes steps, and a CPU without instructions for these types takes hours for GPT-2's.
    Only the kernels differ, not the graphs.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden
        library.impl("mm", _product_in_float32, "CPU")
        library.impl("addmm", _sum_in_float32, "CPU")
    return library


def main() -> None:
    """Freeze the job of a case, and plan it."""
    name, out = sys.argv[1], Path(sys.argv[2])
    case = CASES[name]
    sys.path.insert(0, str(ROOT / case.folder))
    made = getattr(importlib.import_module(case.module), case.function)
    package: Package = (
        made(out / "package.tl")
        if case.function.startswith("freeze")
        else trainload.freeze(made(), out / "package.tl")
    )
    for plan, wanted in case.plans.items():
        cluster = trainload.Cluster(
            nodes=wanted.nodes, devices_per_node=wanted.devices, device="cuda"
        )
        chosen: Any = wanted.strategy
        planned = trainload.plan(package, cluster, chosen, **wanted.options)
        (out / f"{plan}.json").write_text(planned.model_dump_json())


if __name__ == "__main__":
    torch.manual_seed(0)
    kept = products_in_float32()
    main()
