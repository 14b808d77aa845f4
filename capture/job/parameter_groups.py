"""Parameter groups for an optimizer, chosen by the parameters' names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from trainload.core.errors import JobError
from trainload.core.suggestions import did_you_mean


def parameter_groups(
    model: torch.nn.Module,
    patterns: Mapping[str, Mapping[str, Any]],
    rest: Mapping[str, Any] | None = None,
    *,
    only: bool = False,
) -> list[dict[str, Any]]:
    """Sort a model's trained parameters into groups, for `torch.optim`'s optimizers.

    Args:
        model: its parameters with `requires_grad` are sorted; a tied one has several names, and is
            in one group.
        patterns: pattern -> options of its group. `*` matches any characters, `?` one character,
            `[ab]` one of those listed; case matters. A parameter belongs to the first pattern that
            matches one of its names.
        rest: options of the group of all others; None: the optimizer's defaults.
        only: leave out all others, to be trained by another optimizer or not at all.

    Returns:
        One group for each pattern, in order, then one for the rest if there are any.

    Raises:
        JobError: if a pattern selects no parameter.

    Example:
        groups = trainload.parameter_groups(
            model, {"*.bias": {"weight_decay": 0.0}}, rest={"weight_decay": 0.1}
        )
        optimizer = torch.optim.AdamW(groups, lr=3e-4)
    """
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    chosen: dict[str, list[torch.nn.Parameter]] = {pattern: [] for pattern in patterns}
    others: list[torch.nn.Parameter] = []
    for parameter, aliases in names.items():
        fits = (p for p in patterns if any(fnmatchcase(name, p) for name in aliases))
        chosen.get(next(fits, ""), others).append(parameter)
    for pattern, members in chosen.items():
        if not members:
            fitting = [
                name for aliases in names.values() for name in aliases if fnmatchcase(name, pattern)
            ]
            raise JobError(
                f"the pattern {pattern!r} selects no parameter"
                + (", because earlier patterns match all of its parameters" if fitting else ""),
                where="parameter_groups",
                expected="a part of " + ", ".join(aliases[0] for aliases in names.values()),
                got=", ".join(fitting) or "no match",
                hint="" if fitting else did_you_mean(pattern, (each[0] for each in names.values())),
            )
    groups: list[dict[str, Any]] = [
        {**patterns[pattern], "params": members} for pattern, members in chosen.items()
    ]
    return groups if only or not others else [*groups, {**(rest or {}), "params": others}]
