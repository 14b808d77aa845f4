"""Names of adapted parameters in a package, and in the adapters of peft."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainload.core.errors import JobError
from trainload.core.suggestions import similar

WEIGHT = ".weight"
"""Suffix of the name of a linear layer's weight, after the layer's name."""


def source_prefix(weights: Sequence[str], parameters: Collection[str]) -> str:
    """Return what the names of an adapter's weights lack of those of a package's parameters: ""
    or, for a model that is a module of the job's, the module's name and a dot.

    Raises:
        JobError: the package does not have all of the weights, or has them several times.
    """
    first = weights[0]
    candidates = [
        name.removesuffix(first) for name in parameters if f".{name}".endswith(f".{first}")
    ]
    prefixes = [
        prefix for prefix in candidates if all(f"{prefix}{name}" in parameters for name in weights)
    ]
    if len(prefixes) == 1:
        return prefixes[0]
    if prefixes:
        raise JobError(
            "several modules of the job's model have all layers of the adapter",
            where="adapters.source",
            got=", ".join(prefix.removesuffix(".") or "the model" for prefix in prefixes),
        )
    prefix = candidates[0] if candidates else ""
    missing = next(name for name in weights if f"{prefix}{name}" not in parameters)
    raise JobError(
        "the package has no parameter of this layer of the adapter",
        where="adapters.source",
        expected=", ".join(similar(missing, list(parameters), 5)),
        got=missing,
        hint="The adapter belongs to another model.",
    )
