"""The weights of a run's checkpoint, as a package: for exports, which a run need not have finished
for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainload.autograd_trace.low_rank import LowRank
from trainload.core.errors import RequestError
from trainload.core.storage.places import Where
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.load import whole_parameter
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.run.opening import frozen_package
from trainload.launching.run.run_spec import RunSpec, read_spec
from trainload.launching.run.working_copy import viewed
from trainload.launching.settings.adapter_weights import with_adapter
from trainload.packaging.package import Package
from trainload.packaging.tensors.safetensors_file import TensorSpec
from trainload.packaging.tensors.weight_shards import stored_tensors
from trainload.packaging.weight_sources.replaced_weights import ReplacedWeights
from trainload.packaging.weight_sources.weight_source import SourceFile


@dataclass(frozen=True, slots=True)
class RunWeights:
    """Weights of a run after a step.

    Attributes:
        package: the run's frozen package with the weights of the checkpoint, adapters merged into
            them: what `launch --output` would write.
        frozen: the package as the run started with it.
        adapters: the run's adapters; () if it trains whole parameters.
        also: parameters that are trained beside the adapters.
        values: A and B of each adapter by name, and the parameters of `also`.
        buffers: buffers by name.
        step: number of updates.
    """

    package: Package
    frozen: Package
    adapters: Sequence[LowRank]
    also: frozenset[str]
    values: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    step: int


def read_run_weights(run: Where, step: int | None = None) -> RunWeights:
    """Open a checkpoint of a run.

    The weights are running means if the job keeps them, unless the run's setting `weights` is
    `last`, as in its output.

    Args:
        run: folder or URL of a run.
        step: number of updates of the checkpoint. None: the newest one.

    Raises:
        RequestError: the run has no such checkpoint.
        CheckpointError: the checkpoint has changed since it was written.
        StorageError: there is no run, or it cannot be reached.
        TrainloadError: an error of the run's package.
    """
    with viewed(run, journal=False) as files:
        spec = read_spec(files.folder)
        checkpoint = _checkpoint(spec, step)
    frozen = frozen_package(spec)
    settings = spec.overrides.adapters
    adapters = () if settings is None else settings.chosen(frozen.manifest)
    also = frozenset[str]() if settings is None else settings.trained_beside(frozen.manifest)
    mean = spec.weights == "mean"
    source = _CheckpointSource(checkpoint, adapters, mean, frozen)
    names = {name: name for name in source.tensors}
    weights = ReplacedWeights(frozen.manifest, lambda: frozen.weights, lambda: source, names)
    own = [name for adapter in adapters for name in (adapter.down, adapter.up)]
    values = {name: whole_parameter(checkpoint, name, mean=mean) for name in (*own, *sorted(also))}
    return RunWeights(
        replace(frozen, given=weights),
        frozen,
        adapters,
        also,
        values,
        checkpoint.buffers() if adapters else {},
        checkpoint.index.step,
    )


def _checkpoint(spec: RunSpec, step: int | None) -> Checkpoint:
    published = place_of(spec.place, spec.checkpoints).published()
    wanted = max(published, default=None) if step is None else step
    if wanted is None or wanted not in published:
        raise RequestError(
            "the run has no such checkpoint",
            where="step",
            expected=", ".join(map(str, sorted(published))) or "a run with a checkpoint",
            got="none" if wanted is None else str(wanted),
            hint="Checkpoints are removed as newer ones appear: see keep and keep_every.",
        )
    return Checkpoint.open(published[wanted])


class _CheckpointSource:
    """`WeightSource` of a checkpoint, with adapters merged into the weights.

    A tensor is read whole when a part of it is wanted, and the last one is kept.
    """

    def __init__(
        self, checkpoint: Checkpoint, adapters: Sequence[LowRank], mean: bool, package: Package
    ) -> None:
        self._checkpoint, self._mean = checkpoint, mean
        self._adapters = {adapter.weight: adapter for adapter in adapters}
        self._buffers: Mapping[str, Tensor] | None = None
        self._last: tuple[str, Tensor] | None = None
        held = {
            slot.parameter for bucket in checkpoint.index.buckets for slot in bucket.slots
        } | set(checkpoint.index.buffers)
        self._specs = {
            spec.name: spec
            for part in stored_tensors(package.manifest)
            for spec in part
            if spec.name in held
        }

    @property
    def where(self) -> str:
        """See `WeightSource.where`."""
        return str(self._checkpoint.path)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """See `WeightSource.tensors`."""
        return self._specs

    def files(self, names: set[str]) -> tuple[SourceFile, ...]:
        """See `WeightSource.files`: a checkpoint checks its own files."""
        return ()

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource.slice`."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self._read(name).reshape(math.prod(self._specs[name].shape)))
        return self._last[1][start:stop]

    def _read(self, name: str) -> Tensor:
        if name in self._checkpoint.index.buffers:
            if self._buffers is None:
                self._buffers = self._checkpoint.buffers()
            return self._buffers[name]
        tensor = whole_parameter(self._checkpoint, name, mean=self._mean)
        return with_adapter(self._checkpoint, tensor, self._adapters.get(name), mean=self._mean)
