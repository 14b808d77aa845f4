"""A process in which a GPU is described, and the facts that it finds.

    python -m tests.gpu_compile.child compile PACKAGE PLAN OUT
    python -m tests.gpu_compile.child load PACKAGE PLAN OUT
    python -m tests.gpu_compile.child dry PACKAGE PLAN OUT
    python -m tests.gpu_compile.child recorded PACKAGE PLAN OUT

`compile` derives, shards and compiles the graphs of rank 0 into the folder OUT, `load` loads them
in an empty cache, `dry` makes a rank's steps with them, with kernels that do nothing, and
`recorded` does so with CUDA graphs. Each writes what it found to OUT/VERB.json.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.collective_order import order_of_code, order_of_graph
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import trainload
from trainload.autograd_trace.compiling import inductor
from trainload.autograd_trace.compiling.cuda_graphs import Pool, Recorded
from trainload.autograd_trace.compiling.described_device import computing_nothing
from trainload.autograd_trace.derivation.named_groups import alone_of, bind_groups, unbind_groups
from trainload.autograd_trace.graphs import TANGENT
from trainload.autograd_trace.recompute.host_copies import OFFLOAD, OFFLOADED, RELOAD
from trainload.capture.job.synthesise import rows_of, synthesise
from trainload.core.errors import CompileError
from trainload.launching.described.described_gpu import COUNTED
from trainload.launching.node.build import compile_build, load_build, uncompiled_graphs
from trainload.launching.node.build_key import device_of
from trainload.launching.node.determinism import deterministic
from trainload.launching.worker.calls import Microbatch
from trainload.launching.worker.engine import Draw, Engine
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_STAGES = ("make_ttir", "make_ttgir", "make_llir", "make_ptx", "make_cubin")
_WIDE = r"tl\.program_id\(0\)\.to\(tl\.int64\)"
"""Beginning of a kernel that indexes in 64 bits."""
_DEFINITION = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
_NAME = 150
"""Number of characters of a kernel's name in the name of its file."""
_STEPS = 4
"""The first step creates state and tunes kernels, the third records CUDA graphs; the last one is
counted.
"""


def compile_(package: Package, plan: Plan, out: Path) -> dict[str, Any]:
    """Compile, and return facts about graphs, kernels and code."""
    seconds: dict[str, float] = {}
    device = device_of(plan)
    with deterministic():
        on_gpu = uncompiled_graphs(package, plan, device)
        cpu = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"device": "cpu"})})
        on_cpu = uncompiled_graphs(package, cpu, torch.device("cpu"))
    cache = out / "cache"
    cache.mkdir(mode=0o700)
    written: dict[str, list[str]] = {}
    planned: dict[str, list[str]] = {}
    together: dict[str, bool] = {}
    preparing, compiling = inductor.prepare_graph, inductor._compile
    flat: list[list[str]] = []

    def prepared(module: GraphModule) -> None:
        preparing(module)
        flat.append(order_of_graph(module))

    def noted(module: GraphModule, path: Path, *rest: Any) -> tuple[str, ...]:
        planned[path.stem] = order_of_graph(module)
        together[path.stem] = planned[path.stem] != flat[-1]
        before = set(_codes())
        done = compiling(module, path, *rest)
        written[path.stem] = [file.read_text() for file in _codes() if file not in before]
        return done

    with computing_nothing(), mock.patch.multiple(inductor, prepare_graph=prepared, _compile=noted):
        folder = compile_build(
            package, plan, device, cache, lambda stage, spent: seconds.update({stage: spent})
        )
    index = json.loads((folder / "index.json").read_bytes())
    kernels = sorted(cache.rglob("*.cubin"))
    return {
        "folder": str(folder),
        "seconds": seconds,
        "failed": index["failed"],
        "regions": {name: len(each["regions"]) for name, each in index["compiled"].items()},
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "elsewhere": [text for name in on_gpu for text in _off_the_gpu(name, on_gpu[name])],
        "products": {name: _products(module) for name, module in on_gpu.items()},
        "forward_products": {
            name: _forward(module) for name, module in on_gpu.items() if _forward(module)
        },
        "products_on_cpu": {name: _products(module) for name, module in on_cpu.items()},
        "attention": {name: _attention(module) for name, module in on_gpu.items()},
        "architectures": dict(Counter(map(_architecture, kernels))),
        "kernels": len(kernels),
        "configurations_of_reductions": _configurations(
            kernels, [code for codes in written.values() for code in codes]
        ),
        "planned": planned,
        "together": together,
        "written": {
            name: order_of_code(_with_waits(codes))
            for name, codes in written.items()
            if planned[name]
        },
        "wide": {name: _number(_WIDE, codes) for name, codes in written.items()},
    }


