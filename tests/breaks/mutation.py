"""Definition of a break of the code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """A plausible bug.

    Attributes:
        law: the law that it violates.
        name: description of the bug.
        file: path relative to the repository's root.
        old: text that occurs exactly once in the file.
        new: text that replaces `old`.
        test: pytest node that must fail: a test of the law or, if that is faster, of the code's
            stage ("../capture/..."); relative to tests/laws.
    """

    law: int
    name: str
    file: str
    old: str
    new: str
    test: str
