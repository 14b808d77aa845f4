"""One measured process of the GPU benchmark: trains a package, or the same model from its source.

Started by gpu.py; writes its result as JSON.
"""

from __future__ import annotations

import time

from measure import PeakMemory, note, save, see_example

see_example()

import argparse  # noqa: E402
import collections  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from gpu_jobs import CASES, STEPS, Case, schedule  # noqa: E402
from text import byte_windows, word_windows  # noqa: E402
from torch import Tensor, nn  # noqa: E402

SETTLED = 10
"""Number of steps that are not timed."""
MATMULS = ("mm", "addmm", "bmm", "baddbmm")
CEILING_SIZE = 8192


def batches(case: Case, device: torch.device) -> list[Tensor]:
    """Return the run's batches on the device, each (rows, context + 1)."""
    length = case.config.context + 1
    if case.config.vocabulary <= 256:
        tokens = torch.from_numpy(byte_windows(case.rows * STEPS, length))
    else:
        tokens = torch.from_numpy(word_windows(case.rows * STEPS, length, case.config.vocabulary))
    return list(tokens.view(STEPS, case.rows, length).to(device))


def train(
    step: Callable[[int, Tensor], float], tokens: list[Tensor], device: torch.device, began: float
) -> dict[str, Any]:
    """Run all steps; `began` is the time.time() at which the process was started."""
    memory = PeakMemory()
    losses, seconds = [], []
    for number, batch in enumerate(tokens):
        if number == SETTLED:
            _reset_peak(memory, device)
        started = time.perf_counter()
        # reads the loss, and thereby synchronizes with the device
        losses.append(step(number, batch))
        _wait(device)
        seconds.append(time.perf_counter() - started)
        if number == 0:
            first = time.time() - began
            note(f"  first step after {first:.1f} s")
    peak = (
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory.read()["peak"]
    )
    return {
        "first_step_seconds": first,
        "losses": losses,
        "step_seconds": seconds,
        "settled": SETTLED,
        "peak_bytes": peak,
    }


def _reset_peak(memory: PeakMemory, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        memory.reset()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ours(
    case: Case, folder: Path, cache: Path, device: torch.device, began: float
) -> dict[str, Any]:
    """Train the package with trainload's engine, without Ray."""
    from trainload.launching.node.build import compile_build, load_build
    from trainload.launching.node.determinism import deterministic
    from trainload.launching.node.graph_comparison import Comparison
    from trainload.launching.verification.verify_build import Verifier
    from trainload.launching.worker.calls import Microbatch
    from trainload.launching.worker.engine import Draw, Engine
    from trainload.packaging.package import open_package
    from trainload.sharding.plans.plan import Plan

    stages: dict[str, float] = {}
    package = open_package(folder / "package.tl")
    plan = Plan.model_validate_json((folder / "single.json").read_bytes())

    def on_stage(stage: str, seconds: float) -> None:
        stages[stage] = seconds
        note(f"  {stage}: {seconds:.1f} s")

    interpreted: list[Comparison] = []
    with deterministic():  # as in every worker
        build = compile_build(package, plan, device, cache, on_stage)
        verifier = Verifier(package, plan, 0, device, build, None, tell=interpreted.append)
        engine = Engine(
            package, plan, 0, device, verifier.verified(load_build(build, package, plan, cache))
        )
        engine.held.load_package()

        def step(number: int, tokens: Tensor) -> float:
            return engine.step(number, [Draw([Microbatch({"tokens": tokens}, 0)])]).loss

        found = train(step, batches(case, device), device, began)
        return found | {
            "stages": stages,
            "compare_seconds": verifier.taken(),
            "interpreted": [str(each) for each in interpreted],
        }


def peer(
    case: Case, folder: Path, compiled: bool, device: torch.device, began: float
) -> dict[str, Any]:
    """Train the source's model with the package's weights and fused AdamW.

    Eagerly, or with torch.compile.
    """
    from safetensors.torch import load_file

    model = case.build().to(device)
    files = sorted((folder / "package.tl" / "weights").glob("*.safetensors"))
    weights = {name: value for file in files for name, value in load_file(file).items()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    if unknown or set(missing) - {"head.weight"}:  # tied to the embedding
        raise ValueError(
            f"the package's weights are not this model's: {missing} are missing, {unknown} are"
            " unknown"
        )

    def forward(tokens: Tensor) -> Tensor:
        return case.loss(model, {"tokens": tokens})

    call = torch.compile(forward) if compiled else forward
    optimizer = case.optimizer(model, fused=True)
    parameters = list(model.parameters())

    def step(number: int, tokens: Tensor) -> float:
        loss = call(tokens)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = case.rate * schedule(number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    count = sum(parameter.numel() for parameter in parameters)
    found = train(step, batches(case, device), device, began)
    return found | {"parameters": count, "flops_per_token": case.flops_per_token(count)}


def inspect(folder: Path, device: torch.device) -> dict[str, Any]:
    """Derive the step graph, and count its matrix products by dtype and its misplaced tensors."""
    from trainload.autograd_trace.derivation.aot import derive
    from trainload.packaging.package import open_package

    began = time.perf_counter()
    step = derive(open_package(folder / "package.tl").program(), "train", device)
    seconds = time.perf_counter() - began
    products: collections.Counter[str] = collections.Counter()
    attention: collections.Counter[str] = collections.Counter()
    elsewhere = 0
    nodes = [node for node in step.module.graph.nodes if node.op == "call_function"]
    for node in nodes:
        value = node.meta.get("val")
        first = value[0] if isinstance(value, tuple | list) else value
        if not isinstance(first, Tensor):
            continue
        dtype = str(first.dtype).removeprefix("torch.")
        name = str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""
        if name in MATMULS:
            products[dtype] += 1
        elif "scaled_dot_product" in name:
            attention[f"{name} {dtype}"] += 1
        elsewhere += first.device.type != device.type and first.ndim > 0
    return {
        "derive_seconds": seconds,
        "nodes": len(nodes),
        "matmuls": dict(products),
        "attention": dict(attention),
        "tensors_on_another_device": elsewhere,
    }


def ceiling(device: torch.device) -> dict[str, float]:
    """Return the FLOP/s of one large bfloat16 matrix product on random data.

    That is the achievable peak of the device, to be compared with its data sheet.
    """
    left, right = (
        torch.randn(CEILING_SIZE, CEILING_SIZE, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    for _ in range(3):
        left @ right
    _wait(device)
    began = time.perf_counter()
    for _ in range(10):
        left @ right
    _wait(device)
    return {"matmul_flops_per_second": 10 * 2 * CEILING_SIZE**3 / (time.perf_counter() - began)}


def main() -> None:
    """Run the command line that gpu.py calls."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["trainload", "eager", "compiled", "inspect", "ceiling"])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder with the package and its plan"
    )
    parser.add_argument(
        "--cache", type=Path, required=True, help="cache folder for compiled graphs"
    )
    parser.add_argument(
        "--began",
        type=float,
        required=True,
        help="start time of this process, in seconds since 1970",
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    case = CASES[arguments.case]
    found: dict[str, Any]
    match arguments.what:
        case "trainload":
            found = ours(case, arguments.folder, arguments.cache, device, arguments.began)
        case "inspect":
            found = inspect(arguments.folder, device)
        case "ceiling":
            found = ceiling(device)
        case which:
            found = peer(case, arguments.folder, which == "compiled", device, arguments.began)
    save(found, arguments.out)


if __name__ == "__main__":
    main()