def _with_waits(codes: Sequence[str]) -> str:
    """Return the code that waits for collectives or copies, among those written for a graph."""
    (code,) = [each for each in codes if re.search(r"wait_tensor\.|trainload\.reloaded\.", each)]
    return code


def _number(pattern: str, codes: Sequence[str]) -> int:
    return sum(len(re.findall(pattern, code)) for code in codes)


def _codes() -> Iterator[Path]:
    """Yield the files with the code that Inductor has written."""
    for file in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).glob("??/*.py"):
        if "def call(" in file.read_text():
            yield file


def _values(module: GraphModule) -> Iterator[tuple[Any, Tensor]]:
    for node in module.graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, Tensor):
                yield node, each


def _off_the_gpu(name: str, module: GraphModule) -> list[str]:
    return [
        f"{name}: {n.name} on {v.device}"
        for n, v in _values(module)
        if v.device.type != "cuda" and n.target not in (OFFLOAD, OFFLOADED, RELOAD)
    ]


def _products(module: GraphModule) -> dict[str, int]:
    """Return the number of matrix products by the dtype of their results."""
    found: Counter[str] = Counter()
    for node, value in _values(module):
        if getattr(node.target, "__name__", "").split(".")[0] in _PRODUCTS:
            found[str(value.dtype)] += 1
    return dict(found)


def _forward(module: GraphModule) -> int:
    """Return the number of matrix products before backward; 0 if there is no backward."""
    nodes = list(module.graph.nodes)
    begin = next((index for index, node in enumerate(nodes) if node.name == TANGENT), 0)
    return sum(
        getattr(node.target, "__name__", "").split(".")[0] in _PRODUCTS for node in nodes[:begin]
    )


def _attention(module: GraphModule) -> dict[str, int]:
    found = Counter(
        str(node.target).removeprefix("aten.")
        for node in module.graph.nodes
        if "scaled_dot_product" in str(node.target)
    )
    return dict(found)


def _architecture(cubin: Path) -> str:
    """Return the architecture in the ELF flags of a kernel, such as "sm_90"."""
    flags = int.from_bytes(cubin.read_bytes()[48:52], "little")
    return f"sm_{flags & 0xFF}"


def _configurations(kernels: Sequence[Path], codes: Sequence[str]) -> dict[str, int]:
    """Return the names of reductions of which there are more kernels than definitions: they were
    compiled in several configurations.
    """
    compiled = Counter(file.stem[:_NAME] for file in kernels)
    definitions = {found.groups() for code in codes for found in _DEFINITION.finditer(code)}
    defined = Counter(str(name)[:_NAME] for name, _ in definitions)
    return {
        name: number
        for name, number in compiled.items()
        if number > max(defined[name], 1) and name.startswith(("triton_red", "triton_per"))
    }


def load(package: Package, plan: Plan, out: Path) -> dict[str, Any]:
    """Load the compiled graphs in an empty cache, and return what was compiled then."""
    folder = Path(json.loads((out / "compile.json").read_bytes())["folder"])
    compiled = _counted_stages()
    with tempfile.TemporaryDirectory() as fresh:
        began = time.perf_counter()
        with deterministic():
            load_build(folder, package, plan, Path(fresh))
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "compiled": dict(compiled)}


