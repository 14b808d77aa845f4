"""Compile graphs with Inductor, and load the compiled artifacts.

Tested with torch 2.13.0. Private names used: `torch._inductor.standalone_compile`,
`torch._inductor.aot_compile`, `torch._inductor.package`, `torch._inductor.config`,
`torch._inductor.scheduler`, `torch._inductor.cpp_builder`, `torch.utils._pytree`,
`Graph._codegen`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch._inductor
import torch._inductor.cpp_builder
import torch._inductor.exc
import torch._inductor.package.package
from torch import Tensor
from torch._inductor.standalone_compile import CompiledArtifact
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.utils._pytree import tree_structure

from trainload.autograd_trace.compiling.call_sizes import sized_for
from trainload.autograd_trace.compiling.compiler_answers import remembered_answers
from trainload.autograd_trace.compiling.described_device import compiler_options
from trainload.autograd_trace.compiling.faster_inductor import (
    dtype_rules_made_once,
    duplicates_removed,
    kernels_started_early,
    results_kept_in_passes,
    shapes_of_first_call,
)
from trainload.autograd_trace.compiling.indices import forbid_negative_indices
from trainload.autograd_trace.compiling.kernels import (
    KERNELS,
    keep_kernels,
    kernels_from,
    kernels_noted,
)
from trainload.autograd_trace.compiling.operands import keep_operands_apart
from trainload.autograd_trace.derivation.aot import whole_triton_operators
from trainload.autograd_trace.derivation.named_groups import stand_ins
from trainload.autograd_trace.graphs import CHUNK
from trainload.autograd_trace.outlining.equality import CALL
from trainload.autograd_trace.outlining.outline import NotOutlined, OutlinedRegion, outline
from trainload.autograd_trace.outlining.scalars import stack_scalars
from trainload.autograd_trace.recompute.hold import hold_back
from trainload.capture.source.patched import replaced
from trainload.core.errors import raised

_log = logging.getLogger(__name__)


class NotCompiled(Exception):
    """Inductor cannot compile a graph. The message is the first line of Inductor's error."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of compiling a graph.

    Attributes:
        regions: layers that were compiled once and are called several times.
        flat_because: the reason why the graph was compiled without regions although it may have
            repeated layers; None if there is none.
        kernels: files of its CPU kernels, in the folder `KERNELS` beside the artifact.
    """

    regions: tuple[OutlinedRegion, ...] = ()
    flat_because: str | None = None
    kernels: tuple[str, ...] = ()


def compile_graph(
    module: GraphModule,
    path: Path,
    groups: Mapping[str, int],
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Compiled:
    """Compile a flat graph with Inductor and save the artifact as one file.

    Repeated layers are compiled once (`outline`). If that fails, all of the graph is compiled flat.

    Every node needs `meta["val"]`. The artifact's kernels for CPUs are kept in the folder `KERNELS`
    beside it. Both contain native code and pickles: never load them from an untrusted source.

    Args:
        module: the graph; changed in place.
        path: path of the artifact.
        groups: logical name -> size of the process groups that the graph's collectives use. They
            need not exist yet.
        sizes: symbolic size -> its value in the largest call, which kernels for GPUs must allow.

    Raises:
        NotCompiled: Inductor or the C++ compiler fails.
    """
    prepare_graph(module)
    try:
        outlined = outline(module)
        if outlined.regions:
            kernels = _compile(outlined.module, path, groups, sizes)
            return Compiled(outlined.regions, kernels=kernels)
        because = None
    except NotOutlined as reason:
        because = str(reason)
    except NotCompiled as error:
        because = f"Inductor cannot compile its regions: {error}"
    except (AssertionError, LookupError, TypeError, ValueError, RuntimeError) as error:
        # a mistake of ours, which must not keep anyone from training
        _log.warning("a graph's layers could not be outlined", exc_info=True)
        because = f"outlining failed: {raised(error)}"
    return Compiled(flat_because=because, kernels=_compile(module, path, groups, sizes))


def prepare_graph(module: GraphModule) -> None:
    """Rewrite a flat graph, in place, for what Inductor does differently from the interpreter. No
    value changes.
    """
    stack_scalars(module.graph)
    hold_back(module)
    forbid_negative_indices(module)
    keep_operands_apart(module)


def _compile(
    module: GraphModule, path: Path, groups: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """Compile a graph, with calls of regions or without, as `compile_graph` says, and return the
    files of its kernels.
    """
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    output = next(n for n in module.graph.nodes if n.op == "output")
    for node in output.args[0]:
        node.meta["example_value"] = node.meta["val"]
    module = GraphModule(module, module.graph)  # torch's own class, which Inductor's cache accepts
    marked = dict.fromkeys(_CACHEABLE, True)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                torch._inductor.config.patch(unsafe_marked_cacheable_functions=marked)
            )
            stack.enter_context(stand_ins(groups))
            stack.enter_context(remembered_answers())
            stack.enter_context(_in_order())
            stack.enter_context(_as_planned())
            if any(CHUNK in node.meta for node in module.graph.nodes):
                stack.enter_context(_chunks_apart())
            stack.enter_context(dtype_rules_made_once())
            kernels = stack.enter_context(kernels_noted())
            if all(value.device.type == "cpu" for value in inputs):
                stack.enter_context(whole_triton_operators())
                stack.enter_context(duplicates_removed())
                stack.enter_context(kernels_started_early())
            else:
                stack.enter_context(sized_for(module, sizes))
            if any(node.target is CALL for node in module.graph.nodes):
                stack.enter_context(shapes_of_first_call())
                stack.enter_context(results_kept_in_passes())
            artifact = torch._inductor.standalone_compile(
                module,
                inputs,
                dynamic_shapes="from_graph",
                options=compiler_options(),
                aot=True,
            )
            artifact.save(path=str(path), format="binary")
            return keep_kernels(kernels, path.parent / KERNELS)
    except OSError:
        raise
    except Exception as error:  # Inductor's passes, lowerings and generated code may raise anything
        raise NotCompiled(_reason(error)) from error


_ERROR = re.compile(r"^\w*(?:Error|Exception)\b.*", re.MULTILINE)
"""Line of an error in a traceback."""


def _reason(error: Exception) -> str:
    """Return an error in one line. That of a compiler's process has its traceback in the next ones,
    whose last error is the cause.
    """
    reason = raised(error)
    causes = _ERROR.findall(str(error)) if reason.endswith(":") else []
    return f"{reason} {causes[-1]}" if causes else reason


_LEAST_SHARED = 4096
"""Bytes that kernels in a graph with chunks must both read to become one, unless one reads the
other's result.
"""
_REORDERING = (
    "aten_distributed_optimizations.enable_overlap_scheduling",
    "aten_distributed_optimizations.enable_simple_overlap",
    "reorder_for_compute_comm_overlap",
    "reorder_for_locality",
    "reorder_for_peak_memory",
)
"""Options of Inductor, not all of which every release of torch has."""


def _as_planned() -> contextlib.AbstractContextManager[None]:
    """Keep operators, and above all collectives and waits, where the graph has them.

    When a bucket is gathered, and when a gradient is reduced, is the plan's: Inductor would wait
    for each collective at once, or start all of them first, and wait for gradients at the end. What
    it fuses takes the place of its first operator, and may still draw a wait forward.
    """
    config = torch._inductor.config
    known = [name for name in _REORDERING if hasattr(config, name)]
    kept: contextlib.AbstractContextManager[None] = config.patch(dict.fromkeys(known, False))
    return kept


def _chunks_apart() -> contextlib.AbstractContextManager[None]:
    """Keep the kernels of different chunks apart.

    Inductor makes one kernel of those that read the same values, be it one number, and all chunks
    read the divisor of the loss. Their logits would then exist at the same time.
    """
    kept: contextlib.AbstractContextManager[None] = torch._inductor.config.patch(
        score_fusion_memory_threshold=_LEAST_SHARED
    )
    return kept


@contextlib.contextmanager
def _in_order() -> Iterator[None]:
    """Keep kernels after operators that write in place to their inputs, such as `wait_tensor`.

    Inductor gives a buffer a new name for each operator that writes to it. To fuse CPU kernels with
    different loops, it recomputes the loops and reads of one kernel, and there uses the buffer's
    old name. Without this context a kernel (a dropout, for example) could run before the wait for
    the collective whose result it reads.
    """
    from torch._inductor.scheduler import SchedulerNode  # imported here because it takes a second

    computing = SchedulerNode.recompute_size_and_body

    @functools.wraps(computing)
    def recompute(node: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        computing(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    with replaced(SchedulerNode, "recompute_size_and_body", recompute):
        yield


def compile_ahead(exported: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
    """Compile a program with AOTInductor into one file for torch's own loader.

    Call it with `torch._inductor.aoti_load_package(path)(**batch)`.

    Args:
        exported: program of one dict, with its state and example inputs on the target device.
        path: path of the file, which ends in .pt2. Its folder receives the build files too.
        metadata: result of the loaded program's `get_metadata()`.
    """
    (batch,), _ = exported.example_inputs
    module = exported.module(check_guards=False)
    # The loader uses the tensors of a dict in the order in which they arrive and ignores their
    # names, so two inputs of one shape could be swapped silently. Keyword arguments it does sort.
    codegen: Any = module.graph._codegen
    codegen.pytree_info = codegen.pytree_info._replace(in_spec=tree_structure(((), batch)))
    options = {
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(path.parent / "built"),
        "aot_inductor.metadata": dict(metadata),
        # Inductor's constant folding treats a one-element tensor as a constant, even a buffer that
        # the graph writes to, which would then never change.
        "joint_graph_constant_folding": not any(
            buffer.numel() == 1 for buffer in _buffers(exported)
        ),
    }
    with torch.no_grad():
        files: Any = torch._inductor.aot_compile(module, (), batch, options=options)
    torch._inductor.package.package.package_aoti(str(path), files)


def _buffers(exported: ExportedProgram) -> Iterator[Tensor]:
    """Yield the fake values of the buffers that the graph uses."""
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.BUFFER and node.users:
            yield node.meta["val"]


def load_ahead(path: Path) -> Callable[..., Sequence[Tensor]]:
    """Load a file that `compile_ahead` wrote. It is native code: load trusted files only."""
    loaded: Callable[..., Sequence[Tensor]] = torch._inductor.aoti_load_package(str(path))
    return loaded


def load_compiled(path: Path) -> Callable[..., Sequence[Tensor]]:
    """Load an artifact that `compile_graph` saved, with the same torch build."""
    with remembered_answers(), kernels_from(path.parent / KERNELS):
        artifact: Callable[..., Sequence[Tensor]] = CompiledArtifact.load(
            path=str(path), format="binary"
        )
    return artifact


def import_loader() -> None:
    """Import the modules that every compiled graph imports, so that forked processes have them.

    Not `torch.utils.cpp_extension`: with a CUDA toolkit it initialises CUDA, which forked processes
    could not use then.
    """
    import torch._inductor.async_compile
    import torch._inductor.select_algorithm  # noqa: F401


_CONTROL_FLOW = (
    "cond",
    "scan",
    "while_loop",
    "while_loop_stack_output",
    "map_impl",
    "associative_scan",
)
_REGIONS = "invoke_subgraph"
_CACHEABLE = tuple(f"torch.ops.higher_order.{name}" for name in (*_CONTROL_FLOW, _REGIONS))


@functools.cache
def cpp_compiler_version() -> str | None:
    """Return name and version of the C++ compiler that Inductor uses, such as "gcc version 12.2.0";
    None if there is none.
    """
    builder = torch._inductor.cpp_builder
    if not has_cpp_compiler():
        return None
    told = builder.get_compiler_version_info(builder.get_cpp_compiler())
    found = re.search(r"(?:gcc|clang) version [\d.]+", told)
    return found[0] if found else hashlib.sha256(told.encode()).hexdigest()[:16]


def has_cpp_compiler() -> bool:
    """Return True if Inductor finds a C++ compiler on this machine."""
    try:
        torch._inductor.cpp_builder.get_cpp_compiler()
    except torch._inductor.exc.InvalidCxxCompiler:
        return False
    return True
