"""Explains the sizes that a job's graphs take: for each dim what it may be, which line of the user's code has it so, what to write else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.export import Dim, ExportedProgram

from trainload.capture.guards.guard_lines import Guards
from trainload.capture.job.ambient import neutrally, one_at_a_time
from trainload.capture.job.declared_sizes import Shapes, is_hint, limits_of, spelled
from trainload.capture.job.definition import Job
from trainload.capture.job.leading_rows import arranged
from trainload.capture.job.model_state import check_model, modes_kept, state_kept
from trainload.capture.shapes.shape_fixes import refusals, suggested_fixes
from trainload.capture.tracing.targets import Target, example_of, targets_of
from trainload.capture.tracing.trace import export_graph
from trainload.core.errors import CaptureError, JobError

Place = tuple[str, int]
"""A dim of an input."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A line of the user's code (`place` is "file:line") and what it asks of the sizes: `condition`, such as "x[1] == 48"."""

    place: str
    line: str
    condition: str


@dataclass(frozen=True, slots=True)
class DimReport:
    """One dim of one input.

    Attributes:
        input: its (dotted) name.
        dim: 0 is the batch dim.
        example: the size that the example has.
        declared: what the job says of it, as a person writes it: "Dim('seq', max=64)". Empty: nothing, so it is fixed.
        symbol: what stands for the size in the graph: a name, or an expression of names. None: it is fixed to `example`.
        least: the least size that the graph takes.
        most: the greatest one. None: there is none.
        causes: the lines of the user's code that ask something of it, the one that decides first.
        relax: what to write so that the graph takes more sizes. Empty: it takes all.
    """

    input: str
    dim: int
    example: int
    declared: str
    symbol: str | None
    least: int
    most: int | None
    causes: tuple[Cause, ...]
    relax: str


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """What the training graph takes.

    Attributes:
        dims: every dim of every input, in order.
        refused: why torch refuses the sizes as they are declared, a sentence each. `dims` are then what the model could take.
        fixes: what torch suggests to declare instead: "seq = Dim('seq', max=16)".
    """

    dims: tuple[DimReport, ...]
    refused: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()


@one_at_a_time
@neutrally
def explain_shapes(job: Job, graph: str | None = None) -> ShapeReport:
    """Says what sizes a training graph takes, and why. It traces the loss twice: as declared, and with every dim left to torch.

    Args:
        job: whose.
        graph: its name, with the variant's ("train-masked"). None: the first one that trains.

    Raises:
        JobError: the job's description does not hold together, or there is no such graph.
        CaptureError: the model cannot be captured for a reason that has nothing to do with sizes.
    """
    job, model = arranged(job), check_model(job.model)
    trained = [target for target in targets_of(job) if target.training]
    step = next((target for target in trained if graph in (None, target.name)), None)
    if step is None:
        raise JobError("no training graph of this name", where="Job.graphs", expected=", ".join(t.name for t in trained), got=repr(graph))
    batch, shapes = example_of(job, step)
    shapes = {name: shapes[name] for name in batch}
    refused: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    with modes_kept(model) as set_training:
        set_training(True)
        with state_kept(model):
            watched, guards = _watched(step, batch, shapes)
        try:
            with state_kept(model):
                exported = export_graph(step, batch, shapes)
        except CaptureError as error:
            refused = refusals(error)
            if watched is None or not refused:
                raise
            exported, fixes = watched, tuple(str(fix) for fix in suggested_fixes(error))
    outcome = _Outcome(exported, tuple(batch))
    could = _Outcome(watched, tuple(batch)) if watched is not None else outcome
    writer = _Writer(batch, shapes, guards, outcome, could, refused=bool(refused))
    dims = tuple(writer.report(name, dim) for name, leaf in batch.items() for dim in range(leaf.ndim))
    return ShapeReport(dims, refused, fixes)


def _watched(step: Target, batch: dict[str, Tensor], shapes: Shapes) -> tuple[ExportedProgram | None, Guards]:
    """The program with every dim left to torch, or at least those that are declared dynamic, or None; and what was seen."""
    every: Shapes = {name: dict.fromkeys(range(leaf.ndim), Dim.AUTO) for name, leaf in batch.items()}
    declared: Shapes = {name: {dim: Dim.AUTO for dim, spec in dims.items() if spec is not Dim.STATIC} for name, dims in shapes.items()}
    for loose in (every, declared):
        guards = Guards()
        try:
            return export_graph(step, batch, loose, around=guards.noted), guards
        except CaptureError:  # a model that fails with more dims left open may do well as it is declared
            continue
    return None, guards


