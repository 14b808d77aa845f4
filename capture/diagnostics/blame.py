"""Turns exceptions of a capture into reports with the user's line, the cause and a rewrite."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from trainload.capture.diagnostics.rerun import Answers, Deed, Watched, watch
from trainload.capture.guards.guard_lines import listening
from trainload.capture.job.definition import Job
from trainload.capture.job.flat_function import Traced
from trainload.capture.program import GraphCapture
from trainload.capture.source import control_flow_rewrite, state_rewrite
from trainload.capture.source.causes import (
    ASKS,
    BACKWARD,
    BRANCH,
    BREAK,
    CONSTRAINT,
    DATA,
    DEVICES,
    DIFFERENCE,
    EAGER,
    GLOBAL,
    INPUT,
    INPUT_WRITE,
    MODULE,
    NO_AUTOGRAD,
    NO_FAKE_KERNEL,
    NO_GRADIENT,
    NUMBER,
    OTHER_SIZE,
    PARAMETER_WRITE,
    SPECIALISED,
    TENSOR_CLASS,
    VALUES,
    Cause,
    cause_of,
)
from trainload.capture.source.expression_spot import sharpened, spot_of
from trainload.capture.source.operator_registration import (
    custom_operator,
    derivative,
    fake_kernel,
)
from trainload.capture.source.source_place import (
    chain,
    place_here,
    place_of_error,
    place_of_function,
)
from trainload.capture.source.user_kernels import without_kernel
from trainload.core.errors import CaptureError, first_line, raised
from trainload.core.finding import Finding, Place
from trainload.core.logs import logged_suppress

_log = logging.getLogger(__name__)
_NO_RERUN = "the model was not run again for a more precise cause"

Attempt = Callable[[AbstractContextManager[object]], object]
"""Captures once more, inside a context."""

_ATTEMPTS = 8
_SECONDS = 30.0
"""Limits of the search for further causes: the number of captures, and when to start no more."""


def capture_error(
    graph: str,
    error: Exception,
    attempt: Attempt,
    function: Traced,
    batch: dict[str, Tensor],
    *,
    training: bool,
    runs: bool = True,
) -> CaptureError:
    """Return the report for an exception of torch.export or of the model's own code.

    It names the cause and all other obstacles that were found.

    Args:
        graph: name of the graph that was being captured.
        error: the exception.
        attempt: captures again.
        function: the function to capture. Its model's buffers change.
        batch: its input.
        training: True if it is traced with gradients.
        runs: True if the model can be run to find out more.
    """
    watched = Watched()
    findings = list(_findings_of_error(error, watched))
    # This runs the model's own code, which may raise anything; the first cause is reported in any
    # case.
    with logged_suppress(_log, _NO_RERUN, Exception, level=logging.DEBUG):
        if runs:
            with torch.set_grad_enabled(training):
                watched = watch(function, batch)
        findings = list(_deduplicate(_findings_of_error(error, watched)))
        findings = list(_deduplicate(_collect_findings(error, attempt, watched)))
    first = findings[0]
    problem = f"the {graph} graph cannot be captured: {first.sentence}"
    return CaptureError(
        problem,
        where=_place_text(first.place),
        got=_summarize(error),
        hint=first.advice,
        findings=findings,
    )


def replay_error(captured: GraphCapture, rows: int, by: str, error: Exception) -> CaptureError:
    """Return the report for an exception of a replay.

    `by` is "the model" for a replay in eager mode, "the captured graph" for one of the graph.
    """
    cause = cause_of(chain(error))
    place = place_of_error(error) if by == "the model" else None
    if by != "the model" and "functorch" in str(error):
        return _nested_transforms(captured.name, error)
    if cause is not NO_AUTOGRAD:
        cause = OTHER_SIZE
    return CaptureError(
        f"{by} fails on {rows} rows of the example batch in the {captured.name} graph:"
        f" {raised(error)}",
        where=_place_text(place) or f"graph {captured.name}",
        hint=cause.advice,
        findings=[_make_finding(cause, place, str(error), captured.inputs[0].name)],
    )


def _nested_transforms(graph: str, error: Exception) -> CaptureError:
    """Return the report for nested torch.func transforms that a graph cannot nest."""
    problem = "a torch.func transform is nested in another one, which a graph cannot represent"
    advice = (
        "Apply the inner transform to all rows at once: torch.func.jvp(f, (x,), (v,)) instead of"
        " vmap over the jvp of a row."
    )
    finding = Finding(
        BREAK.anchor,
        problem,
        advice,
        "y, tangent = torch.func.jvp(f, (x,), (v,))  # f of all rows",
        None,
    )
    return CaptureError(
        f"the {graph} graph cannot be captured: {problem}",
        where="Job",
        got=_summarize(error),
        hint=advice,
        findings=[finding],
    )


def own_generator() -> CaptureError:
    """Return the report for a random number drawn from the user's own generator.

    Call it below the user's frame.
    """
    place = place_here()
    problem = "forward draws from its own generator, whose state is not part of the model"
    advice = (
        "Omit `generator`: the random numbers of a graph depend on the run's seed, the step and the"
        " row."
    )
    finding = Finding(
        GLOBAL.anchor,
        problem,
        advice,
        "noise = torch.rand(size, device=x.device)  # no generator",
        place,
    )
    return CaptureError(problem, where=_place_text(place), hint=advice, findings=[finding])


def explain_difference(
    error: CaptureError, function: Traced, batch: dict[str, Tensor], compare: Callable[[], object]
) -> CaptureError:
    """Return a difference from eager mode, with the user's lines that may have caused it.

    Args:
        error: the difference.
        function: the captured function, in the mode of that graph. Its model's buffers change.
        batch: its input.
        compare: compares the graph with eager mode on `batch` alone.
    """
    if error.findings and error.findings[0].cause != NO_AUTOGRAD.anchor:
        if error.findings[0].cause != OTHER_SIZE.anchor:
            return error
        return (
            without_kernel(function, batch)
            or _example_failure(error, function, batch)
            or _graph_failure(compare)
            or error
        )
    watched = Watched()
    with logged_suppress(_log, _NO_RERUN, Exception, level=logging.DEBUG):
        watched = watch(function, batch)
    if error.findings:
        place = next(
            (
                p
                for name, p in watched.operators.items()
                if f'"{name}"' in error.findings[0].rewrite
            ),
            None,
        )
        findings = [replace(error.findings[0], place=place)]
        where = _place_text(place) or error.where
    else:
        for suspects in (
            (PARAMETER_WRITE, INPUT_WRITE),
            (MODULE, GLOBAL, DATA, BACKWARD),
            (BRANCH,),
            (ASKS,),
        ):
            findings = [_deed_finding(deed) for deed in watched.deeds if deed.cause in suspects]
            if findings:
                break
        else:
            findings = [Finding(DIFFERENCE.anchor, DIFFERENCE.sentence, error.hint)]
        where = error.where
    distinct = list(_deduplicate(findings))
    return CaptureError(
        error.problem,
        where=where,
        expected=error.expected,
        got=error.got,
        hint=error.hint,
        findings=distinct,
    )


def _example_failure(
    error: CaptureError, function: Traced, batch: dict[str, Tensor]
) -> CaptureError | None:
    """Return the report for a model that fails on the example batch too; None if it does not.

    The number of rows is not the cause then.
    """
    watched = Watched()
    with (
        logged_suppress(_log, _NO_RERUN, Exception, level=logging.DEBUG),
        torch.set_grad_enabled(function.get_submodule("model").training),
    ):
        watched = watch(function, batch)
    error_of_eager = watched.error or _backward_error(function, batch)
    if error_of_eager is None:
        return None
    finding = _eager_finding(error_of_eager)
    return CaptureError(
        error.problem, where=_place_text(finding.place), hint=EAGER.advice, findings=[finding]
    )


def _graph_failure(compare: Callable[[], object]) -> CaptureError | None:
    """Return the report for a graph that fails on the example batch too; None if it does not.

    The model itself runs on it.
    """
    try:
        compare()
    except CaptureError as error:
        if (
            error.__cause__ is None
            or not error.findings
            or error.findings[0].cause != OTHER_SIZE.anchor
        ):
            return None
        problem = (
            "the captured graph fails on the example batch, but the model does not:"
            f" {raised(error.__cause__)}"
        )
        finding = Finding(DIFFERENCE.anchor, problem, BREAK.advice, custom_operator(), None)
        return CaptureError(problem, where=error.where, hint=BREAK.advice, findings=[finding])
    return None


def _backward_error(function: Traced, batch: dict[str, Tensor]) -> Exception | None:
    """Return the exception of eager mode's backward on a batch, or None.

    None also if the model is not in train mode.
    """
    if not function.get_submodule("model").training:
        return None
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            loss = function(batch)[0]
            torch.autograd.grad(
                loss, [p for p in function.parameters() if p.requires_grad], allow_unused=True
            )
    except Exception as error:  # noqa: BLE001  # any exception is what the user would see
        return error
    return None


def _eager_finding(error: Exception) -> Finding:
    return Finding(
        EAGER.anchor, f"{EAGER.sentence}: {raised(error)}", EAGER.advice, "", place_of_error(error)
    )


def unfollowed(problem: str, advice: str) -> CaptureError:
    """Return the report for an operation in forward that a graph cannot represent.

    Call it below the user's frame.
    """
    place = place_here()
    return CaptureError(
        problem,
        where=_place_text(place),
        hint=advice,
        findings=[Finding(BREAK.anchor, problem, advice, "", place)],
    )


def of_hook(problem: str, advice: str) -> CaptureError:
    """Return the report for a hook of the model that a graph cannot represent."""
    return CaptureError(
        problem,
        where="Job.model",
        hint=advice,
        findings=[Finding(BACKWARD.anchor, problem, advice)],
    )


def own_backward(problem: str, advice: str) -> CaptureError:
    """Return the report for something in a backward that a graph cannot represent.

    Call it below the user's frame.
    """
    place = place_here()
    finding = Finding(BACKWARD.anchor, problem, advice, custom_operator(), place)
    return CaptureError(problem, where=_place_text(place), hint=advice, findings=[finding])


def no_gradient(job: Job) -> CaptureError:
    """Return the report for a loss that reaches no parameter; it names the loss function."""
    function = job.loss if job.loss is not None else job.model.forward
    place = place_of_function(function)
    code = (
        "loss = criterion(model(x), y)  # no .detach(), .item() or torch.no_grad() between the"
        " parameters and here"
    )
    finding = Finding(NO_GRADIENT.anchor, NO_GRADIENT.sentence, NO_GRADIENT.advice, code, place)
    return CaptureError(
        NO_GRADIENT.sentence,
        where=_place_text(place) or "Job.loss",
        hint=NO_GRADIENT.advice,
        findings=[finding],
    )


# From exceptions and deeds to findings


def _findings_of_error(error: Exception, watched: Watched) -> Iterator[Finding]:
    """Yield the findings of one exception: one cause, in one or more places."""
    text = "\n".join(str(exception) for exception in chain(error))
    cause, place = cause_of(chain(error)), sharpened(place_of_error(error))
    if cause in (BRANCH, NUMBER):
        cause = _branch_or_number(place, text)
    if cause is DATA:
        yield from _data_findings(watched) or [_make_finding(DATA, place, text)]
    elif cause is not None:
        yield _make_finding(cause, place, text, watched.input)
    elif watched.error is not None:
        yield _eager_finding(watched.error)
    else:
        yield Finding(
            BREAK.anchor,
            f"{BREAK.sentence}: {raised(error)}",
            BREAK.advice,
            custom_operator(),
            place,
        )


def _data_findings(watched: Watched) -> list[Finding]:
    deeds = [
        deed
        for deed in watched.deeds
        if deed.cause is DATA and deed.place is not None and ".data" in deed.place.expression
    ]
    return [
        _deed_finding(deed)
        for deed in sorted(
            deeds, key=lambda deed: deed.place.span if deed.place is not None else ()
        )
    ]


def _branch_or_number(place: Place | None, text: str) -> Cause:
    spot = spot_of(place)
    if spot is not None and spot.test_of is not None:
        return BRANCH
    if place is not None and re.match(r"(int|float|range|len|round)\(", place.expression):
        return NUMBER
    return (
        NUMBER
        if re.search(r"specialized integer|zuf?\d+ \(unhinted: zuf?\d+\)|\.item\(\)", text)
        else BRANCH
    )


def _make_finding(cause: Cause, place: Place | None, text: str, name: str = "name") -> Finding:
    spot = spot_of(place)
    rewrites: dict[str, Callable[[], str]] = {
        BRANCH.anchor: lambda: control_flow_rewrite.branch(spot),
        NUMBER.anchor: lambda: control_flow_rewrite.number(spot),
        VALUES.anchor: lambda: state_rewrite.values(spot),
        BREAK.anchor: custom_operator,
        TENSOR_CLASS.anchor: lambda: (
            "y = scaled(x)  # a function of ordinary tensors, instead of a class"
        ),
        DATA.anchor: lambda: state_rewrite.data(spot),
        SPECIALISED.anchor: lambda: control_flow_rewrite.size(spot, text, name),
        CONSTRAINT.anchor: lambda: control_flow_rewrite.size(spot, text, name),
        OTHER_SIZE.anchor: lambda: control_flow_rewrite.size(spot, "", name),
        NO_FAKE_KERNEL.anchor: lambda: fake_kernel(text),
        DEVICES.anchor: lambda: "torch.ones(size, device=x.device)",
        INPUT.anchor: lambda: 'Job(batch={"x": torch.tensor(values)}, ...)',
        BACKWARD.anchor: custom_operator,
        NO_AUTOGRAD.anchor: lambda: derivative(text),
        GLOBAL.anchor: lambda: state_rewrite.outside(spot),
        MODULE.anchor: lambda: state_rewrite.attribute(spot),
        INPUT_WRITE.anchor: lambda: state_rewrite.input_write(spot),
        PARAMETER_WRITE.anchor: lambda: state_rewrite.parameter_write(spot),
    }
    code = ""
    # the source may be anything; a place without a rewrite is better than none
    message = "no rewrite of the line is proposed"
    with logged_suppress(_log, message, Exception, level=logging.DEBUG):
        code = rewrites[cause.anchor]() if cause.anchor in rewrites else ""
    return Finding(cause.anchor, cause.sentence, cause.advice, code, place)


def _deed_finding(deed: Deed) -> Finding:
    if deed.cause is MODULE:
        spot = spot_of(deed.place)
        code = state_rewrite.attribute(spot) if deed.sure else state_rewrite.outside(spot)
        return Finding(
            MODULE.anchor,
            f"forward changes {deed.detail}, which a graph would freeze",
            MODULE.advice,
            code,
            deed.place,
        )
    finding = _make_finding(deed.cause, deed.place, "")
    if deed.cause is GLOBAL:
        sentence = (
            f"forward uses {deed.detail}, which is not part of the model and which a graph would"
            " freeze"
        )
        return replace(finding, sentence=sentence)
    return finding


def _deduplicate(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield one finding for each cause and line."""
    seen: set[tuple[str, str]] = set()
    for finding in findings:
        if (finding.cause, str(finding.place)) not in seen:
            seen.add((finding.cause, str(finding.place)))
            yield finding


