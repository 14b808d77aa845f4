"""Graphs of a job's first values, compared with the values that its construction computed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from trainload.autograd_trace.initialization.drawn_values import drawn_values
from trainload.autograd_trace.initialization.elements import (
    BLOCK,
    WHOLE_LIMIT,
    Elements,
    whole_bytes,
)
from trainload.capture.initialization.construction_draws import (
    NORMAL_OF,
    PERMUTATIONS,
    Draw,
)
from trainload.capture.initialization.construction_tape import Call, TensorRef, truncated_normal
from trainload.capture.initialization.initial_graphs import (
    InitialGraph,
    Initialization,
    InitialValue,
    initial_graphs,
)
from trainload.capture.tracing.structure import pattern
from trainload.core.errors import raised
from trainload.core.work_steps import begin_step
from trainload.freezing.recorded_job import RecordedJob, model_tensors

_COMPARED = 2**22
"""Elements that are compared at once."""
_SAMPLE = 2**16
"""Elements of a draw whose distribution is compared, and the least number for it."""
_LEAST_SAMPLE = 64
_CHANCE = 1e-12
"""Probability of rejecting a draw of the right distribution."""


def proven_values(recorded: RecordedJob) -> Initialization | None:
    """Return the first values of a job with values; None if its construction was not recorded.

    With the numbers that torch drew in place of the draws, every graph gives the model's values:
    bit for bit, or within rounding where an operator's last bit depends on an element's place. The
    numbers that a launch draws have the distribution of torch's.

    A tensor whose graph fails is missing, with the reason.
    """
    if recorded.tape is None:
        return None
    begin_step("comparing first values with the model's")
    calls = recorded.tape.calls
    state = model_tensors(recorded.job)
    found = _with_limit(initial_graphs(recorded.tape, recorded.tensors, state))
    failed: dict[str, str] = {}
    compared: set[tuple[int, int]] = set()
    for name, value in found.values.items():
        graph = found.graphs[value.graph]
        drawn = [
            _drawn_by_torch(calls[number], draw)
            for number, draw in zip(value.draws, graph.draws, strict=True)
        ]
        reason = _difference(graph, value, found, drawn, state[name].detach())
        for number, (draw, values) in enumerate(zip(graph.draws, drawn, strict=True)):
            if reason is None and (value.graph, number) not in compared:
                compared.add((value.graph, number))
                reason = _other_distribution(draw, values)
        if reason is not None:
            failed[name] = reason
    return _without(found, failed)


def values_like(recorded: RecordedJob, reduced: Initialization | None) -> Initialization | None:
    """Return the first values of a job without values, which must be computed like those of the
    reduced job.

    A tensor whose graph differs from those of its counterparts in more than numbers is missing. So
    is one whose counterparts are.
    """
    if recorded.tape is None or reduced is None:
        return None
    found = _with_limit(
        initial_graphs(recorded.tape, recorded.tensors, model_tensors(recorded.job))
    )
    forms: dict[str, set[Any]] = defaultdict(set)
    for name, value in reduced.values.items():
        forms[pattern(name)].add(_form(reduced.graphs[value.graph]))
    reasons = {pattern(name): reason for name, reason in reduced.missing.items()}
    graph_forms = [_form(graph) for graph in found.graphs]
    failed = {}
    for name, value in found.values.items():
        own = pattern(name)
        if own in reasons:
            failed[name] = f"in the reduced job, {reasons[own]}"
        elif graph_forms[value.graph] not in forms[own]:
            failed[name] = "it is computed otherwise than in the reduced job"
    return _without(found, failed)


def _with_limit(found: Initialization) -> Initialization:
    """Return the first values without those that need too much memory."""
    sizes = [whole_bytes(graph.module) for graph in found.graphs]
    return _without(
        found,
        {
            name: (
                f"it is computed from whole tensors of {sizes[value.graph] / 2**30:.1f} GiB, more"
                f" than {WHOLE_LIMIT / 2**30:.0f} GiB"
            )
            for name, value in found.values.items()
            if sizes[value.graph] > WHOLE_LIMIT
        },
    )


def _without(found: Initialization, failed: Mapping[str, str]) -> Initialization:
    """Return the first values without some tensors, and without graphs that only those need."""
    if not failed:
        return found
    values = {name: value for name, value in found.values.items() if name not in failed}
    used = {old: new for new, old in enumerate(dict.fromkeys(v.graph for v in values.values()))}
    read = {
        old: new
        for new, old in enumerate(
            dict.fromkeys(number for value in values.values() for number in value.constants)
        )
    }
    return replace(
        found,
        graphs=tuple(found.graphs[number] for number in used),
        values={
            name: InitialValue(
                used[value.graph], value.draws, tuple(read[number] for number in value.constants)
            )
            for name, value in values.items()
        },
        constants=tuple(found.constants[number] for number in read),
        missing={**found.missing, **failed},
    )


def _drawn_by_torch(call: Call, draw: Draw) -> Tensor:
    """Return the numbers that a call drew: it is repeated with the generator's state.

    Args:
        call: the call.
        draw: the draw by which it is computed.
    """
    assert call.state is not None
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(call.state)
        if call.operator in NORMAL_OF:  # torch scales standard normal numbers too
            return torch.empty(draw.shape, dtype=draw.dtype).normal_()
        args: list[Any] = [_fresh(arg) if isinstance(arg, TensorRef) else arg for arg in call.args]
        if call.operator is truncated_normal:
            return torch.nn.init.trunc_normal_(*args)
        options = {name: value for name, value in call.kwargs.items() if name != "generator"}
        if "generator" in call.operator._overloadname:
            options["generator"] = None
        drawn: Tensor = call.operator(*args, **options)
        if call.operator in PERMUTATIONS:  # numbers in whose order the permutation is
            ranks = torch.empty(draw.shape, dtype=draw.dtype)
            ranks[drawn.long()] = torch.arange(len(drawn), dtype=draw.dtype) / len(drawn)
            return ranks
        return drawn


def _fresh(ref: TensorRef) -> Tensor:
    return torch.empty_strided(ref.shape, ref.strides, dtype=ref.dtype)


def _difference(
    graph: InitialGraph,
    value: InitialValue,
    found: Initialization,
    drawn: list[Tensor],
    expected: Tensor,
) -> str | None:
    """Return how a graph's values differ from a model's, given torch's numbers; None if equal."""
    if (graph.result.shape, graph.result.dtype) != (expected.shape, expected.dtype):
        return "it was replaced after its construction"
    flat = [values.reshape(-1) for values in drawn]
    constants = [found.constants[number] for number in value.constants]
    elements = Elements(graph.module, [each.__getitem__ for each in (*flat, *constants)])
    rounding = _rounding(graph, elements.elementwise)
    # what is computed whole has sums, whose order depends on the number of threads
    sums = rounding and expected.numel() and not elements.elementwise
    least = rounding * float(expected.abs().max()) if sums else 0.0
    for start in range(0, expected.numel(), _COMPARED):
        stop = min(start + _COMPARED, expected.numel())
        try:
            ours = elements.slice(start, stop)
        except (RuntimeError, TypeError, ValueError, LookupError) as error:  # of an operator
            return f"its construction cannot be repeated: {raised(error)[:200]}"
        theirs = expected.reshape(-1)[start:stop]
        differs = ~torch.isclose(ours, theirs, rtol=rounding, atol=least, equal_nan=True)
        if bool(differs.any()):
            place = int(differs.nonzero()[0])
            return (
                "its construction, when repeated, gives another value at element"
                f" {start + place:,}: {ours[place].item()} in place of {theirs[place].item()}"
            )
    return None


