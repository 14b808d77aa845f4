"""Write packages with weights from elsewhere."""

from __future__ import annotations

from pathlib import Path

from trainload.core.errors import RequestError
from trainload.core.storage.places import path_here
from trainload.launching.run.given_weights import given_weights, with_given
from trainload.packaging.package import Package
from trainload.packaging.signatures.policy import find_policies
from trainload.packaging.weight_sources.weight_source import INIT, source_of_weights
from trainload.packaging.write import with_weights


def fill(
    package: Package,
    source: str | Path | None,
    path: str | Path,
    *,
    partial: bool = False,
    seed: int | None = None,
) -> Package:
    """Write a package with the graphs of another one and weights from elsewhere.

    It is needed for what a launch with `weights_from` does not do: exports, adapters, releases.

    Args:
        package: package that gives everything but the weights. It may be abstract.
        source: weights, in the forms that `launch` accepts as `weights_from`; None for those that
            the package names. They are read one by one.
        path: folder of the new package, which does not exist.
        partial: True if the source may lack tensors, which keep the package's values, and may have
            other tensors.
        seed: seed of the source "init"; None for the package's.

    Returns:
        The new package, whose parent is `package`.

    Raises:
        RequestError: `seed` has no effect.
        WeightsError: the weights do not fit; with a table of the tensors.
        PolicyError: a policy of this machine forbids the use of the source.
        IntegrityError: a file is damaged.
        StorageError: the source cannot be reached, the path is taken, or the disk is full.

    Example:
        import safetensors.torch

        safetensors.torch.save_file(
            {name: package.weights.tensor(name) for name in package.weights.names()},
            "better.safetensors",
        )
        filled = trainload.fill(package, "better.safetensors", "filled.tl")
    """
    where, policies = source_of_weights(source) or package.default_weights, find_policies()
    if where is None:
        raise RequestError(
            "is missing, and the package names no source of weights",
            where="source",
            expected="weights in one of the forms of docs/guides/weights.md",
        )
    if seed is not None and where != INIT:
        raise RequestError(
            "it has no effect on weights that are read",
            where="seed",
            hint=f"Omit it, or pass the source {INIT!r}.",
        )
    given = given_weights(package, where, policies, partial=partial, seed=seed)
    filled = with_given(package, given, policies)
    weights = filled.weights
    return with_weights(
        filled, path_here(path), ((name, weights.tensor(name)) for name in weights.names())
    )
