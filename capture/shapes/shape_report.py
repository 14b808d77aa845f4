"""Explains which sizes a job's graphs accept.

For each dim: its range, the lines of the user's code that restrict it, and what to write instead.
"""

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
from trainload.core.suggestions import did_you_mean

Place = tuple[str, int]
"""A dim of an input."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A line of the user's code and its condition on sizes.

    Attributes:
        place: "file:line".
        line: source text of the line.
        condition: for example "x[1] == 48".
    """

    place: str
    line: str
    condition: str


@dataclass(frozen=True, slots=True)
class DimReport:
    """One dim of one input.

    Attributes:
        input: its (dotted) name.
        dim: 0 is the batch dim.
        example: its size in the example.
        declared: the job's declaration as a user writes it: "Dim('seq', max=64)". Empty: none, so
            it is fixed.
        symbol: the size in the graph: a name, or an expression of names. None: it is fixed to
            `example`.
        least: least size that the graph accepts.
        most: greatest size that the graph accepts. None: no upper bound.
        causes: lines of the user's code that restrict it, the decisive one first.
        relax: what to write so that the graph accepts more sizes. Empty: it accepts all.
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
    """The sizes that the training graph accepts.

    Attributes:
        dims: every dim of every input, in order.
        refused: torch's reasons for rejecting the declared sizes, a sentence each. `dims` then
            describes what the model could accept.
        fixes: declarations that torch suggests instead: "seq = Dim('seq', max=16)".

    Example:
        report = trainload.explain_shapes(job)
        for dim in report.dims:
            print(dim)
    """

    dims: tuple[DimReport, ...]
    refused: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()


@one_at_a_time
@neutrally
def explain_shapes(job: Job, graph: str | None = None) -> ShapeReport:
    """Report which sizes a training graph accepts, and why.

    The loss is traced twice: with the declared sizes, and with every dim left to torch.

    Args:
        job: the job.
        graph: name of the graph, including the variant ("train-masked"). None: the first one that
            trains.

    Raises:
        JobError: if the job is inconsistent, or there is no such graph.
        CaptureError: if the model cannot be captured for a reason unrelated to sizes.

    Example:
        report = trainload.explain_shapes(job)
        print(report.refused, report.fixes)
    """
    job, model = arranged(job), check_model(job.model)
    trained = [target for target in targets_of(job) if target.training]
    step = next((target for target in trained if graph in (None, target.name)), None)
    if step is None:
        raise JobError(
            "there is no training graph of this name",
            where="Job.graphs",
            expected=", ".join(t.name for t in trained),
            got=repr(graph),
            hint=did_you_mean(str(graph), [t.name for t in trained]),
        )
    batch, shapes = example_of(job, step)
    shapes = {name: shapes[name] for name in batch}
    refused: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    with modes_kept(model) as set_training:
        set_training(True)
        with state_kept(model):
            watched, guards = _trace_with_guards(step, batch, shapes)
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
    dims = tuple(
        writer.report(name, dim) for name, leaf in batch.items() for dim in range(leaf.ndim)
    )
    return ShapeReport(dims, refused, fixes)


def _trace_with_guards(
    step: Target, batch: dict[str, Tensor], shapes: Shapes
) -> tuple[ExportedProgram | None, Guards]:
    """Return the program with every dim left to torch, and the recorded guards.

    If that fails, only the dims declared dynamic are left to torch; None if that fails too.
    """
    every: Shapes = {
        name: dict.fromkeys(range(leaf.ndim), Dim.AUTO) for name, leaf in batch.items()
    }
    declared: Shapes = {
        name: {dim: Dim.AUTO for dim, spec in dims.items() if spec is not Dim.STATIC}
        for name, dims in shapes.items()
    }
    for loose in (every, declared):
        guards = Guards()
        try:
            return export_graph(step, batch, loose, around=guards.noted), guards
        except CaptureError:
            # a model that fails with more dynamic dims may succeed with the declared ones
            continue
    return None, guards


class _Outcome:
    """The sizes of an exported program's inputs, as text, and their ranges."""

    def __init__(self, exported: ExportedProgram, names: tuple[str, ...]) -> None:
        values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
        leaves = zip(names, exported.graph_signature.user_inputs, strict=True)
        self.sizes = {
            (name, dim): str(size)
            for name, node in leaves
            for dim, size in enumerate(values[str(node)].shape)
        }
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
        """Return the dims that have the same size, in order."""
        return [other for other, size in self.sizes.items() if size == self.sizes[place]]