def _rounding(graph: InitialGraph, elementwise: bool) -> float:
    """Return the relative difference that rounding explains; 0 for a small table."""
    dtype = graph.result.dtype
    if not dtype.is_floating_point or (not graph.draws and graph.result.numel() <= BLOCK):
        return 0.0
    return (4 if elementwise else 1000) * torch.finfo(dtype).eps


def _other_distribution(draw: Draw, values: Tensor) -> str | None:
    """Compare a launch's numbers with torch's by the test of Kolmogorov and Smirnov."""
    theirs = values.reshape(-1)[:_SAMPLE].double()
    count = theirs.numel()
    if count < _LEAST_SAMPLE:
        return None
    ours = drawn_values(draw, 0, 0, torch.arange(count)).double()
    both = torch.cat([ours, theirs]).sort().values
    shares = [
        torch.searchsorted(each.sort().values, both, right=True) / count for each in (ours, theirs)
    ]
    distance = float((shares[0] - shares[1]).abs().max())
    limit = math.sqrt(-math.log(_CHANCE / 2) / count)
    if distance <= limit:
        return None
    return (
        f"its random numbers ({draw.distribution}) have another distribution than torch's"
        f" (distance {distance:.3f}, at most {limit:.3f})"
    )


def _form(graph: InitialGraph) -> Any:
    """Return a graph without its numbers."""
    places = {node: number for number, node in enumerate(graph.module.graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, Node):
            return places[value]
        if isinstance(value, list | tuple):
            return tuple(plain(item) for item in value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return "number"
        return str(value)

    nodes = tuple(
        (
            node.op,
            str(node.target) if node.op == "call_function" else "",
            plain(node.args),
            tuple((name, plain(value)) for name, value in node.kwargs.items()),
            str(getattr(node.meta.get("val"), "dtype", "")),
        )
        for node in graph.module.graph.nodes
    )
    return nodes, tuple(draw.distribution for draw in graph.draws)
