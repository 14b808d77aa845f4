"""Compares each compiled graph with the interpreted one when a build's graph is first called, and runs it interpreted where they differ.

The freeze has compared the interpreted graph with eager PyTorch; a run trains what Inductor makes of it. So the first call of every
compiled graph is made twice, on what the run gives it: parameters, the optimizer's state, rows, as many as there is memory for. A graph
of a batch is then called on one more row as well. Whether they differ beyond what rounding explains (`rounding.py`) is decided by all
ranks together. What a rank's node has found of a build is kept beside it; what a run has decided is stored in its checkpoints, so that a
restart anywhere continues with the same graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.graphs import Port, Role
from trainload.capture.parity.distance import relative_distance
from trainload.core.atomic import replace_file
from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import CompileError, PackageError, raised
from trainload.launching.node.build import Built, BuiltGraph, Call, uncompiled_graphs
from trainload.launching.node.process_groups import gathered
from trainload.launching.worker.departures import departing, named, recorded
from trainload.launching.worker.out_of_memory import is_out_of_memory
from trainload.launching.worker.rounding import EXPLAINED, explained_distances, rounded_runs
from trainload.launching.worker.row_limit import fitting_rows
from trainload.packaging.package import Package
from trainload.sharding.analysis.collectives import Collective
from trainload.sharding.plans.device_step_graphs import places_in_step
from trainload.sharding.plans.plan import Bucket, Plan
from trainload.sharding.rewriting.rank_graphs import update_name
from trainload.sharding.rewriting.rank_update import UPDATE_SCALARS, bucket_updates
from trainload.sharding.rewriting.rewrite import BETWEEN

_FOLDER = "verified"
Labelled = list[tuple[str, Tensor]]
"""Values of a call, with what each is called in a message."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of comparing a compiled graph with the interpreted one.

    Attributes:
        graph: its name within the build, such as "train.only".
        interpreted: whether it runs interpreted from then on.
        output: what differs: "gradient of layer.weight". Empty where nothing does, or the graph cannot be compiled or called.
        distance: by how much, as an L2 distance relative to the interpreted value's norm; None where there is none, as of another shape.
        explained: the greatest distance that rounding explains.
        operator: at which operator the compiled graph departs; empty where that is not known.
        place: the user's line that it comes from, such as `model.py:12: low = image.amin(1)`; empty where that is not known.
        error: what the compiler or the compiled graph says where it fails; empty where it does not.
    """

    graph: str
    interpreted: bool = False
    output: str = ""
    distance: float | None = None
    explained: float = EXPLAINED
    operator: str = ""
    place: str = ""
    error: str = ""

    def __str__(self) -> str:
        at = (f" at {self.operator}" if self.operator else "") + (f" ({self.place})" if self.place else "")
        if self.error:
            return f"graph {self.graph} fails where it is compiled{at}: {self.error}"
        if not self.interpreted:
            return f"graph {self.graph} is as the interpreted one"
        far = "by more than any number" if self.distance is None else f"by {self.distance:.2g}"
        return (
            f"graph {self.graph} differs, compiled, from the interpreted one in the {self.output} {far}, "
            f"where rounding explains {self.explained:.2g}{at}"
        )


class Verifier:
    """Compares the graphs of one rank's build.

    Args:
        package: what is trained.
        plan: how.
        rank: this rank.
        device: where it computes.
        folder: of the build, in which the comparisons are kept.
        control: the ranks that call the same graphs in the same order, on a backend of their own: all, of a pipeline those with the same
            stages, since the others wait for what these send. None: there is one rank, or the others do not exist.
        required: whether a graph that would run interpreted ends the run instead.
        decided: graph -> whether it runs interpreted, as the run has decided before.
        tell: told of every graph that will run interpreted; the same on every rank.
        comparing: entered while a graph is compared.

    Attributes:
        device: as given.
        decided: as given, of the graphs of this build, and what has been decided since.
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
        self._folder, self._control, self._required, self._tell = folder / _FOLDER, control, required, tell
        self._index = plan.pipeline_index(rank)
        self._plain: Mapping[str, GraphModule] = {}
        self._buckets = {bucket.name: bucket for bucket in plan.held_buckets(self._index)}
        self._collectives: Mapping[str, Sequence[Collective]] = {}
        self._names: set[str] = set()
        self.comparing = comparing
        self.decided = dict(decided or {})
        self.seconds = 0.0

    def verified(self, built: Built) -> Built:
        """Return the build with graphs that are compared at their first call, but for those about which it is decided.

        Raises:
            CompileError: one that runs interpreted is among these, and the run requires that none does.
        """
        self._collectives, self._names = built.collectives, built.names()
        self.decided = {name: interpreted for name, interpreted in self.decided.items() if name in self._names}
        failed = [Comparison(name, interpreted=True, error=reason) for name, reason in built.failed.items()]
        known = self._known(self._names)
        found = {comparison.graph: comparison for each in gathered(failed, self._control) for comparison in each} | known
        for name, comparison in found.items():
            self.decided.setdefault(name, comparison.interpreted)
        interpreted = [found.get(name, Comparison(name, interpreted=True)) for name, decided in sorted(self.decided.items()) if decided]
        for comparison in interpreted:
            self._tell(comparison)
        if interpreted and self._required:
            raise _refused(interpreted[0])
        chosen = built.replaced(self._chosen)
        self._release()
        return chosen

    def plain(self, name: str) -> GraphModule:
        """Return the interpreted graph of this name."""
        if not self._plain:
            without = self._package.manifest.step_graphs(evaluates=False)
            evaluates = any(self._captured(each) not in without for each in self._names)
            self._plain = uncompiled_graphs(self._package, self._plan, self.device, self._index, evaluates=evaluates)
        return self._plain[name]

    def taken(self) -> float:
        """Return how many seconds comparing has taken since this was last asked."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def agreed(self, flag: bool) -> bool:
        """Return whether it is so on any rank. All ranks call it."""
        if self._control is None:
            return flag
        said = torch.tensor(int(flag))
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self._control)
        return bool(said)

    def fewest(self, count: int) -> int:
        """Return the least of the ranks' numbers. All ranks call it."""
        return min(gathered(count, self._control))

    def first(self, comparison: Comparison | None) -> Comparison | None:
        """Return what the first rank that has found something has found. All ranks call it."""
        return next((each for each in gathered(comparison, self._control) if each is not None), None)

    def decide(self, comparison: Comparison) -> None:
        """Keep a comparison, which is the same on every rank, and say it where a graph will run interpreted.

        Raises:
            CompileError: one will, and the run requires that none does.
        """
        self.decided[comparison.graph] = comparison.interpreted
        self._release()
        with suppress(OSError):  # in a cache that cannot be written, as one that came with an image: the next run compares again
            self._folder.mkdir(exist_ok=True)
            replace_file(self._folder / f"{comparison.graph}.json", canonical_json(asdict(comparison)), durable=False)
        if comparison.interpreted:
            self._tell(comparison)
            if self._required:
                raise _refused(comparison)

    def labelled(self, graph: BuiltGraph, arguments: Sequence[Tensor], results: Sequence[Tensor]) -> Labelled:
        """Return what a call of a graph gave, and what an update wrote, with what each is called; of a bucket, each parameter's part."""
        found: Labelled = []
        if not is_update(graph):
            for port, value in zip(graph.outputs, results, strict=True):
                if port.role is Role.BUCKET_GRADIENT:
                    found += self._slots(self._buckets[port.name], value, "gradient of")
                else:
                    found.append(("loss, metrics and weight" if port.role is Role.TOTALS else f"{port.role.value} {port.name}", value))
            return found
        owner = graph.name.removesuffix(update_name(""))
        parts = bucket_updates(tuple(self._buckets.values()), self._package.updates(), self._package.recipe.graph(owner).groups)
        first = UPDATE_SCALARS
        for part, value in zip(parts, arguments[first : first + len(parts)], strict=True):
            found += self._slots(part.bucket, value, "updated")
        found += [(f"optimizer's state, number {n}", value) for n, value in enumerate(arguments[first + 2 * len(parts) :], 1)]
        return [*found, ("gradient's norm", results[0])]

    def place(self, graph: str, nodes: Sequence[str]) -> str:
        """Return the user's line that the first of these nodes comes from; empty where none is known."""
        if graph.endswith(update_name("")) or not nodes:
            return ""
        places = places_in_step(self._package, self._captured(graph), self.device)
        return next((places[node] for node in nodes if node in places), "")

    def _release(self) -> None:
        """Drop the interpreted graphs when all graphs are decided about: those that run are held by their callers."""
        if self.decided.keys() >= self._names:
            self._plain = {}

    def _captured(self, graph: str) -> str:
        """The captured graph that one of the build is made of, or that it updates after."""
        return max((name for name in self._package.manifest.step_graphs() if f"{graph}.".startswith(f"{name}.")), key=len)

    def _chosen(self, graph: BuiltGraph) -> Call:
        if graph.name in self.decided:
            return self.plain(graph.name) if self.decided[graph.name] else graph.call
        if self._control is None and self._plan.world_size > 1 and any(each.is_called for each in self._collectives.get(graph.name, ())):
            return graph.call  # the other ranks do not exist
        return _Compared(self, graph)

    def _known(self, names: Collection[str]) -> dict[str, Comparison]:
        """The earlier comparisons of this build that all ranks' nodes have in common."""
        mine = {name: comparison for name in sorted(names) if (comparison := self._read(name)) is not None}
        every = gathered(mine, self._control)
        return {name: comparison for name, comparison in mine.items() if all(each.get(name) == comparison for each in every)}

    def _read(self, name: str) -> Comparison | None:
        path = self._folder / f"{name}.json"
        try:
            return Comparison(**parse_canonical(path.read_bytes(), str(path)))
        except (FileNotFoundError, PackageError, TypeError):
            return None

    def _slots(self, bucket: Bucket, value: Tensor, what: str) -> Labelled:
        """The part of each parameter in a flat tensor of a bucket, or of this rank's share of it."""
        start = 0 if len(value) == bucket.length else self._plan.shard_index(self._rank) * len(value)
        found: Labelled = []
        for slot in bucket.slots:
            low, high = max(slot.offset - start, 0), min(slot.offset + slot.length - start, len(value))
            if low < high:
                found.append((f"{what} {slot.parameter}", value[low:high]))
        return found