def _counted_stages() -> Counter[str]:
    """Count the calls of the stages of Triton's compiler from now on."""
    backend: Any = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    calls: Counter[str] = Counter()

    def counting(stage: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[stage] += 1
            return original(*args, **options)

        return call

    for stage in _STAGES:
        counted = counting(stage, getattr(backend, stage))
        is_static = isinstance(vars(backend)[stage], staticmethod)
        setattr(backend, stage, staticmethod(counted) if is_static else counted)
    return calls


class _WithoutLibraries(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which cuBLAS and cuDNN are not called: their results are allocated.

    Attributes:
        allocated: bytes that were allocated at the beginning of each matrix product.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in _PRODUCTS and "out" in kwargs:
            self.allocated.append(torch.cuda.memory_allocated())
            return kwargs["out"]
        if name in ("index_put_", "_index_put_impl_"):
            return args[0]
        if "scaled_dot_product" in name:
            moved = [each.to("meta") if isinstance(each, Tensor) else each for each in args]
            options = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in kwargs.items()}
            return tuple(
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
                if isinstance(each, Tensor)
                else each
                for each in func(*moved, **options)
            )
        return func(*args, **kwargs)


def _ones_read(tensor: Tensor) -> list[float]:
    """Read a tensor, and return ones: without kernels its values are whatever its memory holds, and
    the engine divides by the weight of a step.
    """
    return [1.0] * tensor.cpu().numel()


def dry(
    package: Package, plan: Plan, out: Path, *, with_cuda_graphs: bool = False
) -> dict[str, Any]:
    """Make a rank's steps, and return what the last one has asked of the GPU."""
    folder = Path(json.loads((out / "compile.json").read_bytes())["folder"])
    library = ctypes.CDLL("libcuda.so.1")
    counts = (ctypes.c_long * len(COUNTED)).in_dll(library, "described_gpu_counts")
    capture = package.captured("train")
    batch = synthesise(capture, 0, plan.rows_per_call - rows_of(capture))
    has_peers = plan.world_size > 1
    found: dict[str, Any] = {}
    with deterministic(), alone_of(0, plan.world_size) if has_peers else nullcontext():
        built = load_build(folder, package, plan, out / "cache")
        if with_cuda_graphs:
            built = built.recorded()
        if has_peers:
            bind_groups(plan.groups())
        engine = Engine(package, plan, 0, device_of(plan), built)
        engine.held.load_package()
        draw = Draw([Microbatch(batch, 0)] * plan.accumulate)
        libraries = _WithoutLibraries()
        with mock.patch.object(torch.Tensor, "tolist", _ones_read), libraries:
            for number in range(_STEPS):
                torch.cuda.reset_peak_memory_stats()
                libraries.allocated.clear()
                held_before = torch.cuda.memory_allocated()
                before, began = list(counts), time.perf_counter()
                engine.step(number, [draw])
                found["peak_bytes"] = torch.cuda.max_memory_allocated()
                found["step"] = {
                    name: after - earlier
                    for name, after, earlier in zip(COUNTED, counts, before, strict=True)
                }
                found["host_seconds"] = time.perf_counter() - began
        if libraries.allocated:  # a replay of a CUDA graph calls no library
            found["kept_bytes"] = libraries.allocated[_forward_products(out)] - held_before
        if has_peers:
            unbind_groups(plan.groups())
    if with_cuda_graphs:
        found["refused"] = _refusal()
    return found


def _forward_products(out: Path) -> int:
    """Return the number of matrix products of forward in the graph that a step calls first."""
    forward: dict[str, int] = json.loads((out / "compile.json").read_bytes())["forward_products"]
    return next(number for name, number in forward.items() if name.startswith("train."))


def _refusal() -> str:
    """Return the error of a CUDA graph whose operator waits for the GPU; empty if there is none."""
    recorded = Recorded("graph", lambda value: [value * (value * 2)[0].item()], [True], Pool())
    try:
        for _ in range(_STEPS):
            recorded(torch.ones(8, device="cuda"))
    except CompileError as error:
        return str(error)
    return ""


def main() -> None:
    """Do what the command line says."""
    verb, package, plan, out = sys.argv[1], *map(Path, sys.argv[2:])
    functions: dict[str, Callable[..., dict[str, Any]]] = {
        "compile": compile_,
        "load": load,
        "dry": dry,
        "recorded": partial(dry, with_cuda_graphs=True),
    }
    read = Plan.model_validate_json(plan.read_bytes())
    found = functions[verb](trainload.open(package), read, out)
    (out / f"{verb}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
