"""Conversions between the dataclasses that the stages exchange and their entries in a manifest."""

from __future__ import annotations

from trainload.autograd_trace.graphs import StateSpec
from trainload.capture.guard import Guard, InputGuard
from trainload.capture.program import (
    BufferSpec,
    GraphCapture,
    InputSpec,
    OutputRole,
    OutputSpec,
    ParameterSpec,
)
from trainload.packaging.format.guard_entries import guard_entry, guard_of
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import (
    BufferEntry,
    GraphEntry,
    InputEntry,
    OutputEntry,
    ParameterEntry,
    StateEntry,
)


def graph_entry(graph: GraphCapture, file: str) -> GraphEntry:
    """Return the manifest entry of a captured graph."""
    return GraphEntry(
        file=file,
        inputs=tuple(
            InputEntry(name=i.name, dtype=i.dtype, shape=tuple(i.shape), quantiles=i.quantiles)
            for i in graph.inputs
        ),
        outputs=tuple(OutputEntry(name=o.name, role=o.role.value) for o in graph.outputs),
        reached=graph.reached,
        guard=None if graph.guard is None else guard_entry(graph.guard),
        coupled=True if graph.coupled else None,
    )


def graph_guard(entry: GraphEntry) -> Guard:
    """Return the guard of a graph; for packages from before guards, one derived from the graph's
    inputs alone.
    """
    if entry.guard is not None:
        return guard_of(entry.guard, [(i.name, i.dtype) for i in entry.inputs])
    symbols = {size for i in entry.inputs for size in i.shape if isinstance(size, str)}
    return Guard(
        tuple(InputGuard(i.name, i.dtype, i.shape) for i in entry.inputs),
        dict.fromkeys(sorted(symbols), (0, None)),
    )


def graph_specs(entry: GraphEntry) -> tuple[tuple[InputSpec, ...], tuple[OutputSpec, ...]]:
    """Return the inputs and outputs of a graph: the inverse of `graph_entry`."""
    inputs = tuple(InputSpec(i.name, i.dtype, i.shape, i.quantiles) for i in entry.inputs)
    return inputs, tuple(OutputSpec(o.name, OutputRole(o.role)) for o in entry.outputs)


def data_specs(manifest: Manifest, variant: str) -> tuple[InputSpec, ...]:
    """Return `Manifest.data_inputs` of one variant as specs."""
    return tuple(
        InputSpec(i.name, i.dtype, i.shape, i.quantiles)
        for i in manifest.data_inputs(variant).values()
    )


def parameter_entry(spec: ParameterSpec) -> ParameterEntry:
    """Return the manifest entry of a parameter."""
    return ParameterEntry(
        name=spec.name,
        dtype=spec.dtype,
        shape=tuple(spec.shape),
        trainable=spec.trainable,
        alias_of=spec.alias_of,
    )


def parameter_spec(entry: ParameterEntry) -> ParameterSpec:
    """Return the spec of a parameter: the inverse of `parameter_entry`."""
    return ParameterSpec(entry.name, entry.dtype, entry.shape, entry.trainable, entry.alias_of)


def buffer_entry(spec: BufferSpec) -> BufferEntry:
    """Return the manifest entry of a buffer."""
    return BufferEntry(
        name=spec.name, dtype=spec.dtype, shape=tuple(spec.shape), persistent=spec.persistent
    )


def buffer_spec(entry: BufferEntry) -> BufferSpec:
    """Return the spec of a buffer: the inverse of `buffer_entry`."""
    return BufferSpec(entry.name, entry.dtype, entry.shape, entry.persistent)


def state_entry(spec: StateSpec) -> StateEntry:
    """Return the manifest entry of an optimizer's state entry."""
    return StateEntry(
        name=spec.name, dtype=spec.dtype, like_parameter=spec.like_parameter, shape=spec.shape
    )


def state_spec(entry: StateEntry) -> StateSpec:
    """Return the spec of an optimizer's state entry: the inverse of `state_entry`."""
    return StateSpec(entry.name, entry.dtype, entry.like_parameter, entry.shape)