# Further causes


def _collect_findings(error: Exception, attempt: Attempt, watched: Watched) -> list[Finding]:
    """Return all obstacles.

    Captures again with eager mode's numbers where they are known, until nothing new is found.
    """
    findings: list[Finding] = []
    passed: set[Place] = set()
    began = time.monotonic()
    current: Exception | None = error
    for _ in range(_ATTEMPTS):
        if current is None:
            break
        cause = cause_of(chain(current))
        if cause in (SPECIALISED, CONSTRAINT):
            findings += _size_findings(
                cause, current, attempt, Answers(watched, passed), watched.input
            )
            break
        findings += _findings_of_error(current, watched)
        ahead = (
            _suspected_conversions(place_of_error(current), watched) - passed
            if cause in (BRANCH, NUMBER)
            else set()
        )
        if not ahead or time.monotonic() - began > _SECONDS:
            break
        passed |= ahead
        current = _catch(attempt, Answers(watched, passed))
    return (
        findings
        + _data_findings(watched)
        + [_deed_finding(deed) for deed in watched.deeds if deed.sure]
    )


def _suspected_conversions(place: Place | None, watched: Watched) -> set[Place]:
    """Return the conversions that may have caused a failure at `place`.

    Those at this very place, else all that return numbers.
    """
    places = {at for at, _ in watched.answers}
    return (
        {place}
        if place in places
        else {at for at, name in watched.answers if name not in ("__bool__", "numpy")}
    )


