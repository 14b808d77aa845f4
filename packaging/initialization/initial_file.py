"""initialization.json: the graphs of a package's first values, which `--weights init` evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from trainload.autograd_trace.initialization.elements import WHOLE_LIMIT, whole_bytes
from trainload.capture.initialization.construction_draws import PARAMETERS, Distribution, Draw
from trainload.capture.initialization.initial_graphs import (
    InitialGraph,
    Initialization,
    InitialValue,
    output_of,
)
from trainload.capture.operators import is_overload, is_seeded
from trainload.core.canonical_json import canonical_json
from trainload.core.errors import PackageError, UnsafePackageError
from trainload.core.paths import write_bytes
from trainload.core.records import Record, Text
from trainload.packaging.format.field_types import Fqn, Identifier
from trainload.packaging.format.guard_entries import Size
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_files import read_checked
from trainload.packaging.format.package_paths import INITIAL_CONSTANTS, INITIALIZATION
from trainload.packaging.graphs.graph_json import flat_from_json, flat_to_json, refused
from trainload.packaging.graphs.torch_operators import running_schema
from trainload.packaging.graphs.validate import parse_graph, validate_graph
from trainload.packaging.tensors.safetensors_file import (
    DTYPES,
    TensorSpec,
    read_tensors,
    write_tensors,
)
from trainload.packaging.tensors.weight_shards import stored_tensors

_MAX_INPUTS = 10_000
DrawNumber = Annotated[int, Field(ge=0, lt=2**40)]


class DrawEntry(Record):
    """The distribution of a graph's input; see `construction_draws.Distribution`."""

    distribution: Distribution
    parameters: Annotated[tuple[int | float, ...], Field(max_length=4)]


class InitialGraphEntry(Record):
    """A graph: its first inputs are these draws, the others constants."""

    graph: dict[str, Any]
    draws: Annotated[tuple[DrawEntry, ...], Field(max_length=_MAX_INPUTS)]


class ValueEntry(Record):
    """The first value of a tensor: the numbers of its graph, and of the graph's draws and
    constants.
    """

    graph: Size
    draws: Annotated[tuple[DrawNumber, ...], Field(max_length=_MAX_INPUTS)]
    constants: Annotated[tuple[Size, ...], Field(max_length=_MAX_INPUTS)]


class InitialConstant(Record):
    """A constant of the graphs: a tensor of one dim in initialization.safetensors."""

    dtype: Identifier
    elements: Size


class InitialDocument(Record):
    """initialization.json.

    Attributes:
        graphs: distinct graphs.
        values: parameter or buffer -> its first value.
        constants: constants; number n is the tensor "n".
        missing: parameter or buffer without a first value -> the reason.
    """

    graphs: tuple[InitialGraphEntry, ...]
    values: dict[Fqn, ValueEntry]
    constants: tuple[InitialConstant, ...]
    missing: dict[Fqn, Text]


def write_initialization(root: Path, initialization: Initialization) -> None:
    """Write the files of a package that is being written.

    Raises:
        PackageError: a graph cannot be serialised.
    """
    document = InitialDocument(
        graphs=tuple(
            InitialGraphEntry(
                graph=flat_to_json(each.module, INITIALIZATION).document,
                draws=tuple(
                    DrawEntry(distribution=draw.distribution, parameters=draw.parameters)
                    for draw in each.draws
                ),
            )
            for each in initialization.graphs
        ),
        values={
            name: ValueEntry(graph=value.graph, draws=value.draws, constants=value.constants)
            for name, value in initialization.values.items()
        },
        constants=tuple(
            InitialConstant(dtype=str(each.dtype).removeprefix("torch."), elements=each.numel())
            for each in initialization.constants
        ),
        missing=dict(initialization.missing),
    )
    write_bytes(root / INITIALIZATION, canonical_json(document.model_dump(mode="json")))
    if initialization.constants:
        write_tensors(
            root / INITIAL_CONSTANTS,
            {str(number): each for number, each in enumerate(initialization.constants)},
        )


def read_initialization(root: Path, manifest: Manifest) -> Initialization | None:
    """Read a package's first values; None if it has none. The files may be hostile.

    Raises:
        IntegrityError: a file is damaged.
        UnsafePackageError: a graph contains something that is not allowed, or takes too much
            memory.
        PackageError: the parts do not fit each other, or the running torch rejects a graph.
    """
    if INITIALIZATION not in manifest.files:
        return None
    data = read_checked(root, INITIALIZATION, manifest.files[INITIALIZATION])
    parse_graph(data, INITIALIZATION)  # limits of size and depth
    try:
        document = InitialDocument.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        raise PackageError(f"the field {place} is wrong", where=INITIALIZATION) from error
    graphs = tuple(
        _read_graph(entry, f"{INITIALIZATION}, graph {number}")
        for number, entry in enumerate(document.graphs)
    )
    constants = _read_constants(root, manifest, document.constants)
    specs = {spec.name: spec for part in stored_tensors(manifest) for spec in part}
    for name, value in document.values.items():
        _check_value(name, value, specs.get(name), graphs, constants)
    return Initialization(
        graphs=graphs,
        values={
            name: InitialValue(value.graph, value.draws, value.constants)
            for name, value in document.values.items()
        },
        constants=constants,
        missing=document.missing,
    )


