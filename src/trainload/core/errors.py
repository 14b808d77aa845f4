"""Every exception that trainload raises for people.

    TrainloadError
    ├── RequestError (ValueError)       the request was wrong; the command line exits with 2
    │   ├── JobError                    a job's description does not hold together
    │   ├── CaptureError                the model cannot be captured soundly
    │   ├── PackageError                a package cannot be used
    │   │   ├── IntegrityError          its bytes are not what its manifest says
    │   │   ├── UnsafePackageError      it holds something that this format does not allow
    │   │   ├── SignatureError          it is not signed as it must be, or a key cannot be used
    │   │   └── PolicyError             a policy does not let it be used
    │   ├── PassError                   a pass cannot be applied, or changes what is computed
    │   ├── DataError                   a data set does not fit the package's inputs
    │   │   └── MissingDataError        its files are not there
    │   ├── PlanError                   no plan can be made, or a plan does not fit its package
    │   ├── CompileError                a graph would run interpreted, and the run requires compiled ones
    │   ├── ClusterError                the cluster cannot hold the plan
    │   ├── StorageError                a path is taken, missing, not writable or full
    │   │   └── ConflictError           somebody else changed first what this was to change
    │   └── VersionError                the installed torch is not supported
    └── WorkError (RuntimeError)        the work failed; the command line exits with 1
        ├── TrainingError               a run ended before its last step
        │   ├── DivergedError           a loss, or a gradient, is not finite
        │   ├── OutOfMemoryError        a rank could not have the memory that its plan needs
        │   └── LostClusterError        its cluster does not answer any more
        ├── CheckpointError             no checkpoint could be written or read
        └── RunInterrupted              somebody asked the run to stop

A message says where, what was expected, what was found, and what to do about it, and holds no credentials (`redaction.py`). All of them
survive pickling, since they travel from workers to the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from trainload.core.finding import Finding, page
from trainload.core.redaction import redacted


class TrainloadError(Exception):
    """Base of all errors of this library.

    Args:
        problem: one sentence that says what is wrong.
        where: the file, line, parameter or option that it concerns.
        expected: what would have been right.
        got: what was found instead.
        hint: what to do about it.

    Attributes:
        work_began: a run had made steps when this ended it, so that the command line exits with 1 whatever the class.
    """

    work_began = False

    def __init__(self, problem: str, *, where: str = "", expected: str = "", got: str = "", hint: str = "") -> None:
        self.problem = redacted(problem)
        self.where = redacted(where)
        self.expected = redacted(expected)
        self.got = redacted(got)
        self.hint = redacted(hint)
        super().__init__(self.problem)

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        told = [f"{word} {value}" for word, value in (("expected", self.expected), ("got", self.got)) if value]
        if told:
            text += f" ({', '.join(told)})"
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.problem, self._details())

    def _details(self) -> dict[str, Any]:
        """The constructor's keywords."""
        return {"where": self.where, "expected": self.expected, "got": self.got, "hint": self.hint}

    @classmethod
    def _of(cls, problem: str, details: dict[str, Any]) -> Self:
        return cls(problem, **details)


def _rebuild(kind: type[TrainloadError], problem: str, details: dict[str, Any]) -> TrainloadError:
    return kind._of(problem, details)


class RequestError(TrainloadError, ValueError):
    """The request was wrong: nothing was done."""


class JobError(RequestError):
    """A job's description does not hold together."""


class CaptureError(RequestError):
    """The model cannot be captured soundly.

    Args:
        problem, where, expected, got, hint: as for every error.
        findings: its causes in the user's source, the first one first. With them the message is a page: see `trainload.core.finding`.
    """

    def __init__(
        self, problem: str, *, where: str = "", expected: str = "", got: str = "", hint: str = "", findings: Sequence[Finding] = ()
    ) -> None:
        super().__init__(problem, where=where, expected=expected, got=got, hint=hint)
        self.findings = tuple(findings)

    def __str__(self) -> str:
        if not self.findings:
            return super().__str__()
        headline = f"{self.where}: {self.problem}" if self.where else self.problem
        details = f"Expected {self.expected}; got {self.got}" if self.expected else f"torch says: {self.got}" if self.got else ""
        return page(headline.rstrip(".") + ".", self.findings, details)

    def _details(self) -> dict[str, Any]:
        return {**super()._details(), "findings": self.findings}


class PackageError(RequestError):
    """A package cannot be used. The message is one line: names in a package may be hostile, so what cannot be printed is escaped."""

    def __str__(self) -> str:
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in super().__str__())


class IntegrityError(PackageError):
    """A package's bytes are not what its manifest says."""


class UnsafePackageError(PackageError):
    """A package holds something that the format does not allow."""


class SignatureError(PackageError):
    """A package is not signed as it must be, or a key cannot be used."""


class PolicyError(PackageError):
    """A policy does not let a package be used, or cannot be read."""


class PassError(RequestError):
    """A pass cannot be applied, or changes what is computed."""


class DataError(RequestError):
    """A data set does not fit the package's inputs."""


class MissingDataError(DataError):
    """The files of a data set are not there."""


class PlanError(RequestError):
    """No plan can be made, or a plan does not fit its package."""


class CompileError(RequestError):
    """A graph would run interpreted, and the run requires compiled ones."""


class ClusterError(RequestError):
    """The cluster cannot hold the plan."""


class StorageError(RequestError):
    """A path is taken, missing, not writable or full."""


class ConflictError(StorageError):
    """Somebody else changed first what this was to change; nothing was done."""


class VersionError(RequestError):
    """The installed torch is not supported."""


class WorkError(TrainloadError, RuntimeError):
    """The work failed."""


class TrainingError(WorkError):
    """A run ended before its last step."""


class DivergedError(TrainingError):
    """A loss, or a gradient, is not finite."""


class OutOfMemoryError(TrainingError):
    """A rank could not have the memory that its plan needs."""


class LostClusterError(TrainingError):
    """A run's cluster does not answer any more; the run can be resumed when one does."""


class CheckpointError(WorkError):
    """No checkpoint could be written or read."""


class RunInterrupted(WorkError):
    """Somebody asked the run to stop."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text that says something, or its class where none does; at most 200 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def raised(error: BaseException) -> str:
    """Return what was raised as "ValueError: the first line of its text", or "AssertionError" where it has none."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name