def _catch(attempt: Attempt, inside: AbstractContextManager[object]) -> Exception | None:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            attempt(inside)
        except Exception as error:  # noqa: BLE001  # returned to the caller
            return error
    return None


def _size_findings(
    cause: Cause, error: Exception, attempt: Attempt, answers: Answers, name: str
) -> list[Finding]:
    """Return the findings of a violated constraint.

    torch raises it at the end of a trace, without a place.

    Captures again and records where sizes are compared.
    """
    guards = _Guards()
    _catch(attempt, guards.heard(answers))
    text = "\n".join(str(exception) for exception in chain(error))
    # a size used as a key fails in place
    key = place_of_error(error) if "unhashable" in text else None
    places = [key] if key is not None else guards.places
    return [_make_finding(cause, place, text, name) for place in places] or [
        _make_finding(cause, None, text, name)
    ]


class _Guards(logging.Handler):
    """Records the user's lines where torch decided something about a dynamic size, from its log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.places: list[Place] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Record the place: torch logs while the user's code is on the stack."""
        if (
            "[guard added]" in str(record.msg)
            and isinstance(record.args, tuple)
            and record.args[:1] == ("eval",)
        ):
            place = place_here()
            if place is not None and place not in self.places:
                self.places.append(place)

    @contextlib.contextmanager
    def heard(self, answers: Answers) -> Iterator[None]:
        """Record inside the block, in which `answers` is active."""
        with listening(self), answers:
            yield


def _place_text(place: Place | None) -> str:
    return "" if place is None else str(place)


def _summarize(error: Exception) -> str:
    """Return torch's message in a line; for violated constraints the first one."""
    constraint = re.search(r"^  - (.*)$", str(error), re.MULTILINE)
    return (
        re.sub(r"L\['(?:batch'\]\[')?(\w+)'\]\.size\(\)\[(\d+)\]", r"\1.shape[\2]", constraint[1])
        if constraint
        else first_line(error)
    )
