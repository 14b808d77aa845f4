"""Derive step graphs with AOT autograd.

Tested with torch 2.13.0. Private names used:
`torch._functorch.aot_autograd.aot_export_joint_with_descriptors`, `torch._functorch.config`,
`torch._functorch._aot_autograd.descriptors`,
`torch._functorch._aot_autograd.logging_utils`, `torch._dispatch.python`,
`torch._subclasses.fake_tensor`, `ExportedProgram._guards_code`.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta

from trainload.autograd_trace.derivation.backward_origins import copy_origins
from trainload.autograd_trace.derivation.step_module import (
    StepModule,
    is_functional,
    placeholders,
    trainable_parameters,
)
from trainload.autograd_trace.graphs import TANGENT, Port, Role, StepGraph
from trainload.autograd_trace.randomness.draws import is_random
from trainload.autograd_trace.recompute.rematerialisation import Regions, recompute, regions_of
from trainload.capture.job.ambient import deterministic_attention, neutrally, one_at_a_time
from trainload.capture.operators import is_overload, is_seeded
from trainload.capture.program import GraphCapture, Program
from trainload.capture.tracing.lazy_graphs import generated_when_run
from trainload.capture.watching.higher_order import differentiates, has_checkpoints
from trainload.core.errors import CaptureError, raised
from trainload.core.garbage import garbage_collection_disabled
from trainload.core.work_steps import begin_step

_VARYING = (Role.BATCH, Role.SEED, Role.STEP, Role.ROW)


def _fake_mode(capture: GraphCapture) -> FakeTensorMode:
    for node in placeholders(capture):
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise AssertionError("a captured graph has no tensor inputs")


def size_conditions(exported: ExportedProgram) -> list[str]:
    """Return torch's conditions on a program's input sizes beyond their ranges.

    Each is a Python expression such as "L['batch']['x'].size()[1] % 2 == 0".
    """
    # Guards such as `image_3 != 8` or `s0 < s1` are only in this private attribute, neither in the
    # graph nor in `range_constraints`. `module(check_guards=True)` checks the same.
    return [str(code) for code in exported._guards_code]


def add_size_conditions(exported: ExportedProgram, conditions: Sequence[str]) -> None:
    """Make torch check conditions on a program's input sizes whenever it runs, also once reloaded.

    Args:
        exported: the program; changed in place.
        conditions: Python expressions over "L['flat_args'][0].size()[1]", the size of dim 1 of
            input 0.
    """
    exported._guards_code = list(conditions)


@one_at_a_time
@neutrally
@garbage_collection_disabled()
def derive(
    program: Program,
    graph: str,
    device: torch.device,
    *,
    sources: bool = False,
    is_deterministic: bool = True,
) -> StepGraph:
    """Derive the flat step graph of one captured graph for a device.

    The backward part recomputes the values inside the model's checkpoints. The caller's context
    (`torch.no_grad()`, autocast, ...) has no effect: a run derives in the middle of a step.

    Args:
        program: the captured program; only shapes are read, no weights.
        graph: its name. A training graph yields forward and backward in one graph, others forward.
        device: where the graph will run. "cuda" needs a GPU on this machine (torch aborts
            otherwise).
        sources: True to copy the captured nodes' stack traces and stacks of modules to their nodes
            and to those of the backward part, which takes longer.
        is_deterministic: False to allow operators whose gradients differ from call to call.

    Raises:
        CaptureError: the graph draws random numbers without a stateless form, writes to a tensor
            that is not a buffer, or has an operator that AOT autograd rejects.
    """
    capture = program.graphs[graph]
    begin_step(f"deriving the {'joint' if capture.training else 'flat'} graph of {graph}")
    mode = _fake_mode(capture)
    differentiated = capture.training or differentiates(capture.exported.graph_module)
    trainable = trainable_parameters(program, capture) if differentiated else set()
    owners = program.aliases
    with mode:
        state: dict[str, Tensor] = {}
        inputs: list[Tensor] = []
        for node, spec in zip(
            placeholders(capture), capture.exported.graph_signature.input_specs, strict=True
        ):
            value = node.meta["val"]
            # Contiguous, whatever the example's strides were, because the real tensors come from
            # files and buckets.
            fake = torch.empty(value.shape, dtype=value.dtype, device=device)
            if spec.kind is InputKind.USER_INPUT:
                inputs.append(fake)
            elif spec.target is not None:
                prefix = f"{graph}/" if spec.kind is InputKind.CONSTANT_TENSOR else ""
                state.setdefault(prefix + owners.get(spec.target, spec.target), fake)
        module = StepModule(capture, state, trainable, owners, device)
        for port in module.input_ports()[len(inputs) :]:
            inputs.append(
                torch.empty(
                    (),
                    dtype=torch.float32 if port.role is Role.SCALE else torch.int64,
                    device=device,
                )
            )
    with _unsupported_by_torch(graph), contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.nullcontext() if capture.training else torch.no_grad())
        if is_deterministic:
            stack.enter_context(deterministic_attention())
        with preserve_node_meta(sources):
            traced = (
                _trace_functional(module, mode, inputs, sources=sources)
                if is_functional(capture.exported.graph_module)
                else None
            )
        if traced is None:
            with (
                preserve_node_meta(sources or has_checkpoints(capture.exported.graph_module)),
                whole_triton_operators(),
            ):
                traced = aot_export_joint_with_descriptors(
                    stack, module, tuple(inputs)
                ).graph_module
    if sources:
        copy_origins(traced.graph)
    return _flatten(traced, module, graph)


@contextlib.contextmanager
def _unsupported_by_torch(graph: str) -> Iterator[None]:
    """Convert an error of AOT autograd itself into CaptureError."""
    try:
        yield
    except RuntimeError as error:
        raise CaptureError(
            f"torch {torch.__version__} derives no gradients of it",
            where=f"graph {graph}",
            got=raised(error),
            hint="Compute it without this operator, or freeze with a newer torch.",
        ) from error


def whole_triton_operators() -> contextlib.AbstractContextManager[None]:
    """Return a context in which operators of `torch.library.triton_op` stay calls by name.

    Otherwise AOT autograd decomposes them into their Triton kernels, which cannot run on a CPU.
    """
    whole: contextlib.AbstractContextManager[None] = torch._functorch.config.patch(
        decompose_custom_triton_ops=False
    )
    return whole


def _trace_functional(
    module: StepModule, mode: FakeTensorMode, inputs: Sequence[Tensor], *, sources: bool
) -> GraphModule | None:
    """Trace the joint graph of a functional graph, as AOT autograd would, in about half the time.

    AOT autograd first runs the graph to see what it writes to, then functionalizes it with a tensor
    subclass around every value. A functional graph needs neither.

    Args:
        module: module of a graph for which `is_functional` holds; its state is fake.
        mode: fake mode of the state and the inputs.
        inputs: fake tensors, in the order of `StepModule.input_ports`.
        sources: True to give the nodes of the backward part the numbers of their forward nodes.

    Returns:
        The graph with AOT autograd's descriptions of inputs and outputs, or None if an operator's
        own decomposition writes to a tensor or has another side effect.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    state = {**parameters, **buffers}
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    outputs: list[Any] = []

    def step(*flat: Tensor) -> list[Tensor]:
        state_values = dict(zip(state, flat, strict=False))
        *entries, tangent = flat[len(state) :]
        results = list(torch.func.functional_call(module, state_values, tuple(entries)))
        outputs[:] = [PlainAOTOutput(idx=index) for index in range(len(results))]
        if module.training_graph and results[-1].requires_grad:
            if sources:
                setup_stacktrace_preservation_hooks([results[-1].grad_fn])
            wanted = [state_values[name] for name in trained]
            gradients = torch.autograd.grad(results[-1], wanted, tangent, allow_unused=True)
            for name, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    results.append(gradient)
                    outputs.append(GradAOTOutput(grad_of=ParamAOTInput(target=name)))
        return results

    lazily = generated_when_run()
    with mode, enable_python_dispatcher(), torch.autograd.set_multithreading_enabled(False), lazily:
        tangent = torch.empty((), dtype=module.loss_dtype(), device=inputs[0].device)
        traced: GraphModule = make_fx(step, tracing_mode="real")(*state.values(), *inputs, tangent)
    overloads = [
        node
        for node in traced.graph.nodes
        if node.op == "call_function" and is_overload(node.target)
    ]
    # Attention without dropout counts as seeded, and therefore as impure.
    if any(
        node.target._schema.is_mutable or (node.is_impure() and not is_seeded(node.target))
        for node in overloads
    ):
        return None
    _multiply_sizes(traced.graph)
    places: list[Any] = [ParamAOTInput(target=name) for name in parameters] + [
        BufferAOTInput(target=name) for name in buffers
    ]
    places += [PlainAOTInput(idx=index) for index in range(len(inputs))]
    places.append(TangentAOTInput(output=PlainAOTOutput(idx=len(module.output_ports()))))
    for node, description in zip(
        (n for n in traced.graph.nodes if n.op == "placeholder"), places, strict=True
    ):
        node.meta["desc"] = description
    next(node for node in reversed(traced.graph.nodes) if node.op == "output").meta["desc"] = (
        outputs
    )
    return traced


