"""Compare each compiled graph with the interpreted one at its first call; if they differ, run it
interpreted.

The freeze has compared the interpreted graph with eager PyTorch, but a run trains the code that
Inductor generates from it. So the first call of every compiled graph is made twice, on the run's
own arguments: parameters, optimizer state, and as many rows as there is memory for. A graph with a
dynamic batch is then also called with one more row. All ranks together decide whether the results
differ by more than rounding explains (`rounding.py`). Comparisons are stored beside the build in
the node's cache; the decisions of a run are stored in its checkpoints, so that a restart anywhere
continues with the same graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.graphs import Port, Role
from trainload.capture.parity.distance import relative_distance
from trainload.core.errors import CompileError, raised
from trainload.launching.node.build import uncompiled_graphs
from trainload.launching.node.built_graphs import Built, BuiltGraph, Call
from trainload.launching.node.graph_comparison import (
    EXPLAINED,
    Comparison,
    read_comparison,
    write_comparison,
)
from trainload.launching.node.process_groups import gathered
from trainload.launching.verification.allocation_errors import is_out_of_memory
from trainload.launching.verification.departures import departing, named, recorded
from trainload.launching.verification.rounding import explained_distances, rounded_runs
from trainload.launching.verification.row_limit import fitting_rows
from trainload.launching.verification.stored_copies import Copy, HostCopies, loaded
from trainload.packaging.package import Package
from trainload.sharding.plans.device_step_graphs import places_in_step
from trainload.sharding.plans.parameters_within import parameters_within
from trainload.sharding.plans.plan import Bucket, Plan
from trainload.sharding.rewriting.rank_graphs import update_name
from trainload.sharding.rewriting.rank_update import UPDATE_SCALARS, bucket_updates
from trainload.sharding.rewriting.rewrite import BETWEEN

V = TypeVar("V", Tensor, Copy)
Labelled = list[tuple[str, V]]
"""Values of a call, or copies of them, each with its name in messages."""


class Verifier:
    """Comparison of the graphs of one rank's build.

    Args:
        package: package that is trained.
        plan: plan of the run.
        rank: this rank.
        device: device of this rank.
        folder: folder of the build, in which comparisons are stored.
        control: group of the ranks that call the same graphs in the same order, on a separate
            backend: all ranks or, in a pipeline, those with the same stages, since the others wait
            for messages of these. None if there is one rank, or if the others are only mirrored
            (`alone_of`).
        required: True to raise an error instead of running a graph interpreted.
        decided: earlier decisions of the run: graph -> True if it runs interpreted.
        tell: called with the comparison of every graph that will run interpreted, the same on every
            rank.
        comparing: context that is entered while a graph is compared.

    Attributes:
        device: device of this rank.
        folder: folder of the build.
        decided: decisions about the graphs of this build so far: graph -> True if it runs
            interpreted.
        seconds: time spent on comparisons since the last call of `taken`.
    """

    def __init__(
        self,
        package: Package,
        plan: Plan,
        rank: int,
        device: torch.device,
        folder: Path,
        control: dist.ProcessGroup | None,
        *,
        required: bool = False,
        decided: Mapping[str, bool] | None = None,
        tell: Callable[[Comparison], None] = lambda _: None,
        comparing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._package, self._plan, self._rank, self.device = package, plan, rank, device
        self.folder, self._control, self._required, self._tell = folder, control, required, tell
        self._index = plan.pipeline_index(rank)
        self._plain: Mapping[str, GraphModule] = {}
        self._buckets = {bucket.name: bucket for bucket in plan.held_buckets(self._index)}
        self._names: set[str] = set()
        self.comparing = comparing
        self.decided = dict(decided or {})
        self.seconds = 0.0

    def verified(self, built: Built) -> Built:
        """Return the build with graphs that are compared at their first call, unless they are
        decided already.

        Raises:
            CompileError: a graph runs interpreted by an earlier decision, and the run requires
                compiled graphs.
        """
        self._names = built.names()
        self.decided = {
            name: interpreted for name, interpreted in self.decided.items() if name in self._names
        }
        failed = [
            Comparison(name, interpreted=True, error=reason)
            for name, reason in built.failed.items()
        ]
        stored = self._read_common(self._names)
        comparisons = {
            comparison.graph: comparison
            for each in gathered(failed, self._control)
            for comparison in each
        } | stored
        for name, comparison in comparisons.items():
            self.decided.setdefault(name, comparison.interpreted)
        interpreted = [
            comparisons.get(name, Comparison(name, interpreted=True))
            for name, decided in sorted(self.decided.items())
            if decided
        ]
        for comparison in interpreted:
            self._tell(comparison)
        if interpreted and self._required:
            raise _interpreted_error(interpreted[0])
        chosen = built.replaced(self._choose_call)
        self._drop_plain_graphs()
        return chosen

    def plain(self, name: str) -> GraphModule:
        """Return the interpreted graph of this name."""
        if not self._plain:
            without = self._package.manifest.step_graphs(evaluates=False)
            evaluates = any(self._captured_name(each) not in without for each in self._names)
            self._plain = uncompiled_graphs(
                self._package, self._plan, self.device, self._index, evaluates=evaluates
            )
        return self._plain[name]

    def taken(self) -> float:
        """Return the seconds that comparing has taken since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def agreed(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank. All ranks must call it."""
        if self._control is None:
            return flag
        any_flag = torch.tensor(int(flag))
        dist.all_reduce(any_flag, dist.ReduceOp.MAX, group=self._control)
        return bool(any_flag)

    def fewest(self, count: int) -> int:
        """Return the minimum of the ranks' counts. All ranks must call it."""
        return min(gathered(count, self._control))

    def first(self, comparison: Comparison | None) -> Comparison | None:
        """Return the comparison of the first rank that has one; None if none has.

        All ranks must call it.
        """
        return next(
            (each for each in gathered(comparison, self._control) if each is not None), None
        )

    def decide(self, comparison: Comparison) -> None:
        """Store a comparison, which is the same on every rank, and report it if the graph will run
        interpreted.

        Raises:
            CompileError: the graph will run interpreted, and the run requires compiled graphs.
        """
        self.decided[comparison.graph] = comparison.interpreted
        self._drop_plain_graphs()
        write_comparison(self.folder, comparison)
        if comparison.interpreted:
            self._tell(comparison)
            if self._required:
                raise _interpreted_error(comparison)

    def labelled(
        self, graph: BuiltGraph, arguments: Sequence[V], results: Sequence[V]
    ) -> Labelled[V]:
        """Return the results of a call, or the values that an update wrote, with their names;
        buckets are split by parameter.
        """
        labelled_values: Labelled[V] = []
        if not is_update(graph):
            for port, value in zip(graph.outputs, results, strict=True):
                if port.role is Role.BUCKET_GRADIENT:
                    labelled_values += self._split_by_parameter(
                        self._buckets[port.name], value, "gradient of"
                    )
                else:
                    labelled_values.append(
                        (
                            (
                                "loss, metrics and weight"
                                if port.role is Role.TOTALS
                                else f"{port.role.value} {port.name}"
                            ),
                            value,
                        )
                    )
            return labelled_values
        owner = graph.name.removesuffix(update_name(""))
        parts = bucket_updates(
            tuple(self._buckets.values()),
            self._package.updates(),
            self._package.recipe.graph(owner).groups,
        )
        first = UPDATE_SCALARS
        for part, value in zip(parts, arguments[first : first + len(parts)], strict=True):
            labelled_values += self._split_by_parameter(part.bucket, value, "updated")
        labelled_values += [
            (f"optimizer's state, number {n}", value)
            for n, value in enumerate(arguments[first + 2 * len(parts) :], 1)
        ]
        labelled_values.append(("gradient's norm", results[0]))
        return labelled_values

    def place(self, graph: str, nodes: Sequence[str]) -> str:
        """Return the user's line of the first of these nodes for which it is known; "" if there is
        none.
        """
        if graph.endswith(update_name("")) or not nodes:
            return ""
        places = places_in_step(self._package, self._captured_name(graph), self.device)
        return next((places[node] for node in nodes if node in places), "")

    def _drop_plain_graphs(self) -> None:
        """Drop the interpreted graphs once all graphs are decided: their callers hold those that
        run.
        """
        if self.decided.keys() >= self._names:
            self._plain = {}

    def _captured_name(self, graph: str) -> str:
        """Return the name of the captured graph from which a graph of the build is made, or whose
        update it is.
        """
        return max(
            (
                name
                for name in self._package.manifest.step_graphs()
                if f"{graph}.".startswith(f"{name}.")
            ),
            key=len,
        )

    def _choose_call(self, graph: BuiltGraph) -> Call:
        if graph.name in self.decided:
            return self.plain(graph.name) if self.decided[graph.name] else graph.call
        return _ComparedCall(self, graph)

    def _read_common(self, names: Collection[str]) -> dict[str, Comparison]:
        """Return the stored comparisons of this build that are the same on the nodes of all
        ranks.
        """
        mine = {
            name: comparison
            for name in sorted(names)
            if (comparison := read_comparison(self.folder, name)) is not None
        }
        every = gathered(mine, self._control)
        return {
            name: comparison
            for name, comparison in mine.items()
            if all(each.get(name) == comparison for each in every)
        }

    def _split_by_parameter(self, bucket: Bucket, value: V, what: str) -> Labelled[V]:
        """Split a flat tensor of a bucket, or of this rank's share of it, by parameter."""
        parts = parameters_within(self._plan, self._rank, bucket, len(value))
        return [(f"{what} {name}", value[low:high]) for name, low, high in parts]


def is_update(graph: BuiltGraph) -> bool:
    """Return True if a graph is an optimizer's update, which writes to its arguments; other graphs
    write nothing.
    """
    return not graph.inputs


def _interpreted_error(comparison: Comparison) -> CompileError:
    return CompileError(
        "a graph cannot run compiled",
        where=str(comparison),
        expected="compiled graphs with the same results as the interpreted ones (require_compiled)",
        hint="Omit require_compiled to run it interpreted, or rewrite the code that is named.",
    )


class _ComparedCall:
    """A compiled graph whose first call is compared. Later calls use the graph that was chosen."""

    def __init__(self, verifier: Verifier, graph: BuiltGraph) -> None:
        self._verifier, self._graph = verifier, graph
        self._call: Call | None = None

    def __call__(self, *arguments: Tensor) -> Sequence[Tensor]:
        if self._call is not None:
            return self._call(*arguments)
        began = time.perf_counter()
        with self._verifier.comparing():
            results = self._call_and_compare(arguments)
            _free_cached(self._verifier.device)
        self._verifier.seconds += time.perf_counter() - began
        return results

    def _call_and_compare(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        verifier, graph = self._verifier, self._graph
        plain = verifier.plain(graph.name)
        batch = _batch_positions(plain, graph.inputs)
        rows = len(arguments[batch[0]]) if batch else 0
        compared = (
            verifier.fewest(fitting_rows(plain, graph.inputs, rows, verifier.device))
            if batch
            else 0
        )
        few = arguments if compared == rows else _first_rows(arguments, batch, compared)
        trial = _Trial(verifier, graph, plain, few)
        comparison = trial.difference()
        if comparison is None and batch:
            trial.put_aside()
            try:
                longer = _Trial(verifier, graph, plain, _one_more_row(few, batch))
            except (RuntimeError, ValueError, IndexError) as error:
                # the graph rejects this number of rows: nothing is compared
                if is_out_of_memory(error):
                    raise
            else:
                comparison = longer.difference(trial.explained)
        verifier.decide(comparison or Comparison(graph.name))
        self._call = graph.call if comparison is None else plain
        return (
            trial.results(compiled=comparison is None)
            if few is arguments
            else self._call(*arguments)
        )


class _Trial:
    """An interpreted and a compiled call of a graph on the same arguments.

    The compared values are copied (`stored_copies.py`), so that memory for one call at a time is
    needed. An update writes to its arguments, so they are restored before each call.

    The constructor raises errors of the interpreted graph and of the allocator.

    Attributes:
        explained: distances that rounding explains, for each compared value; () if they were not
            measured, since all are small.
    """

    def __init__(
        self, verifier: Verifier, graph: BuiltGraph, plain: GraphModule, arguments: Sequence[Tensor]
    ) -> None:
        self._verifier, self._graph, self._plain, self._arguments = (
            verifier,
            graph,
            plain,
            arguments,
        )
        _free_cached(verifier.device)
        self._copies = HostCopies([verifier.folder])
        self._initial = self._copy_written()
        self._expected = self._copy_outcome(plain(*arguments))
        self._compiled_outcome: _Outcome | None = None
        self._compiled_results: Sequence[Tensor] = ()
        self._error = ""
        self.explained: Sequence[float] = ()
        try:
            self._compiled_results = graph.call(*self._restore_arguments())
            if verifier.device.type == "cuda":
                # otherwise a kernel's error is raised by some later call
                torch.cuda.synchronize(verifier.device)
        except Exception as error:
            # generated code may raise anything; the interpreted graph succeeded
            if is_out_of_memory(error):
                raise
            self._error = raised(error)

    def results(self, *, compiled: bool) -> Sequence[Tensor]:
        """Return the results of the chosen call, and write its updates to the arguments."""
        chosen = self._compiled_outcome if compiled else self._expected
        if chosen is None:
            return self._compiled_results
        self._write(chosen.written)
        return [loaded(value).to(self._verifier.device) for value in chosen.results]

    def put_aside(self) -> None:
        """Keep the compiled call's results as copies, so that there is memory for another trial."""
        if self._compiled_outcome is None:
            self._compiled_outcome = self._copy_outcome(self._compiled_results)
            self._compiled_results = ()

    def difference(self, explained: Sequence[float] = ()) -> Comparison | None:
        """Return the difference that rounding does not explain, the same on every rank; None if
        there is none.

        Args:
            explained: distances that rounding explains in another trial of the graph, for which it
                need not be measured again.
        """
        verifier = self._verifier
        labelled = self._label(self._expected)
        expected = [value for _, value in labelled]
        distances = [0.0] * len(expected) if self._error else self._measure_distances(expected)
        bounds = explained or [EXPLAINED] * len(distances)
        far = bool(self._error) or any(
            not distance <= bound for distance, bound in zip(distances, bounds, strict=True)
        )
        if not verifier.agreed(far):
            return None
        self.put_aside()
        explained = self._explained_distances(expected)
        beyond = [at for at, distance in enumerate(distances) if not distance <= explained[at]]
        if verifier.agreed(bool(beyond)):
            explained = list(map(max, explained, self._explained_distances(expected, further=True)))
            beyond = [at for at, distance in enumerate(distances) if not distance <= explained[at]]
        self.explained = explained
        differs = bool(self._error or beyond)
        if not verifier.agreed(differs):
            return None
        # it calls the graph's collectives, so every rank does
        values = recorded(self._plain, self._restore_arguments())
        mine: Comparison | None = None
        if differs:
            nodes: Sequence[Node] = ()
            with suppress(torch.OutOfMemoryError):  # then the comparison does not name the operator
                nodes = departing(self._plain, values, fails=bool(self._error))
            place = verifier.place(self._graph.name, [node.name for node in nodes])
            mine = Comparison(
                self._graph.name,
                interpreted=True,
                operator=named(nodes),
                place=place,
                error=self._error,
            )
        if beyond and mine is not None:
            worst = max(beyond, key=lambda at: distances[at] / explained[at])
            distance = distances[worst] if math.isfinite(distances[worst]) else None
            mine = replace(
                mine, output=labelled[worst][0], distance=distance, explained=explained[worst]
            )
        return verifier.first(mine)

    def _explained_distances(
        self, expected: Sequence[Copy], *, further: bool = False
    ) -> list[float]:
        """Return how far rounding may move each value.

        It calls the graph's collectives, so every rank does.
        """
        runs = rounded_runs(self._plain, self._restore_arguments, further=further)
        run_values = [
            [value for _, value in self._label(self._copy_outcome(results))] for _, results in runs
        ]
        return explained_distances(expected, run_values, further=further)

    def _measure_distances(self, expected: Sequence[Copy]) -> list[float]:
        """Return the relative distances of the compiled graph's values from the expected ones."""
        labelled = self._verifier.labelled(self._graph, self._arguments, self._compiled_results)
        return [
            relative_distance(loaded(value), other.cpu())
            for value, (_, other) in zip(expected, labelled, strict=True)
        ]

    def _label(self, outcome: _Outcome) -> Labelled[Copy]:
        return self._verifier.labelled(self._graph, outcome.written, outcome.results)

    def _copy_outcome(self, results: Sequence[Tensor]) -> _Outcome:
        return _Outcome(self._copy_written(), [self._copies.copy(value) for value in results])

    def _copy_written(self) -> list[Copy]:
        """Return copies of the arguments if the graph writes to them, otherwise []."""
        return (
            [self._copies.copy(value) for value in self._arguments]
            if is_update(self._graph)
            else []
        )

    def _write(self, values: Sequence[Copy]) -> None:
        if values:
            for argument, value in zip(self._arguments, values, strict=True):
                argument.copy_(loaded(value))

    def _restore_arguments(self) -> Sequence[Tensor]:
        """Restore the arguments to their values before the first call, and return them."""
        self._write(self._initial)
        return self._arguments


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Copies of the results of a call, and of the arguments that it wrote to."""

    written: list[Copy]
    results: list[Copy]


def _free_cached(device: torch.device) -> None:
    """Free the unused blocks of a GPU's allocator: those left by calls of one size cannot serve a
    call of another size.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _batch_positions(plain: GraphModule, inputs: Sequence[Port]) -> list[int]:
    """Return the positions of the arguments with the batch's rows; [] if their number is fixed or
    other arguments depend on it.
    """
    values = [node.meta["val"] for node in plain.graph.nodes if node.op == "placeholder"]
    batch = [number for number, port in enumerate(inputs) if port.role is Role.BATCH]
    fixed = any(
        not values[number].ndim or isinstance(values[number].shape[0], int) for number in batch
    )
    return [] if fixed or any(port.role in BETWEEN for port in inputs) else batch


def _first_rows(arguments: Sequence[Tensor], batch: Sequence[int], rows: int) -> list[Tensor]:
    return [value[:rows] if number in batch else value for number, value in enumerate(arguments)]


def _one_more_row(arguments: Sequence[Tensor], batch: Sequence[int]) -> list[Tensor]:
    """Return a graph's arguments with the batch's first row repeated at the end."""
    return [
        torch.cat([value, value[:1]]) if number in batch else value
        for number, value in enumerate(arguments)
    ]