class _Outcome:
    """The sizes of an exported program's inputs, as text, and their ranges."""

    def __init__(self, exported: ExportedProgram, names: tuple[str, ...]) -> None:
        values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
        leaves = zip(names, exported.graph_signature.user_inputs, strict=True)
        self.sizes = {(name, dim): str(size) for name, node in leaves for dim, size in enumerate(values[str(node)].shape)}
        self._ranges = {str(symbol): span for symbol, span in exported.range_constraints.items()}

    def fixed(self, place: Place) -> bool:
        return self.sizes[place].isdigit()

    def limits(self, place: Place) -> tuple[int, int | None]:
        size = self.sizes[place]
        if size.isdigit():
            return int(size), int(size)
        span = self._ranges.get(size)
        least, most = (str(span.lower), str(span.upper)) if span is not None else ("0", "")
        return int(least) if least.isdigit() else 0, int(most) if most.isdigit() else None

    def same(self, place: Place) -> list[Place]:
        """The dims that have the same size, in order."""
        return [other for other, size in self.sizes.items() if size == self.sizes[place]]


class _Writer:
    """Puts what was found of one dim into words."""

    def __init__(
        self, batch: Mapping[str, Tensor], shapes: Shapes, guards: Guards, outcome: _Outcome, could: _Outcome, *, refused: bool
    ) -> None:
        self._batch, self._shapes, self._guards, self._outcome, self._could = batch, shapes, guards, outcome, could
        self._refused = refused
        self._labels = {symbol: self._label(place) for place, symbol in reversed(guards.symbols.items())}
        self._names: dict[str, str] = {}
        for place, size in outcome.sizes.items():
            if size.isidentifier():
                self._names.setdefault(size, self._label(place).replace("[", "_").rstrip("]"))

    def report(self, name: str, dim: int) -> DimReport:
        place, size = (name, dim), self._batch[name].shape[dim]
        spec = self._shapes[name].get(dim)
        least, most = (size, size) if self._fixed(place) else self._outcome.limits(place)
        causes = self._causes(place)
        return DimReport(
            input=name,
            dim=dim,
            example=size,
            declared="" if spec is None else spelled(spec),
            symbol=self._symbol(place),
            least=least,
            most=most,
            causes=causes,
            relax=self._relax(place, causes),
        )

    def _fixed(self, place: Place) -> bool:
        name, dim = place
        return self._shapes[name].get(dim, Dim.STATIC) is Dim.STATIC or self._outcome.fixed(place)

    def _label(self, place: Place) -> str:
        """How a condition names a dim: by the name that the job gives it, else as input[dim]."""
        name, dim = place
        spec = self._shapes[name].get(dim)
        if spec is not None and not is_hint(spec) and not hasattr(spec, "root"):
            return str(spec.__name__)
        return "batch" if dim == 0 else f"{name}[{dim}]"

    def _symbol(self, place: Place) -> str | None:
        if self._fixed(place):
            return None
        spec = self._shapes[place[0]][place[1]]
        if not is_hint(spec) and not self._refused:
            return str(spec.__name__)
        return re.sub(r"[a-z]+\d+", lambda m: self._names.get(m[0], m[0]), self._outcome.sizes[place])

    def _causes(self, place: Place) -> tuple[Cause, ...]:
        symbol = self._guards.symbols.get(place)
        if symbol is None:
            return ()
        found = []
        for guard in self._guards.about(symbol):
            left, sign, right = _sides(guard.expression)
            condition = self._worded(f"{left} {sign} {right}" if sign else left)
            if guard.place and not (sign == "==" and self._worded(left) == self._worded(right)):
                found.append(Cause(guard.place, guard.line, condition))
        return tuple(dict.fromkeys(found))

    def _worded(self, expression: str) -> str:
        named = re.sub(r"[a-z]+\d+", lambda m: self._labels.get(m[0], m[0]), expression)
        return re.sub(r"Mod\(([^(),]+), (\d+)\)", r"\1 % \2", named)

    def _relax(self, place: Place, causes: tuple[Cause, ...]) -> str:
        name, dim = place
        spec = self._shapes[name].get(dim, Dim.STATIC)
        if not self._fixed(place):
            return " ".join(dict.fromkeys(filter(None, self._widen(place, spec, causes))))
        size = self._batch[name].shape[dim]
        if size < 2:
            return "Give an example of length 2 or more: torch takes lengths 0 and 1 for constants."
        write = f"Write {self._proposal(place)}"
        if not self._could.fixed(place):
            return f"{write}." if dim > 0 else f"Leave out what Job.dynamic says of dim 0: {spelled(spec)}."
        return _sentence(_change(causes, size), *([write] if spec is Dim.STATIC and dim > 0 else []))

    def _widen(self, place: Place, spec: Any, causes: tuple[Cause, ...]) -> Iterator[str]:
        """What to write for a dim that is dynamic, but does not take all sizes."""
        least, most = self._outcome.limits(place)
        low, high = limits_of(spec)
        smallest, greatest = self._could.limits(place)  # of the model itself, whatever is declared
        if most is not None:
            steps = [_change(causes, greatest)] if greatest is not None and greatest <= most else []
            yield _sentence(*steps, *([f"Raise the max of {spelled(spec)}"] if most == high else []))
        if least > 2:
            steps = [_change(causes, smallest)] if smallest >= least else []
            yield _sentence(*steps, *([f"Lower the min of {spelled(spec)}"] if least == low else []))
        for cause in causes:
            if " == " in cause.condition:
                one = "Declare them as one Dim, or c" if re.fullmatch(r"\S+ == [^\d\s]\S*", cause.condition) and self._refused else "C"
                yield f"{one}{_change((cause,), 0)[1:]}."
            elif " != " in cause.condition and self._refused:
                yield f"Declare Dim.AUTO or a range in which {cause.condition}, or c{_change((cause,), 0)[1:]}."

    def _proposal(self, place: Place) -> str:
        """What to write in Job.dynamic for a dim that can have other sizes: all dims that have its size at once."""
        if self._could.fixed(place):
            together, limits = [place], ""
        else:
            together = [other for other in self._could.same(place) if other[1] > 0 and self._fixed(other)]
            least, most = self._could.limits(place)
            limits = (f", min={least}" if least > 2 else "") + (f", max={most}" if most is not None else "")
        name, dim = together[0]
        # torch takes named dims for any size in their range, and a condition that is no range contradicts that.
        simple = all(re.fullmatch(r"\S+ (<|<=|>|>=|==) \S+", cause.condition) for other in together for cause in self._causes(other))
        text = "Dim.AUTO" if not simple and not self._could.fixed(place) else f"Dim('{name.replace('.', '_')}_{dim}'{limits})"
        said: dict[str, list[str]] = {}
        for other, number in together:
            said.setdefault(other, []).append(f"{number}: {text}")
        entries = [f"{other!r}: {{{', '.join(dims)}}}" for other, dims in said.items()]
        return f"dynamic={{{', '.join(entries)}}}"


def _sentence(*steps: str) -> str:
    """Steps, one after the other."""
    return ", then ".join([steps[0], *(f"{step[0].lower()}{step[1:]}" for step in steps[1:])]) + "." if steps else ""


def _change(causes: tuple[Cause, ...], number: int) -> str:
    """Which line to change: the one that speaks of `number`, if there is one."""
    if not causes:
        return "Change the model so that it takes any length"
    cause = next((c for c in causes if re.search(rf"\b{number}\b", c.condition)), causes[0])
    return f"Change {cause.place}, which needs {cause.condition}"


def _sides(expression: str) -> tuple[str, str, str]:
    """An equation's or inequation's left side, sign and right side: "Eq(a, b)" -> a, "==", b. Anything else -> itself, "", ""."""
    found = re.fullmatch(r"(Eq|Ne)\((.*)\)", expression)
    if found is None:
        return expression, "", ""
    depth = 0
    for index, character in enumerate(found[2]):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            return found[2][:index], "==" if found[1] == "Eq" else "!=", found[2][index + 1 :].strip()
    return expression, "", ""
