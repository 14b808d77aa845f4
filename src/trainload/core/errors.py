"""The exceptions of trainload.

    TrainloadError
    ├── RequestError (ValueError)       the request was wrong; the command line exits with 2
    │   ├── JobError                    a job's description is inconsistent
    │   ├── CaptureError                the model cannot be captured soundly
    │   ├── PackageError                a package cannot be used
    │   │   ├── IntegrityError          its bytes are not what its manifest says
    │   │   ├── UnsafePackageError      it contains something that the format does not allow
    │   │   ├── SignatureError          it is not signed as required, or a key cannot be used
    │   │   └── PolicyError             a policy forbids its use
    │   ├── WeightsError                weights from elsewhere cannot be used for a package
    │   ├── PassError                   a pass cannot be applied, or changes what is computed
    │   ├── DataError                   a data set does not fit the package's inputs
    │   │   └── MissingDataError        its files are missing
    │   ├── PlanError                   no plan can be made, or a plan does not fit its package
    │   ├── CompileError                a graph would run interpreted, and the run requires compiled
    │   ├── ClusterError                the plan does not fit on the cluster
    │   ├── StorageError                a path is taken, missing, not writable or full
    │   │   └── ConflictError           another writer made a conflicting change first
    │   └── VersionError                the installed torch is not supported
    └── WorkError (RuntimeError)        the work failed; the command line exits with 1
        ├── TrainingError               a run ended before its last step
        │   ├── DivergedError           a loss, or a gradient, is not finite
        │   ├── OutOfMemoryError        a rank could not allocate the memory that its plan needs
        │   └── LostClusterError        its cluster no longer responds
        ├── CheckpointError             no checkpoint could be written or read
        └── RunInterrupted              the run was asked to stop

A message says where, what was expected, what was found, and how to fix it. It contains no
credentials (`redaction.py`). All exceptions can be pickled, since they travel from workers to the
driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypedDict, Unpack

from trainload.core.finding import Finding, page
from trainload.core.redaction import redacted


class Details(TypedDict, total=False):
    """Keyword arguments of every error."""

    where: str
    expected: str
    got: str
    hint: str


class TrainloadError(Exception):
    """Base of all errors of this library.

    Args:
        problem: one sentence that says what is wrong.
        where: the file, line, parameter or option.
        expected: the valid values or form.
        got: the value that was found.
        hint: a hint that says how to fix it.

    Attributes:
        work_began: True if a run had made steps before this error ended it, so that the command
            line exits with 1, whatever the class.
    """

    work_began = False

    def __init__(
        self, problem: str, *, where: str = "", expected: str = "", got: str = "", hint: str = ""
    ) -> None:
        self.problem = redacted(problem)
        self.where = redacted(where)
        self.expected = redacted(expected)
        self.got = redacted(got)
        self.hint = redacted(hint)
        super().__init__(self.problem)

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        details = [
            f"{word} {value}"
            for word, value in (("expected", self.expected), ("got", self.got))
            if value
        ]
        if details:
            text += f" ({', '.join(details)})"
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.problem, self._details())

    def _details(self) -> dict[str, Any]:
        """Return the constructor's keyword arguments."""
        return {"where": self.where, "expected": self.expected, "got": self.got, "hint": self.hint}

    @classmethod
    def _of(cls, problem: str, details: dict[str, Any]) -> Self:
        return cls(problem, **details)


def _rebuild(kind: type[TrainloadError], problem: str, details: dict[str, Any]) -> TrainloadError:
    return kind._of(problem, details)


def printable(text: str) -> str:
    """Return a text with its unprintable characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class RequestError(TrainloadError, ValueError):
    """The request was wrong: nothing was done."""


class JobError(RequestError):
    """A job's description is inconsistent."""


class CaptureError(RequestError):
    """The model cannot be captured soundly.

    Args:
        problem: one sentence that says what is wrong.
        details: where, expected, got, hint: as for every error.
        findings: causes in the user's source, the first one first. With them the message is a
            multi-line report: see `trainload.core.finding`.
    """

    def __init__(
        self, problem: str, *, findings: Sequence[Finding] = (), **details: Unpack[Details]
    ) -> None:
        super().__init__(problem, **details)
        self.findings = tuple(findings)

    def __str__(self) -> str:
        if not self.findings:
            return super().__str__()
        headline = f"{self.where}: {self.problem}" if self.where else self.problem
        details = (
            f"Expected {self.expected}; got {self.got}"
            if self.expected
            else f"torch says: {self.got}"
            if self.got
            else ""
        )
        return page(headline.rstrip(".") + ".", self.findings, details)

    def _details(self) -> dict[str, Any]:
        return {**super()._details(), "findings": self.findings}


class PackageError(RequestError):
    """A package cannot be used.

    The message is one line, with unprintable characters escaped, since names in a package may be
    hostile.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class IntegrityError(PackageError):
    """A package's bytes are not what its manifest says."""


class WeightsError(RequestError):
    """Weights from elsewhere cannot be used for a package.

    Args:
        problem: one sentence that says what is wrong.
        details: where, expected, got, hint: as for every error.
        table: lines of the tensors that do not fit, which follow the message.
    """

    def __init__(
        self, problem: str, *, table: Sequence[str] = (), **details: Unpack[Details]
    ) -> None:
        super().__init__(problem, **details)
        self.table = tuple(map(printable, table))

    def __str__(self) -> str:
        return "\n".join([printable(super().__str__()), *(f"  {line}" for line in self.table)])

    def _details(self) -> dict[str, Any]:
        return {**super()._details(), "table": self.table}


class UnsafePackageError(PackageError):
    """A package contains something that the format does not allow."""


class SignatureError(PackageError):
    """A package is not signed as required, or a key cannot be used."""


class PolicyError(PackageError):
    """A policy forbids the use of a package, or cannot be read."""


class PassError(RequestError):
    """A pass cannot be applied, or changes what is computed."""


class DataError(RequestError):
    """A data set does not fit the package's inputs."""


class MissingDataError(DataError):
    """The files of a data set are missing."""


class PlanError(RequestError):
    """No plan can be made, or a plan does not fit its package."""


class CompileError(RequestError):
    """A graph would run interpreted, and the run requires compiled ones."""


class ClusterError(RequestError):
    """The plan does not fit on the cluster."""


class StorageError(RequestError):
    """A path is taken, missing, not writable or full."""


class ConflictError(StorageError):
    """Another writer made a conflicting change first; nothing was done."""


class VersionError(RequestError):
    """The installed torch is not supported."""


class WorkError(TrainloadError, RuntimeError):
    """The work failed."""


class TrainingError(WorkError):
    """A run ended before its last step."""


class DivergedError(TrainingError):
    """A loss, or a gradient, is not finite."""


class OutOfMemoryError(TrainingError):
    """A rank could not allocate the memory that its plan needs."""


class LostClusterError(TrainingError):
    """A run's cluster no longer responds; the run can be resumed on a cluster that does."""


class CheckpointError(WorkError):
    """No checkpoint could be written or read."""


class RunInterrupted(WorkError):
    """The run was asked to stop."""


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an exception's text, or its class, up to 200
    characters.
    """
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )[:200]


def raised(error: BaseException) -> str:
    """Describe an exception as "ValueError: the first line of its text", or "AssertionError" if it
    has no text.
    """
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name
