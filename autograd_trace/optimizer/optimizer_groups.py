"""Find the parameters that an optimizer trains, and the group of each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import nn

from trainload.autograd_trace.graphs import GroupRecipe
from trainload.capture.program import Program
from trainload.core.errors import JobError


def group_parameters(
    model: nn.Module, trainable: Set[str], param_groups: Sequence[Mapping[str, Any]], where: str
) -> list[list[str]]:
    """Return the names of each group's trained parameters, sorted; a shared parameter has its
    owner's name.

    Args:
        model: the job's model.
        trainable: names of the parameters that get a gradient.
        param_groups: groups of the optimizers that follow one gradient.
        where: their place in the job, for errors.

    Raises:
        JobError: a group holds a tensor that is not a parameter of the model or is in another
            group, or nothing is trained.
    """
    names = {id(p): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    groups: list[list[str]] = []
    seen: set[str] = set()
    for number, group in enumerate(param_groups):
        trained = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise JobError(
                    "contains a tensor that is not a parameter of the model",
                    where=f"{where}: group {number}",
                    got=f"shape {tuple(parameter.shape)}",
                    hint="Build the optimizer from the model that is passed to the function.",
                )
            if name in seen:
                raise JobError(
                    "a parameter is in two parameter groups",
                    where=f"{where}: group {number}",
                    got=name,
                )
            if name in trainable and name not in trained:
                trained.append(name)
        seen.update(trained)
        groups.append(sorted(trained))
    if not seen:
        raise JobError(
            "the optimizer trains no parameter", where=where, hint="Pass it model.parameters()."
        )
    return groups


def with_trained(program: Program, groups: Sequence[GroupRecipe]) -> Program:
    """Return the program with only those parameters marked as trainable that are in an optimizer.

    So no step graph computes a gradient for the others, and no plan stores one. Warns about
    parameters that would have had a gradient.
    """
    trained = {name for group in groups for name in group.parameters}
    left_out = sorted(
        {p.name for p in program.parameters if p.trainable and p.alias_of is None} - trained
    )
    if not left_out:
        return program
    warnings.warn(
        f"{len(left_out)} parameters require a gradient but are in no optimizer, so they are not"
        f" trained: {', '.join(left_out)}",
        stacklevel=4,
    )
    parameters = tuple(
        replace(p, trainable=p.trainable and (p.alias_of or p.name) in trained)
        for p in program.parameters
    )
    graphs = {
        name: (
            graph
            if graph.reached is None
            else replace(graph, reached=tuple(n for n in graph.reached if n in trained))
        )
        for name, graph in program.graphs.items()
    }
    return replace(program, parameters=parameters, graphs=graphs)
