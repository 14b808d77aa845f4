"""Parses torch's "Suggested fixes" for declared sizes, and applies them to a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.export import Dim

from trainload.capture.job.declared_sizes import Shapes, affine, is_hint, limits_of, spelled
from trainload.capture.job.definition import Job
from trainload.capture.job.model_state import check_model, modes_kept, state_kept
from trainload.capture.tracing.targets import example_of, targets_of
from trainload.capture.tracing.trace import export_graph
from trainload.core.errors import CaptureError

MOST_ROUNDS = 8
"""Maximum number of exports of one graph.

torch finds most contradictions of a declaration at once, so two are usual.
"""

_REFUSED = re.compile(
    r"Constraints violated|Specializations unexpectedly required|user-specified range"
)
_REASON = re.compile(r"^\s+- (.+?)(?=\. If you're|\.?$|Specializations unexpectedly)", re.MULTILINE)
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_FIX = re.compile(
    rf"""\s*(?P<name>{_NAME})\ =\ (?:
        (?P<number>\d+)
      | Dim\('(?P=name)'(?:,\ min=(?P<min>\d+))?(?:,\ max=(?P<max>\d+|oo|int_oo))?\)
      | (?:(?P<factor>\d+)\*)?(?P<root>{_NAME})(?:\ (?P<sign>[+-])\ (?P<offset>\d+))?
    )\s*""",
    re.VERBOSE,
)
_SOURCE = re.compile(r"L\['batch'\]\['([^']+)'\]\.size\(\)\[(\d+)\]")
_HINTED = re.compile(
    r"You marked L\['batch'\]\['(?P<input>[^']+)'\]\.size\(\)\[(?P<dim>\d+)\] as dynamic but .*? a"
    r" constant \((?P<number>\d+)\)"
)


@dataclass(frozen=True, slots=True)
class Fix:
    """One suggestion: `text` as torch writes it ("seq = Dim('seq', max=16)"), about the dim `name`.

    The dim becomes `number`; or, if `root` is given, factor * root + offset; or a dim of its own
    from `least` to `most` (None: as declared).
    """

    name: str
    text: str
    number: int | None = None
    root: str | None = None
    factor: int = 1
    offset: int = 0
    least: int | None = None
    most: int | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class AppliedFix:
    """A suggestion that was applied.

    Attributes:
        graph: the graph that required it.
        suggestion: text of the suggestion.
        dims: the affected dims ("x[1]").
        before: the earlier declaration.
        after: the new declaration.
    """

    graph: str
    suggestion: str
    dims: tuple[str, ...]
    before: str
    after: str

    def __str__(self) -> str:
        return (
            f"{', '.join(self.dims)}: {self.before} became {self.after} for the {self.graph} graph"
        )


def refusals(error: CaptureError) -> tuple[str, ...]:
    """Return torch's reasons for rejecting the declared sizes, one sentence each.

    Empty if it rejects something else.
    """
    text = str(error.__cause__)
    if not _REFUSED.search(text):
        return ()
    readable = _SOURCE.sub(r"\1[\2]", text)
    return tuple(dict.fromkeys(_REASON.findall(readable))) or (error.got or error.problem,)


def suggested_fixes(error: CaptureError) -> tuple[Fix, ...]:
    """Return torch's suggestions. Lines in an unknown form are ignored; nothing is evaluated."""
    text = str(error.__cause__)
    fixes = [
        Fix(
            f"{m['input']}[{m['dim']}]",
            f"{m['input']}[{m['dim']}] = {m['number']}",
            int(m["number"]),
        )
        for m in _HINTED.finditer(text)
    ]
    _, heading, suggestions = text.partition("Suggested fixes:\n")
    for line in suggestions.split("\n\n")[0].splitlines() if heading else ():
        m = _FIX.fullmatch(line)
        if m is None:
            continue
        least, most = (
            int(m[key]) if m[key] and m[key].isdigit() else None for key in ("min", "max")
        )
        offset = int(m["offset"] or 0) * (-1 if m["sign"] == "-" else 1)
        number = int(m["number"]) if m["number"] else None
        fixes.append(
            Fix(
                m["name"],
                line.strip(),
                number,
                m["root"],
                int(m["factor"] or 1),
                offset,
                least,
                most,
            )
        )
    return tuple(fixes)