def _read_graph(entry: InitialGraphEntry, where: str) -> InitialGraph:
    facts = validate_graph(entry.graph, where)
    if facts.higher_order:
        raise UnsafePackageError("a graph of first values has control flow", where=where)
    unknown = sorted(name for name in facts.operators if running_schema(name) is None)
    if unknown:
        raise PackageError(
            "a graph calls an operator that the running torch does not have",
            where=where,
            got=", ".join(unknown[:5]),
        )
    module = flat_from_json(entry.graph, where)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if len(placeholders) < len(entry.draws) or not _is_pure(module):
        raise UnsafePackageError(
            "a graph of first values has unknown inputs, changes tensors or draws numbers",
            where=where,
        )
    _check_shapes(module, where)
    if whole_bytes(module) > WHOLE_LIMIT:
        raise UnsafePackageError(
            "a graph of first values takes too much memory",
            where=where,
            expected=f"at most {WHOLE_LIMIT:,} bytes",
            got=f"{whole_bytes(module):,} bytes",
        )
    draws = tuple(
        Draw(
            draw.distribution,
            tuple(float(each) for each in draw.parameters),
            tuple(node.meta["val"].shape),
            node.meta["val"].dtype,
        )
        for draw, node in zip(entry.draws, placeholders, strict=False)
    )
    for draw in draws:
        if len(draw.parameters) != PARAMETERS[draw.distribution] or draw.dtype.is_complex:
            raise PackageError(
                f"a draw ({draw.distribution}) has other parameters, or is complex", where=where
            )
    return InitialGraph(module, draws)


def _is_pure(module: GraphModule) -> bool:
    """Return True if a graph neither changes tensors nor draws numbers."""
    return not any(
        is_overload(node.target) and (node.target._schema.is_mutable or is_seeded(node.target))
        for node in module.graph.nodes
    )


def _check_shapes(module: GraphModule, where: str) -> None:
    """Check that the file's shapes and dtypes are those that the operators compute."""
    stated = {node: _facts(node.meta.get("val")) for node in module.graph.nodes}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    with refused(where):
        mode = output_of(module).meta["val"].fake_mode
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(
            *(node.meta["val"] for node in placeholders)
        )
    for node, facts in stated.items():
        if node.op == "call_function" and facts != _facts(node.meta["val"]):
            raise UnsafePackageError(
                "a graph of first values states a wrong shape or dtype", where=f"{where}, {node}"
            )


def _facts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return tuple(_facts(each) for each in value) if isinstance(value, list | tuple) else None


def _read_constants(
    root: Path, manifest: Manifest, entries: tuple[InitialConstant, ...]
) -> tuple[torch.Tensor, ...]:
    if bool(entries) != (INITIAL_CONSTANTS in manifest.files):
        raise PackageError(
            "the constants of first values are missing, or not needed", where=INITIAL_CONSTANTS
        )
    if not entries:
        return ()
    data = read_checked(root, INITIAL_CONSTANTS, manifest.files[INITIAL_CONSTANTS])
    specs = [
        TensorSpec(str(number), entry.dtype, (entry.elements,))
        for number, entry in enumerate(entries)
    ]
    tensors = read_tensors(data, INITIAL_CONSTANTS, specs)
    return tuple(tensors[spec.name] for spec in specs)


def _check_value(
    name: str,
    value: ValueEntry,
    spec: TensorSpec | None,
    graphs: tuple[InitialGraph, ...],
    constants: tuple[torch.Tensor, ...],
) -> None:
    """Check that a value fits its tensor, its graph and its constants."""
    where = f"{INITIALIZATION}, {name}"
    if spec is None or value.graph >= len(graphs):
        raise PackageError("a first value is of an unknown tensor or graph", where=where)
    graph = graphs[value.graph]
    nodes = graph.module.graph.nodes
    inputs = [node.meta["val"] for node in nodes if node.op == "placeholder"][len(graph.draws) :]
    result = graph.result
    known = [constants[number] for number in value.constants if number < len(constants)]
    if (
        (tuple(result.shape), result.dtype) != (spec.shape, DTYPES[spec.dtype])
        or len(value.draws) != len(graph.draws)
        or len(value.constants) != len(known)
        or [_facts(each) for each in known] != [_facts(each) for each in inputs]
    ):
        raise PackageError("a first value does not fit its tensor or its graph", where=where)