def is_update(graph: BuiltGraph) -> bool:
    """Return whether a graph is an optimizer's update, which writes its arguments; the others write nothing."""
    return not graph.inputs


def _refused(comparison: Comparison) -> CompileError:
    return CompileError(
        "a graph cannot run compiled",
        where=str(comparison),
        expected="compiled graphs that give what the interpreted ones give (require_compiled)",
        hint="Leave require_compiled out, and it runs interpreted; or write in another way what is named.",
    )


class _Compared:
    """A compiled graph whose first call is compared. Later ones call what was chosen."""

    def __init__(self, verifier: Verifier, graph: BuiltGraph) -> None:
        self._verifier, self._graph = verifier, graph
        self._call: Call | None = None

    def __call__(self, *arguments: Tensor) -> Sequence[Tensor]:
        if self._call is not None:
            return self._call(*arguments)
        began = time.perf_counter()
        with self._verifier.comparing():
            results = self._first(arguments)
            _free_cached(self._verifier.device)
        self._verifier.seconds += time.perf_counter() - began
        return results

    def _first(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        verifier, graph = self._verifier, self._graph
        plain = verifier.plain(graph.name)
        batch = _batch(plain, graph.inputs)
        rows = len(arguments[batch[0]]) if batch else 0
        compared = verifier.fewest(fitting_rows(plain, graph.inputs, rows, verifier.device)) if batch else 0
        few = arguments if compared == rows else _first_rows(arguments, batch, compared)
        trial = _Trial(verifier, graph, plain, few)
        comparison = trial.difference()
        if comparison is None and batch:
            try:
                longer = _Trial(verifier, graph, plain, _one_more_row(few, batch))
            except (RuntimeError, ValueError, IndexError) as error:  # the graph does not take this number of rows: nothing is compared
                if is_out_of_memory(error):
                    raise
            else:
                comparison = longer.difference()
        verifier.decide(comparison or Comparison(graph.name))
        self._call = graph.call if comparison is None else plain
        return trial.results(compiled=comparison is None) if few is arguments else self._call(*arguments)


class _Trial:
    """One call of a graph, made interpreted and compiled on the same arguments.

    What is compared is kept in host memory, so that a GPU needs memory for one call at a time. An update writes to the arguments
    themselves, which are restored before each call.

    Raises: what the interpreted graph raises, and what an allocator does.
    """

    def __init__(self, verifier: Verifier, graph: BuiltGraph, plain: GraphModule, arguments: Sequence[Tensor]) -> None:
        self._verifier, self._graph, self._plain, self._arguments = verifier, graph, plain, arguments
        _free_cached(verifier.device)
        self._before = self._written()
        self._expected = self._outcome(plain(*arguments))
        self._kept: _Outcome | None = None
        self._got: Sequence[Tensor] = ()
        self._error = ""
        try:
            self._got = graph.call(*self._again())
            if verifier.device.type == "cuda":
                torch.cuda.synchronize(verifier.device)  # a kernel's error is raised at some later call
        except Exception as error:  # generated code may raise anything, and the interpreted graph has raised nothing
            if is_out_of_memory(error):
                raise
            self._error = raised(error)

    def results(self, *, compiled: bool) -> Sequence[Tensor]:
        """Return what the chosen call gave, and leave in the arguments what it wrote."""
        chosen = self._kept if compiled else self._expected
        if chosen is None:
            return self._got
        self._write(chosen.written)
        return [value.to(self._verifier.device) for value in chosen.results]

    def difference(self) -> Comparison | None:
        """Return how they differ beyond what rounding explains, the same on every rank; None where they do not."""
        verifier = self._verifier
        labelled = self._labelled(self._expected)
        expected = [value for _, value in labelled]
        distances = [0.0] * len(expected) if self._error else self._distances(expected)
        far = bool(self._error) or any(not distance <= EXPLAINED for distance in distances)
        if not verifier.agreed(far):
            return None
        self._kept, self._got = self._outcome(self._got), ()
        explained = self._explained(expected)
        beyond = [at for at, distance in enumerate(distances) if not distance <= explained[at]]
        if verifier.agreed(bool(beyond)):
            explained = list(map(max, explained, self._explained(expected, further=True)))
            beyond = [at for at, distance in enumerate(distances) if not distance <= explained[at]]
        differs = bool(self._error or beyond)
        if not verifier.agreed(differs):
            return None
        values = recorded(self._plain, self._again())  # it calls the graph's collectives, so every rank does
        mine: Comparison | None = None
        if differs:
            nodes: Sequence[Node] = ()
            with suppress(torch.OutOfMemoryError):  # then it is not said which operator it is
                nodes = departing(self._plain, values, fails=bool(self._error))
            place = verifier.place(self._graph.name, [node.name for node in nodes])
            mine = Comparison(self._graph.name, interpreted=True, operator=named(nodes), place=place, error=self._error)
        if beyond and mine is not None:
            worst = max(beyond, key=lambda at: distances[at] / explained[at])
            distance = distances[worst] if math.isfinite(distances[worst]) else None
            mine = replace(mine, output=labelled[worst][0], distance=distance, explained=explained[worst])
        return verifier.first(mine)

    def _explained(self, expected: Sequence[Tensor], *, further: bool = False) -> list[float]:
        """Return how far rounding may move each value. It calls the graph's collectives, so every rank does."""
        runs = rounded_runs(self._plain, self._again, further=further)
        found = [[value for _, value in self._labelled(self._outcome(results))] for _, results in runs]
        return explained_distances(expected, found, further=further)

    def _distances(self, expected: Sequence[Tensor]) -> list[float]:
        """By how much what the compiled graph gave and wrote is away from what is expected."""
        found = self._verifier.labelled(self._graph, self._arguments, self._got)
        return [relative_distance(value, other.cpu()) for value, (_, other) in zip(expected, found, strict=True)]

    def _labelled(self, outcome: _Outcome) -> Labelled:
        return self._verifier.labelled(self._graph, outcome.written, outcome.results)

    def _outcome(self, results: Sequence[Tensor]) -> _Outcome:
        return _Outcome(self._written(), [value.cpu() for value in results])

    def _written(self) -> list[Tensor]:
        """A copy of the arguments, if the graph writes to them."""
        return [value.to("cpu", copy=True) for value in self._arguments] if is_update(self._graph) else []

    def _write(self, values: Sequence[Tensor]) -> None:
        if values:
            for argument, value in zip(self._arguments, values, strict=True):
                argument.copy_(value)

    def _again(self) -> Sequence[Tensor]:
        """The arguments, as they were before the first call."""
        self._write(self._before)
        return self._arguments


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The results of a call, and the arguments that it wrote to, copied to host memory."""

    written: list[Tensor]
    results: list[Tensor]


def _free_cached(device: torch.device) -> None:
    """Free the unused blocks of a GPU's allocator: those left by calls of one size cannot serve a call of another size."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _batch(plain: GraphModule, inputs: Sequence[Port]) -> list[int]:
    """Return the positions of the arguments that have the batch's rows; none where that number is fixed or other arguments have it."""
    values = [node.meta["val"] for node in plain.graph.nodes if node.op == "placeholder"]
    batch = [number for number, port in enumerate(inputs) if port.role is Role.BATCH]
    fixed = any(not values[number].ndim or isinstance(values[number].shape[0], int) for number in batch)
    return [] if fixed or any(port.role in BETWEEN for port in inputs) else batch


def _first_rows(arguments: Sequence[Tensor], batch: Sequence[int], rows: int) -> list[Tensor]:
    return [value[:rows] if number in batch else value for number, value in enumerate(arguments)]


def _one_more_row(arguments: Sequence[Tensor], batch: Sequence[int]) -> list[Tensor]:
    """A graph's arguments with the batch's first row once more at its end."""
    return [torch.cat([value, value[:1]]) if number in batch else value for number, value in enumerate(arguments)]