class _Writer:
    """Describes the results for each dim in words."""

    def __init__(
        self,
        batch: Mapping[str, Tensor],
        shapes: Shapes,
        guards: Guards,
        outcome: _Outcome,
        could: _Outcome,
        *,
        refused: bool,
    ) -> None:
        self._batch, self._shapes, self._guards, self._outcome, self._could = (
            batch,
            shapes,
            guards,
            outcome,
            could,
        )
        self._refused = refused
        self._labels = {
            symbol: self._label(place) for place, symbol in reversed(guards.symbols.items())
        }
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
            relax=self._describe_fix(place, causes),
        )

    def _fixed(self, place: Place) -> bool:
        name, dim = place
        return self._shapes[name].get(dim, Dim.STATIC) is Dim.STATIC or self._outcome.fixed(place)

    def _label(self, place: Place) -> str:
        """Return the name of a dim in conditions: the job's name for it, else input[dim]."""
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
        return re.sub(
            r"[a-z]+\d+", lambda m: self._names.get(m[0], m[0]), self._outcome.sizes[place]
        )

    def _causes(self, place: Place) -> tuple[Cause, ...]:
        symbol = self._guards.symbols.get(place)
        if symbol is None:
            return ()
        causes = []
        for guard in self._guards.about(symbol):
            left, sign, right = _sides(guard.expression)
            condition = self._with_labels(f"{left} {sign} {right}" if sign else left)
            if guard.place and not (
                sign == "==" and self._with_labels(left) == self._with_labels(right)
            ):
                causes.append(Cause(guard.place, guard.line, condition))
        return tuple(dict.fromkeys(causes))

    def _with_labels(self, expression: str) -> str:
        labelled = re.sub(r"[a-z]+\d+", lambda m: self._labels.get(m[0], m[0]), expression)
        return re.sub(r"Mod\(([^(),]+), (\d+)\)", r"\1 % \2", labelled)

    def _describe_fix(self, place: Place, causes: tuple[Cause, ...]) -> str:
        name, dim = place
        spec = self._shapes[name].get(dim, Dim.STATIC)
        if not self._fixed(place):
            return " ".join(
                dict.fromkeys(filter(None, self._describe_widening(place, spec, causes)))
            )
        size = self._batch[name].shape[dim]
        if size < 2:
            return "Use an example of length 2 or more: torch treats lengths 0 and 1 as constants."
        write = f"Write {self._propose_dynamic(place)}"
        if not self._could.fixed(place):
            return (
                f"{write}."
                if dim > 0
                else f"Remove the declaration of dim 0 from Job.dynamic: {spelled(spec)}."
            )
        return _sentence(
            _change(causes, size), *([write] if spec is Dim.STATIC and dim > 0 else [])
        )

    def _describe_widening(
        self, place: Place, spec: Any, causes: tuple[Cause, ...]
    ) -> Iterator[str]:
        """Yield what to write for a dim that is dynamic, but does not accept all sizes."""
        least, most = self._outcome.limits(place)
        low, high = limits_of(spec)
        # Limits of the model itself, independent of the declaration. torch's ranges for Dim.AUTO
        # begin at 2.
        smallest, greatest = self._could.limits(place)
        if most is not None:
            steps = [_change(causes, greatest)] if greatest is not None and greatest <= most else []
            yield _sentence(
                *steps, *([f"Raise the max of {spelled(spec)}"] if most == high else [])
            )
        if least > 2:
            steps = [_change(causes, smallest)] if smallest >= least else []
            yield _sentence(
                *steps, *([f"Lower the min of {spelled(spec)}"] if least == low else [])
            )
        for cause in causes:
            if " == " in cause.condition:
                one = (
                    "Declare them as one Dim, or c"
                    if re.fullmatch(r"\S+ == [^\d\s]\S*", cause.condition) and self._refused
                    else "C"
                )
                yield f"{one}{_change((cause,), 0)[1:]}."
            elif " != " in cause.condition and self._refused:
                yield (
                    f"Declare Dim.AUTO or a range in which {cause.condition}, or"
                    f" c{_change((cause,), 0)[1:]}."
                )

    def _propose_dynamic(self, place: Place) -> str:
        """Return what to write in Job.dynamic for a dim that can have other sizes.

        It covers all dims that have its size.
        """
        if self._could.fixed(place):
            together, limits = [place], ""
        else:
            together = [
                other for other in self._could.same(place) if other[1] > 0 and self._fixed(other)
            ]
            least, most = self._could.limits(place)
            limits = (f", min={least}" if least > 2 else "") + (
                f", max={most}" if most is not None else ""
            )
        name, dim = together[0]
        # torch requires named dims to accept every size in their range; a condition that is not a
        # range contradicts that.
        simple = all(
            re.fullmatch(r"\S+ (<|<=|>|>=|==) \S+", cause.condition)
            for other in together
            for cause in self._causes(other)
        )
        text = (
            "Dim.AUTO"
            if not simple and not self._could.fixed(place)
            else f"Dim('{name.replace('.', '_')}_{dim}'{limits})"
        )
        dims_by_input: dict[str, list[str]] = {}
        for other, number in together:
            dims_by_input.setdefault(other, []).append(f"{number}: {text}")
        entries = [f"{other!r}: {{{', '.join(dims)}}}" for other, dims in dims_by_input.items()]
        return f"dynamic={{{', '.join(entries)}}}"


def _sentence(*steps: str) -> str:
    """Join steps into one sentence."""
    return (
        ", then ".join([steps[0], *(f"{step[0].lower()}{step[1:]}" for step in steps[1:])]) + "."
        if steps
        else ""
    )


def _change(causes: tuple[Cause, ...], number: int) -> str:
    """Return which line to change: one whose condition mentions `number`, if there is one."""
    if not causes:
        return "Change the model so that it accepts any length"
    cause = next((c for c in causes if re.search(rf"\b{number}\b", c.condition)), causes[0])
    return f"Change {cause.place}, which needs {cause.condition}"


def _sides(expression: str) -> tuple[str, str, str]:
    """Split an equation or inequation "Eq(a, b)" into left side, sign and right side.

    Anything else is returned as itself, "", "".
    """
    match = re.fullmatch(r"(Eq|Ne)\((.*)\)", expression)
    if match is None:
        return expression, "", ""
    depth = 0
    for index, character in enumerate(match[2]):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            return (
                match[2][:index],
                "==" if match[1] == "Eq" else "!=",
                match[2][index + 1 :].strip(),
            )
    return expression, "", ""
