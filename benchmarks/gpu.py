"""Measure the GPU training of a package that was frozen without a GPU.

Checks correctness, speed and startup time. Does not need Ray.

    python benchmarks/gpu.py --out gpu.json

Freezes the demo's GPT and a GPT-2 of 124M parameters in a process that sees no GPU. Then, each time
in a new process: derives the joint graph for the GPU, compiles it and trains 50 steps, with an
empty and with a full cache; trains the same model from its source, eagerly and with torch.compile
and fused AdamW, from the same weights on the same data; derives the graph again and counts its
bfloat16 matrix products. Dropout is 0 throughout. Without a GPU it does the same on the CPU with a
tiny model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import MIB, RESULTS, ROOT, machine, median, note, save, screen, table
from prepare import prepare
from rich.console import Console

HERE = Path(__file__).resolve().parent
SIZES = {"full": ("demo", "gpt2"), "tiny": ("tiny",)}
CHILD_SECONDS = 300.0
DATA_SHEET = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "L4": 121e12}
"""Dense bfloat16 FLOP/s from NVIDIA's data sheets, of the SXM variants where there are several."""
RUNS = (
    ("trainload cold", "trainload", "trainload"),
    ("trainload warm", "trainload", "trainload"),
    ("eager", "eager", "none"),
    ("torch.compile cold", "compiled", "peer"),
    ("torch.compile warm", "compiled", "peer"),
)
"""(name of the run, task of the child process, owner of the cache)."""
NAMES = tuple(name for name, _, _ in RUNS)


def child(what: str, case: str, folder: Path, cache: Path) -> dict[str, Any]:
    """Run a child process to its end. The result has an `error` entry if it fails."""
    out = folder / "child.json"
    out.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    arguments = (
        "--case",
        case,
        "--folder",
        str(folder),
        "--cache",
        str(cache),
        "--began",
        repr(time.time()),
        "--out",
        str(out),
    )
    command = [sys.executable, str(HERE / "gpu_child.py"), what, *arguments]
    try:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, timeout=CHILD_SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        return {"error": f"it took longer than {CHILD_SECONDS:.0f} s"}
    if status != 0:
        return {"error": f"it ended with status {status}"}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def run_case(case: str, device: str, chosen: Sequence[str], scratch: Path) -> dict[str, Any]:
    """Run the chosen runs of one shape, each in a process of its own."""
    folder = scratch / case
    note(f"{case}: freezing on the CPU")
    began = time.perf_counter()
    prepare(f"{HERE / 'gpu_jobs.py'}:{case}", folder, "single", 1, device=device)
    result: dict[str, Any] = {"freeze_seconds": time.perf_counter() - began, "runs": {}}
    for name, what, owner in (run for run in RUNS if run[0] in chosen):
        note(f"{case}: {name}")
        cache = folder / f"cache-{owner}"
        cache.mkdir(mode=0o700, exist_ok=True)
        result["runs"][name] = child(what, case, folder, cache)
    note(f"{case}: counting")
    result["graph"] = child("inspect", case, folder, folder / "cache-none")
    return result


def summarise(
    result: dict[str, Any], rows_and_context: tuple[int, int], flops: float | None
) -> None:
    """Add derived values to a case's result: tokens/s, MFU, loss differences."""
    tokens = rows_and_context[0] * rows_and_context[1]
    runs = result["runs"]
    per_token = next(
        (run["flops_per_token"] for run in runs.values() if "flops_per_token" in run), None
    )
    for run in runs.values():
        if "step_seconds" in run:
            run["tokens_per_second"] = tokens / median(run["step_seconds"][run["settled"] :])
            run["mfu"] = (
                None
                if flops is None or per_token is None
                else run["tokens_per_second"] * per_token / flops
            )
    eager = runs.get("eager", {}).get("losses")
    if eager is not None:
        result["loss_difference"] = {
            name: max(abs(a - b) / abs(b) for a, b in zip(run["losses"], eager, strict=True))
            for name, run in runs.items()
            if "losses" in run
        }


