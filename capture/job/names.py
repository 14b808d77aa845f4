"""Names of parameters, buffers, modules and inputs: data, of any printable text."""

from __future__ import annotations

import unicodedata

from torch import nn

from trainload.core.errors import JobError

LONGEST = 512
"""Maximum length of a dotted name in characters."""
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control, format, surrogates, line and paragraph separators."""


def is_part(text: str) -> bool:
    """Return True for a text that can be a part of a dotted name: printable, without dots."""
    return (
        bool(text)
        and "." not in text
        and not any(unicodedata.category(character) in _UNPRINTABLE for character in text)
    )


def is_dotted_name(text: str) -> bool:
    """Return True if a text can be the name of a parameter or a buffer."""
    return len(text) <= LONGEST and all(is_part(part) for part in text.split("."))


def check_names(model: nn.Module) -> None:
    """Check that a package can hold the names of a model's parameters and buffers.

    Raises:
        JobError: if it cannot.
    """
    for name, _ in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if not is_dotted_name(name):
            raise JobError(
                "the name cannot be stored in a package",
                where=f"Job.model: {name[:80]!r}",
                expected=f"at most {LONGEST} characters, without control or format characters",
                got=f"{len(name)} characters" if len(name) > LONGEST else repr(name[:80]),
                hint="Rename the module, parameter or buffer.",
            )
