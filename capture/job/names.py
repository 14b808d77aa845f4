"""Names of parameters, buffers, modules and inputs: data, which any text may be that can be printed."""

from __future__ import annotations

import unicodedata

from torch import nn

from trainload.core.errors import JobError

LONGEST = 512
"""Characters of a dotted name."""
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of control and format characters, surrogates, and separators of lines and paragraphs."""


def is_part(text: str) -> bool:
    """Return whether a text may stand between the dots of a name: it is not empty, holds no dot, and can be printed."""
    return bool(text) and "." not in text and not any(unicodedata.category(character) in _UNPRINTABLE for character in text)


def is_dotted_name(text: str) -> bool:
    """Return whether a text can be the name of a parameter or a buffer."""
    return len(text) <= LONGEST and all(is_part(part) for part in text.split("."))


def check_names(model: nn.Module) -> None:
    """Check that a package can hold the names of a model's parameters and buffers.

    Raises:
        JobError: it cannot.
    """
    for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if not is_dotted_name(name):
            raise JobError(
                "a name that a package cannot hold",
                where=f"Job.model: {name[:80]!r}",
                expected=f"at most {LONGEST} characters, none of which is a control or format character",
                got=f"{len(name)} characters" if len(name) > LONGEST else repr(name[:80]),
                hint="Name the module, parameter or buffer otherwise.",
            )
