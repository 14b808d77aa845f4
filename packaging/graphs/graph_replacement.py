"""Replace the graph of an exported program.

Tested with torch 2.13.0. The private name is `torch._export.verifier`, for the constructor of
ExportedProgram.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._export.verifier import load_verifier
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputSpec,
    TensorArgument,
)

from trainload.core.errors import PackageError
from trainload.packaging.graphs.graph_json import DIALECT, argument_of, refused, serialisable_values


def with_graph(
    exported: ExportedProgram, module: torch.fx.GraphModule, where: str = "graph"
) -> ExportedProgram:
    """Return the program with another graph of the same inputs and the same number of outputs.

    Raises:
        PackageError: the inputs differ, or torch rejects the graph.
    """
    signature = exported.graph_signature
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    expected = [spec.arg.name for spec in signature.input_specs]
    if names != expected:
        changed = sorted(set(names) ^ set(expected)) or ["their order"]
        raise PackageError(
            "the inputs of the new graph differ",
            where=where,
            expected="those of the old graph",
            got=f"a change of {', '.join(changed[:4])}",
        )
    return _of_graph(
        exported, module, list(signature.input_specs), dict(exported.state_dict), where
    )


def with_parameters(
    exported: ExportedProgram,
    module: torch.fx.GraphModule,
    added: Mapping[str, tuple[str, torch.Tensor]],
    where: str = "graph",
) -> ExportedProgram:
    """Return the program with another graph, which has additional parameters.

    Args:
        exported: the program.
        module: a graph with the program's inputs, in their order, those of `added` among them, and
            the same number of outputs.
        added: placeholder name -> name of the parameter, and a tensor of its shape, which may be a
            meta tensor.
        where: place for errors.

    Raises:
        PackageError: torch rejects the graph.
    """
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    for name, (parameter, _) in added.items():
        specs[name] = InputSpec(
            kind=InputKind.PARAMETER, arg=TensorArgument(name=name), target=parameter
        )
    inputs = [specs[node.name] for node in module.graph.nodes if node.op == "placeholder"]
    return _of_graph(
        exported, module, inputs, {**exported.state_dict, **dict(added.values())}, where
    )


def _of_graph(
    exported: ExportedProgram,
    module: torch.fx.GraphModule,
    inputs: list[InputSpec],
    state: dict[str, torch.Tensor],
    where: str,
) -> ExportedProgram:
    signature = exported.graph_signature
    results = next(node for node in reversed(module.graph.nodes) if node.op == "output").args[0]
    if not isinstance(results, tuple | list) or len(results) != len(signature.output_specs):
        got = str(len(results)) if isinstance(results, tuple | list) else "something else"
        raise PackageError(
            "the new graph has a different number of outputs",
            where=where,
            expected=f"{len(signature.output_specs)} values",
            got=got,
        )
    outputs = [
        OutputSpec(
            kind=spec.kind,
            arg=argument_of(node) if isinstance(node, torch.fx.Node) else spec.arg,
            target=spec.target,
        )
        for spec, node in zip(signature.output_specs, results, strict=True)
    ]
    with refused(where), serialisable_values(module):
        return ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=ExportGraphSignature(inputs, outputs),
            state_dict=state,
            range_constraints=dict(exported.range_constraints),
            module_call_graph=list(exported.module_call_graph),
            example_inputs=None,
            constants=dict(exported.constants),
            verifiers=[load_verifier(DIALECT)],
        )
