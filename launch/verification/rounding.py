"""Measure how much rounding alone changes a graph's values, which bounds the error of a compiled
graph.

A compiler sums in another order, fuses multiplications with additions, and keeps low-precision
values in registers with more digits. The effect on a result depends on the graph and its inputs:
the gradient of a bias before a BatchNorm consists of rounding errors, and a comparison may have
another outcome. So the graph is run again with a random error of one unit in the last place of
every result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from trainload.capture.operators import is_collective
from trainload.capture.parity.distance import relative_distance
from trainload.launching.node.graph_comparison import EXPLAINED
from trainload.launching.verification.stored_copies import Copy, loaded

_RUNS = 2
"""Number of runs, of which the greatest distance counts."""
_FACTOR = 10.0
"""A compiled graph may differ by this many times that distance: a sum of many terms rounds more
than once.
"""
_FURTHER_RUNS = 6
"""The number of further runs before a graph is said to differ, with errors that are `_FACTOR` times
as large.

By chance both runs may move a value of few elements hardly at all. And a value may jump: the
gradient of a ReLU whose input is zero but for rounding takes another branch, in one run or another,
and in the compiled graph.
"""
_LANES = 8
"""Sums that a vectorised loop computes side by side."""
_FURTHER_FACTOR = 3.0
"""A compiled graph may differ by this many times the distance of a further run."""
_LAYER_NORMS = {"native_layer_norm", "native_layer_norm_backward"}
_GROUP_NORMS = {"native_group_norm", "native_group_norm_backward"}
_NORMALIZATIONS = {
    *_LAYER_NORMS,
    *_GROUP_NORMS,
    "native_batch_norm",
    "native_batch_norm_backward",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "batch_norm_backward",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
}
"""Operators that subtract means of their first argument: batch normalizations where no other family
is named.
"""
_CANCELLED = 0.1
"""Distance above which a value consists of rounding errors, because its terms cancel, as in the
mean of a normalized batch.
"""
_FACTOR_CANCELLED = 1000.0
"""Factor for such a value: its size depends on the order of a sum, by up to the square root of the
number of terms.
"""


class Rounding(Interpreter):
    """An interpreter that changes each element of a floating-point result by up to some units in
    its last place.

    Results that share memory with an input are left as they are: they are views, or are written in
    place. So are results of collectives, which are not complete before a wait.

    Args:
        module: the graph.
        seed: seed of the random changes.
        units: the greatest change.
        sums: a result in float32 of a sum of n terms is changed by up to sqrt(n / `_LANES`) units,
            if that is more: a compiler adds terms of one sign one after another, torch in pairs. A
            normalization subtracts such a sum, so all elements that it normalizes together are
            shifted by its error.

    Example:
        Rounding(graph, 0).run(*arguments)
    """

    def __init__(
        self, module: GraphModule, seed: int, units: float = 1.0, *, sums: bool = False
    ) -> None:
        super().__init__(module)
        self._seed, self._units, self._sums = seed, units, sums
        self._generators: dict[torch.device, torch.Generator] = {}

    def run_node(self, node: Node) -> Any:
        """Run a node and change its result."""
        value = super().run_node(node)
        if node.op != "call_function" or is_collective(node):
            return value
        inputs = [self.env.get(source) for source in node.all_input_nodes]
        shared = {_storage(each) for each in inputs} - {None}
        largest = max((each.numel() for each in inputs if isinstance(each, Tensor)), default=0)
        if (
            self._sums
            and _operator_name(node) in _NORMALIZATIONS
            and _is_nonempty_float32(value[0])
        ):
            value = (self._shift_by_mean_error(node, value[0]), *value[1:])
        return map_aggregate(value, lambda each: self._perturb(each, shared, largest))

    def _shift_by_mean_error(self, node: Node, value: Tensor) -> Tensor:
        """Return a normalization's result with the error of the mean of each group, relative to its
        root mean square.
        """
        shape, repeats = _groups(node, value.shape)
        units = max(self._units, math.sqrt(value.numel() / math.prod(shape) / _LANES))
        errors = self._random(shape, value.device)
        if repeats > 1:
            errors = errors.repeat_interleave(repeats, dim=1)
        return value + torch.finfo(value.dtype).eps * units * value.square().mean().sqrt() * errors

    def _perturb(self, value: Any, shared: set[int | None], largest: int) -> Any:
        if (
            not isinstance(value, Tensor)
            or not value.is_floating_point()
            or _storage(value) in shared
        ):
            return value
        units = self._units
        if self._sums and _is_nonempty_float32(value):
            units = max(units, math.sqrt(largest / value.numel() / _LANES))
        share = self._random(value.shape, value.device)
        return value * (1 + torch.finfo(value.dtype).eps * units * share).to(value.dtype)

    def _random(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return random integers from -1 to 1."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return torch.randint(-1, 2, tuple(shape), generator=self._generators[device], device=device)


def _groups(node: Node, shape: Sequence[int]) -> tuple[list[int], int]:
    """Return a shape with one entry for each group of elements that a normalization's mean is of.

    The second result is the number of consecutive channels of a group, by which to repeat dim 1.
    """
    name = _operator_name(node)
    args: Sequence[Any] = node.args
    backward = name.endswith("_backward")
    if name in _LAYER_NORMS:
        normalized = len(args[2 if backward else 1])
        return [*shape[:-normalized], *[1] * normalized], 1
    rest = [1] * (len(shape) - 2)
    if name in _GROUP_NORMS:
        groups = args[8 if backward else 6]
        return [shape[0], groups, *rest], shape[1] // groups
    return [1, shape[1], *rest], 1


def _operator_name(node: Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def _is_nonempty_float32(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel() > 0


def _storage(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def rounded_runs(
    module: GraphModule, make_arguments: Callable[[], Sequence[Tensor]], *, further: bool = False
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Yield the arguments and results of each run, one at a time.

    Args:
        module: the graph. All ranks that take part in its collectives must make all runs.
        make_arguments: returns the arguments of a run, which may be written in place.
        further: make the further runs instead of the first ones.
    """
    for seed in range(_RUNS, _RUNS + _FURTHER_RUNS) if further else range(_RUNS):
        arguments = make_arguments()
        with torch.no_grad():
            results = Rounding(module, seed, _FACTOR if further else 1.0, sums=further).run(
                *arguments
            )
        yield arguments, results


def explained_distances(
    expected: Sequence[Copy], runs: Sequence[Sequence[Copy]], *, further: bool = False
) -> list[float]:
    """Return the greatest relative distance that rounding explains, for each value.

    Args:
        expected: values of the interpreted graph.
        runs: the same values in each run of `rounded_runs`.
        further: they are of the further runs.
    """
    return [
        max(
            EXPLAINED,
            *(
                _explained_distance(relative_distance(loaded(copy), loaded(run[at])), further)
                for run in runs
            ),
        )
        for at, copy in enumerate(expected)
    ]


def _explained_distance(distance: float, further: bool) -> float:
    if further:
        return _FURTHER_FACTOR * _explained_distance(distance / _FACTOR, further=False)
    return distance * (_FACTOR if distance < _CANCELLED else _FACTOR_CANCELLED)
