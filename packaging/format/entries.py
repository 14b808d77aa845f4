"""Between the dataclasses that the stages hand on and their entries in a manifest."""

from __future__ import annotations

from trainload.autograd_trace.graphs import StateSpec
from trainload.capture.guard import Guard, InputGuard
from trainload.capture.program import BufferSpec, GraphCapture, InputSpec, OutputRole, OutputSpec, ParameterSpec
from trainload.packaging.format.guard_entries import guard_entry, guard_of
from trainload.packaging.format.manifest import BufferEntry, GraphEntry, InputEntry, Manifest, OutputEntry, ParameterEntry, StateEntry


def graph_entry(graph: GraphCapture, file: str) -> GraphEntry:
    """What the manifest says of a captured graph."""
    return GraphEntry(
        file=file,
        inputs=tuple(InputEntry(name=i.name, dtype=i.dtype, shape=tuple(i.shape), quantiles=i.quantiles) for i in graph.inputs),
        outputs=tuple(OutputEntry(name=o.name, role=o.role.value) for o in graph.outputs),
        reached=graph.reached,
        guard=None if graph.guard is None else guard_entry(graph.guard),
        coupled=True if graph.coupled else None,
    )


def graph_guard(entry: GraphEntry) -> Guard:
    """Which batches a graph takes; by its inputs alone where the package is from before guards."""
    if entry.guard is not None:
        return guard_of(entry.guard, [(i.name, i.dtype) for i in entry.inputs])
    symbols = {size for i in entry.inputs for size in i.shape if isinstance(size, str)}
    return Guard(tuple(InputGuard(i.name, i.dtype, i.shape) for i in entry.inputs), dict.fromkeys(sorted(symbols), (0, None)))


def graph_specs(entry: GraphEntry) -> tuple[tuple[InputSpec, ...], tuple[OutputSpec, ...]]:
    """The inverse of `graph_entry`."""
    inputs = tuple(InputSpec(i.name, i.dtype, i.shape, i.quantiles) for i in entry.inputs)
    return inputs, tuple(OutputSpec(o.name, OutputRole(o.role)) for o in entry.outputs)


def data_specs(manifest: Manifest, variant: str) -> tuple[InputSpec, ...]:
    """What a run reads of its data for one variant: `Manifest.data_inputs` as specs."""
    return tuple(InputSpec(i.name, i.dtype, i.shape, i.quantiles) for i in manifest.data_inputs(variant).values())


def parameter_entry(spec: ParameterSpec) -> ParameterEntry:
    """What the manifest says of a parameter."""
    return ParameterEntry(name=spec.name, dtype=spec.dtype, shape=tuple(spec.shape), trainable=spec.trainable, alias_of=spec.alias_of)


def parameter_spec(entry: ParameterEntry) -> ParameterSpec:
    """The inverse of `parameter_entry`."""
    return ParameterSpec(entry.name, entry.dtype, entry.shape, entry.trainable, entry.alias_of)


def buffer_entry(spec: BufferSpec) -> BufferEntry:
    """What the manifest says of a buffer."""
    return BufferEntry(name=spec.name, dtype=spec.dtype, shape=tuple(spec.shape), persistent=spec.persistent)


def buffer_spec(entry: BufferEntry) -> BufferSpec:
    """The inverse of `buffer_entry`."""
    return BufferSpec(entry.name, entry.dtype, entry.shape, entry.persistent)


def state_entry(spec: StateSpec) -> StateEntry:
    """What the manifest says of an entry of an optimizer's state."""
    return StateEntry(name=spec.name, dtype=spec.dtype, like_parameter=spec.like_parameter, shape=spec.shape)


def state_spec(entry: StateEntry) -> StateSpec:
    """The inverse of `state_entry`."""
    return StateSpec(entry.name, entry.dtype, entry.like_parameter, entry.shape)
