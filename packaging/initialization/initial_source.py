"""The first values of a package's tensors as a source of weights."""

from __future__ import annotations

from functools import partial

import torch

from trainload.autograd_trace.initialization.drawn_values import drawn_values
from trainload.autograd_trace.initialization.elements import Elements, Read
from trainload.capture.initialization.initial_graphs import Initialization
from trainload.packaging.tensors.safetensors_file import TensorSpec
from trainload.packaging.weight_sources.weight_source import INIT, SourceFile


class InitialSource:
    """`WeightSource` that computes first values.

    Law: an element of a tensor is a function of the package, the seed, and its place in the tensor,
    whichever part of the tensor is read.

    Args:
        initialization: the package's first values.
        seed: seed of the random numbers: int64.
    """

    def __init__(self, initialization: Initialization, seed: int) -> None:
        self._initialization = initialization
        self._seed = seed
        self._tensors = {name: self._spec(name) for name in initialization.values}
        self._current: tuple[str, Elements] | None = None

    @property
    def where(self) -> str:
        """Name of the source, with the seed."""
        return f"{INIT} (seed {self._seed})"

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """See `WeightSource.tensors`."""
        return self._tensors

    def files(self, _names: set[str]) -> tuple[SourceFile, ...]:
        """Return nothing: the package has the graphs."""
        return ()

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource.slice`. What is kept of a tensor is freed when another is read."""
        if self._current is None or self._current[0] != name:
            self._current = None
            self._current = name, self._elements(name)
        return self._current[1].slice(start, stop)

    def check_headers(self) -> None:
        """Do nothing: the files were checked when they were read."""

    def _elements(self, name: str) -> Elements:
        value = self._initialization.values[name]
        graph = self._initialization.graphs[value.graph]

        draws: list[Read] = [
            partial(drawn_values, draw, number, self._seed)
            for draw, number in zip(graph.draws, value.draws, strict=True)
        ]
        constants = [self._initialization.constants[number] for number in value.constants]
        return Elements(graph.module, [*draws, *(each.__getitem__ for each in constants)])

    def _spec(self, name: str) -> TensorSpec:
        graph = self._initialization.graphs[self._initialization.values[name].graph]
        value = graph.result
        return TensorSpec(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