def with_suggested_fixes(job: Job) -> tuple[Job, tuple[AppliedFix, ...]]:
    """Return the job with sizes declared as torch suggests, and the changes.

    Only declarations that torch rejects are changed.

    Raises:
        JobError: if the job is inconsistent.
        CaptureError: if a graph cannot be captured, and no suggestion fixes it.
    """
    model = check_model(job.model)
    applied: list[AppliedFix] = []
    with modes_kept(model) as set_training:
        for target in targets_of(job):
            set_training(target.training)
            for round_number in range(MOST_ROUNDS):
                batch, shapes = example_of(job, target)
                try:
                    with state_kept(model):
                        export_graph(target, batch, shapes)
                    break
                except CaptureError as error:
                    changed, new = apply_fixes(suggested_fixes(error), shapes, target.name)
                    if not new or round_number + 1 == MOST_ROUNDS:
                        raise
                    job = replace(job, dynamic={**job.dynamic, **changed})
                    applied += new
    return job, tuple(applied)


def apply_fixes(
    fixes: tuple[Fix, ...], shapes: Shapes, graph: str
) -> tuple[Shapes, tuple[AppliedFix, ...]]:
    """Return `shapes` with the fixes applied, and the changes. A range is narrowed, never widened.

    Raises:
        CaptureError: if rows would depend on each other, or on other sizes.
    """
    by_name = {fix.name: fix for fix in fixes}
    roots = {
        root.__name__: root
        for dims in shapes.values()
        for spec in dims.values()
        if not is_hint(spec)
        for root in (_root(spec),)
    }
    changed: Shapes = {}
    places_by_change: dict[tuple[str, str, str], list[str]] = {}
    for name, dims in shapes.items():
        changed[name] = {}
        for dim, spec in dims.items():
            place = f"{name}[{dim}]"
            about = place if is_hint(spec) else _root(spec).__name__
            fix = by_name.get(about)
            new = (
                spec
                if fix is None
                else _make_affine(_fixed_dim(about, by_name, roots), *affine(spec))
            )
            changed[name][dim] = new
            if fix is not None and spelled(new) != spelled(spec):
                places_by_change.setdefault((fix.text, spelled(spec), spelled(new)), []).append(
                    place
                )
    _check_rows(changed, graph)
    return changed, tuple(
        AppliedFix(graph, text, tuple(places), old, new)
        for (text, old, new), places in places_by_change.items()
    )


def _root(spec: Any) -> Any:
    return getattr(spec, "root", spec)


def _fixed_dim(name: str, by_name: Mapping[str, Fix], roots: Mapping[str, Any]) -> Any:
    """Return the declaration of the dim `name` after the fixes.

    It is the dim itself, narrowed; a derived dim; or Dim.STATIC.
    """
    fix, old = by_name.get(name), roots.get(name)
    if fix is None:
        return old if old is not None else Dim(name)
    if fix.number is not None:
        return Dim.STATIC
    if fix.root is not None:
        # a = b, b = a ends here
        others = {other: entry for other, entry in by_name.items() if other != name}
        return _make_affine(_fixed_dim(fix.root, others, roots), fix.factor, fix.offset)
    low, high = limits_of(old) if old is not None else (None, None)
    least = max(fix.least or 0, low or 0)
    most = min((limit for limit in (fix.most, high) if limit is not None), default=None)
    return Dim.STATIC if least == most else Dim(name, min=least, max=most)


def _make_affine(dim: Any, factor: int, offset: int) -> Any:
    if dim is Dim.STATIC:
        return dim
    dim = dim if factor == 1 else factor * dim
    return dim if offset == 0 else dim + offset


def _check_rows(shapes: Shapes, graph: str) -> None:
    rows = next(iter(shapes.values()))[0]
    if is_hint(rows):
        return
    for name, dims in shapes.items():
        for dim, spec in dims.items():
            if (dim == 0 and hasattr(spec, "root")) or (
                dim > 0 and not is_hint(spec) and _root(spec).__name__ == _root(rows).__name__
            ):
                raise CaptureError(
                    f"the sizes that torch suggests for the {graph} graph depend on the number of"
                    " rows, which must be free",
                    where=f"Job.dynamic[{name!r}][{dim}]",
                    expected="a model that accepts any number of rows",
                    got=(
                        f"the batch dim {spelled(rows)}"
                        if dim == 0
                        else f"{spelled(spec)} together with the batch dim {spelled(rows)}"
                    ),
                    hint="Change the model; `trainload freeze --explain-shapes` names the line.",
                )