def _multiply_sizes(graph: Graph) -> None:
    """Replace each count of a tensor's elements by a product of sizes.

    make_fx traces `numel()` as an operator on the tensor, so a mean's backward would keep it alive.
    """
    count = torch.ops.aten.sym_numel.default
    sizes: dict[str, Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.target is not count:
            if isinstance(value, torch.SymInt):
                sizes.setdefault(str(value), node)
            continue
        (source,) = node.all_input_nodes
        with graph.inserting_before(node):
            product: Node | None = None
            for dim, size in enumerate(source.meta["val"].shape):
                if isinstance(size, int):
                    continue
                if str(size) not in sizes:
                    sizes[str(size)] = graph.call_function(
                        torch.ops.aten.sym_size.int, (source, dim)
                    )
                    sizes[str(size)].meta["val"] = size
                product = (
                    sizes[str(size)]
                    if product is None
                    else _product(graph, product, sizes[str(size)])
                )
            fixed = math.prod(size for size in source.meta["val"].shape if isinstance(size, int))
            assert product is not None, "the count of a tensor of fixed sizes is a number"
            node.replace_all_uses_with(product if fixed == 1 else _product(graph, product, fixed))
        graph.erase_node(node)


def _product(graph: Graph, size: Node, factor: Node | int) -> Node:
    product = graph.call_function(operator.mul, (size, factor))
    product.meta["val"] = size.meta["val"] * (
        factor.meta["val"] if isinstance(factor, Node) else factor
    )
    return product


def _flatten(joint: GraphModule, module: StepModule, name: str) -> StepGraph:
    """Turn AOT autograd's (primals, tangents) -> (outputs, gradients) graph into a step graph."""
    graph = Graph()
    batch_ports, output_ports = module.input_ports(), module.output_ports()
    inputs: list[Port] = []
    mapping: dict[Node, Node] = {}
    constants: dict[str, Tensor] = {}
    regions: dict[Node, Regions] = {}
    varying: list[Node] = []
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            description = node.meta["desc"]
            if isinstance(
                description, TangentAOTInput | ForwardTokenAOTInput | BackwardTokenAOTInput
            ):
                continue
            match description:
                case ParamAOTInput(target=target) | BufferAOTInput(target=target):
                    port = module.port_of(target)
                case PlainAOTInput(idx=index):
                    port = batch_ports[index]
                case _:
                    raise AssertionError(f"unforeseen input of a joint graph: {description}")
            # fx makes the name unique and a valid identifier. The target, which is an argument name
            # in generated code, must be both by itself.
            placeholder = graph.create_node(
                "placeholder", f"input_{len(inputs)}", name=f"{port.role}_{port.name}"
            )
            placeholder.meta["val"] = node.meta["val"]
            mapping[node] = placeholder
            inputs.append(port)
            if port.role in _VARYING:
                varying.append(placeholder)
    tangents = [
        n
        for n in joint.graph.nodes
        if n.op == "placeholder" and isinstance(n.meta["desc"], TangentAOTInput)
    ]
    if len(tangents) > 1:
        raise CaptureError(
            "a gradient flows into a buffer or parameter that forward writes to",
            where=f"graph {name}",
            hint=(
                "Write buffers under torch.no_grad(), with detached values; do not write to"
                " parameters."
            ),
        )
    tangent = tangents[0] if tangents else None
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.target is torch.ops.higher_order.with_effects:
            _forget_check(node, name)
            continue
        if (
            node.target is operator.getitem
            and node.args[0].target is torch.ops.higher_order.with_effects
        ):
            continue  # an effect token
        if is_random(node):
            raise CaptureError(
                f"the derived graph draws from a generator with {node.target}",
                where=f"graph {name}",
            )
        if tangent is not None and tangent in node.all_input_nodes and tangent not in mapping:
            value = tangent.meta["val"]
            ones = graph.create_node(
                "call_function",
                torch.ops.aten.full.default,
                ([], 1.0),
                {"dtype": value.dtype, "device": value.device},
                name=TANGENT,
            )
            ones.meta["val"] = value
            mapping[tangent] = ones
        if node.op == "output":
            outputs, results = _outputs(node, module, output_ports)
            graph.output(tuple(mapping[r] for r in results))
        else:
            copy = mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            regions[copy] = regions_of(node)
            if node.op == "get_attr" and isinstance(getattr(joint, str(node.target)), Tensor):
                constants[str(node.target)] = getattr(joint, str(node.target))
    graph.eliminate_dead_code()
    flat = GraphModule(joint, graph)
    for name, tensor in constants.items():
        setattr(flat, name, tensor)
    recompute(flat, regions, varying, name)
    return StepGraph(module=flat, inputs=tuple(inputs), outputs=outputs)


def _forget_check(node: Node, graph: str) -> None:
    """Check that an operator with a side effect may be left out of the step graph.

    torch orders operators with side effects by tokens. Those that only check a matrix (for
    singularity, say) are left out: an unsolvable system then yields infinities or NaN.

    Raises:
        CaptureError: the operator has any other side effect.
    """
    effect = node.args[1]
    if effect is not torch.ops.aten._linalg_check_errors.default:
        raise CaptureError(
            f"the operator {effect} has a side effect, which a step graph cannot have",
            where=f"graph {graph}",
            hint="Keep it out of forward: `if not torch.compiler.is_exporting(): ...`.",
        )


def _outputs(
    node: Node, module: StepModule, ports: Sequence[Port]
) -> tuple[tuple[Port, ...], list[Node]]:
    outputs: list[Port] = []
    results: list[Node] = []
    values: Any = node.args[0]
    for value, description in zip(values, node.meta["desc"], strict=True):
        if value is None:
            continue
        match description:
            case ForwardTokenAOTOutput() | BackwardTokenAOTOutput():
                continue
            case PlainAOTOutput(idx=index):
                if index >= len(ports):
                    continue
                port = ports[index]
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)):
                port = Port(Role.GRADIENT, module.port_of(target).name)
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target)) if (
                target[0] == "b"
            ):
                port = module.port_of(target)
            case InputMutationAOTOutput(mutated_input=written):
                raise CaptureError(
                    "forward writes to a tensor that is not a buffer",
                    where=f"{written}",
                    hint="Keep changing values in a buffer.",
                )
            case _:
                raise AssertionError(f"unforeseen output of a joint graph: {description}")
        outputs.append(port)
        results.append(value)
    return tuple(outputs), results


def fake_mode() -> FakeTensorMode:
    """Return a context in which tensors have shapes but no data."""
    return FakeTensorMode(shape_env=ShapeEnv())


def trace_flat(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> GraphModule:
    """Trace a function of fake tensors (made under `fake_mode`) to a flat graph of ATen
    operators.
    """
    mode = next(t.fake_mode for t in inputs if isinstance(t, FakeTensor))
    with mode:
        traced: GraphModule = make_fx(function, tracing_mode="real")(*inputs)
    return traced
