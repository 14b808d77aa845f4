"""What a break of the code is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug that somebody could make.

    Attributes:
        law: the law that it breaks.
        name: what is wrong.
        file: relative to the repository's root.
        old: text that occurs exactly once in it.
        new: what stands there instead.
        test: a pytest node that must fail, one of its law's or, quicker, of its stage's
            ("../capture/..."); relative to tests/laws.
    """

    law: int
    name: str
    file: str
    old: str
    new: str
    test: str