def show(case: str, result: dict[str, Any], console: Console) -> None:
    """Print one case."""
    rows = []
    for name, run in result["runs"].items():
        if "error" in run:
            rows.append((name, run["error"], *[""] * 6))
            continue
        rows.append(
            (
                name,
                f"{run['first_step_seconds']:.1f}",
                f"{1000 * median(run['step_seconds'][run['settled'] :]):.2f}",
                f"{run['tokens_per_second']:,.0f}",
                "-" if run["mfu"] is None else f"{100 * run['mfu']:.1f} %",
                f"{run['peak_bytes'] / MIB:,.0f}",
                f"{run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}",
                f"{result['loss_difference'][name]:.1e}" if "loss_difference" in result else "-",
            )
        )
    columns = ("", "first step s", "step ms", "tokens/s", "MFU", "peak MiB", "loss", "from eager")
    console.print(
        table(
            f"{case}: frozen in {result['freeze_seconds']:.0f} s",
            columns,
            rows,
            marked=["trainload cold", "trainload warm"],
        )
    )
    graph = result["graph"]
    if "error" in graph:
        console.print(f"the step graph: {graph['error']}")
        return
    products = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(graph["matmuls"].items()))
    console.print(
        f"step graph: {graph['nodes']} nodes, derived in {graph['derive_seconds']:.1f} s",
        highlight=False,
    )
    console.print(f"matrix products: {products}", highlight=False)
    console.print(f"attention: {', '.join(graph['attention']) or 'none'}", highlight=False)
    console.print(
        f"tensors left on another device: {graph['tensors_on_another_device']}", highlight=False
    )


def device_facts() -> dict[str, Any]:
    """Return kind, name and memory of the device.

    A child process reads them, so that this process never initializes the device.
    """
    code = (
        "import json, torch; there = torch.cuda.is_available();properties ="
        " torch.cuda.get_device_properties(0) if there else None;print(json.dumps({'kind': 'cuda'"
        " if there else 'cpu', 'name': properties.name if there else None,'memory':"
        " properties.total_memory if there else None}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def failures(result: dict[str, Any]) -> list[str]:
    """Return the failures of a case, one line each."""
    found = [
        f"{name}: {run['error']}"
        for name, run in (*result["runs"].items(), ("graph", result["graph"]))
        if "error" in run
    ]
    found += [
        f"{name}: {said}"
        for name, run in result["runs"].items()
        for said in run.get("interpreted", ())
    ]
    if "error" not in result["graph"]:
        if not result["graph"]["matmuls"].get("bfloat16"):
            found.append("graph: no bfloat16 matrix product, so autocast was lost")
        if result["graph"]["tensors_on_another_device"]:
            found.append("graph: tensors are left on the device of the capture")
    return found


def shape_of(case: str) -> tuple[int, int]:
    """Return (rows, context) of a case, without importing torch into this process."""
    code = (
        f"import gpu_jobs; case = gpu_jobs.CASES[{case!r}]; print(case.rows, case.config.context)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True
    )
    rows, context = done.stdout.split()
    return int(rows), int(context)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a process failed or autocast was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, help="default: full with a GPU, otherwise tiny")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument(
        "--scratch",
        type=Path,
        help="folder to keep packages and caches in; default: a temporary folder",
    )
    parser.add_argument(
        "--only", default=",".join(NAMES), help="comma-separated runs; default: %(default)s"
    )
    parser.add_argument("--case", action="append", help="run only this shape; may be repeated")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"no such run: {', '.join(sorted(unknown))}")
    began = time.perf_counter()
    device = device_facts()
    size = options.size or ("full" if device["kind"] == "cuda" else "tiny")
    console = screen()
    result: dict[str, Any] = {"machine": machine(), "device": device, "size": size, "cases": {}}
    broken: list[str] = []
    with contextlib.ExitStack() as stack:
        scratch = options.scratch or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="trainload-gpu-"))
        )
        os.environ.setdefault("TRAINLOAD_STATE_DIR", str(scratch / "state"))
        sheet = next(
            (
                value
                for key, value in DATA_SHEET.items()
                if device["name"] and key in device["name"]
            ),
            None,
        )
        result["device"]["data_sheet_flops_per_second"] = sheet
        for case in options.case or SIZES[size]:
            found = run_case(case, device["kind"], chosen, scratch)
            summarise(found, shape_of(case), sheet)
            result["cases"][case] = found
            show(case, found, console)
            broken += [f"{case}: {line}" for line in failures(found)]
            # after each case, so that an interrupted run keeps its results
            save(result, options.out)
        if device["kind"] == "cuda":
            result["device"] |= child(
                "ceiling", case, scratch / case, scratch / case / "cache-none"
            )
    result["seconds"] = time.perf_counter() - began
    result["failures"] = broken
    save(result, options.out)
    note(f"written: {options.out}")
    for line in broken:
        console.print(line, style="red", markup=False)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
