"""The result of a run, read from its journal and its last checkpoint."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import StorageError, TrainingError, TrainloadError
from trainload.core.paths import check_name
from trainload.core.storage.places import Where
from trainload.core.writable_folder import check_writable_folder
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.reader import Checkpoint, usable_checkpoint
from trainload.launching.run.given_weights import with_given
from trainload.launching.run.journal import Event, stream_events
from trainload.launching.run.run_changes import settings_of
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.settings.adapter_weights import merged, write_adapters
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import TrainingEntry
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.package import Package, open_package, read_manifest
from trainload.packaging.write import with_weights


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a finished run.

    Attributes:
        run_dir: the run's folder or URL.
        steps: number of updates.
        first_loss: training loss of the first step.
        last_loss: training loss of the last step.
        evaluations: {step, loss, metrics, seconds} of each evaluation on the held-out data, in
            order.
        seconds: stage -> duration in seconds.
        restarts: number of restarts of the workers.
        checkpoint: folder or URL of the last checkpoint.
        output: path of the package with the trained weights, if one was requested.
        output_digest: digest of that package.

    Example:
        result = trainload.launch(
            package, plan, "train.parquet", run_dir="runs/first", output="trained.tl"
        )
        print(result.last_loss, result.checkpoint, result.output)
    """

    run_dir: Where
    steps: int
    first_loss: float
    last_loss: float
    evaluations: Sequence[dict[str, Any]]
    seconds: dict[str, float]
    restarts: int
    checkpoint: Where
    output: Path | None = None
    output_digest: str | None = None


def finish(spec: RunSpec, package: Package) -> RunResult:
    """Write the outputs of a run, and return its result.

    The outputs are the adapters, if there are any, and the trained package, if the run has an
    output path, with adapters merged into its weights.

    Args:
        spec: the run.
        package: package as it was frozen.

    Raises:
        TrainingError: the run has no complete checkpoint.
        StorageError: the output's path exists, the disk is full, or the checkpoints cannot be
            reached.
    """
    package = with_given(package, spec.given, spec.policies)
    place = place_of(spec.run_dir, spec.checkpoints)
    usable = usable_checkpoint(place, patience=spec.storage_patience)
    if usable.path is None:
        raise TrainingError(
            "the run has no usable checkpoint",
            where=place.where,
            got="; ".join(usable.rejected) or "none",
        )
    checkpoint = Checkpoint.open(usable.path)
    mean = spec.weights == "mean"
    adapter_settings = spec.overrides.adapters
    adapters = () if adapter_settings is None else adapter_settings.chosen(package.manifest)
    if adapters:
        write_adapters(checkpoint, adapters, spec.folder, mean=mean)
    trained = None
    if spec.output is not None:
        tensors = chain(merged(checkpoint, adapters, mean=mean), checkpoint.buffers().items())
        trained = _write_trained(package, spec, tensors, _training_entry(spec, checkpoint))
    totals = _JournalTotals(stream_events(spec.folder))
    return RunResult(
        run_dir=spec.folder if spec.work_dir is None else spec.run_dir,
        steps=checkpoint.index.step,
        first_loss=totals.first[1],
        last_loss=totals.last[1],
        evaluations=[totals.evaluations[s] for s in sorted(totals.evaluations)],
        seconds={name: round(value, 3) for name, value in totals.seconds.items()},
        restarts=max(0, totals.starts - 1),
        checkpoint=usable.path,
        output=None if trained is None else trained.path,
        output_digest=None if trained is None else trained.digest,
    )


def check_output(spec: RunSpec, *, new: bool) -> None:
    """Check that the trained package can be written.

    A resumed run may have been killed after it wrote its output; `finish` compares the existing
    one.

    Raises:
        StorageError: something else exists there, or the folder is not writable.
    """
    if spec.output is None:
        return
    check_name(Path(spec.output))
    folder = Path(spec.output).parent
    if not folder.is_dir():
        raise StorageError(
            "there is no such folder",
            where=str(folder),
            hint="Create it, or choose another --output.",
        )
    check_writable_folder(
        folder, "the trained package cannot be written there", "Choose another --output."
    )
    if not Path(spec.output).exists() or (
        not new and _parent_digest(Path(spec.output)) == spec.digest
    ):
        return
    raise StorageError(
        "it exists already", where=spec.output, hint="Choose another --output, or remove it."
    )


def _parent_digest(path: Path) -> str | None:
    """Return the digest of the package from which a package was trained; None if there is none, or
    no package at this path.
    """
    try:
        return Manifest.from_bytes(read_manifest(path), MANIFEST).parent
    except (OSError, TrainloadError):
        return None


def _training_entry(spec: RunSpec, checkpoint: Checkpoint) -> TrainingEntry:
    """Return the trained package's record of the run."""
    index = checkpoint.index
    return TrainingEntry(steps=index.step, data=index.data.fingerprint, changed=settings_of(spec))


def _write_trained(
    package: Package, spec: RunSpec, tensors: Iterable[tuple[str, Tensor]], training: TrainingEntry
) -> Package:
    """Write a run's output.

    If the same output exists already, because the run was killed after writing it, it is kept.

    Raises:
        StorageError: something else exists there.
    """
    assert spec.output is not None, "an output was asked for"
    output, names = Path(spec.output), spec.overrides.trained(package.manifest)
    if not output.exists():
        return with_weights(package, output, tensors, training=training, trained=names)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        again = with_weights(
            package, Path(folder) / output.name, tensors, training=training, trained=names
        )
        if sha256_bytes(read_manifest(output)) != again.digest:
            raise StorageError(
                "the run's result cannot be written: another file or folder is in its place",
                where=str(output),
                expected=f"nothing, or the package {again.digest}",
                hint="Move it, then resume the run.",
            )
    return open_package(output, namespaces=package.namespaces)


class _JournalTotals:
    """Summary of a whole journal, computed in one pass. If a step was repeated, its last occurrence
    counts.

    Attributes:
        first: (step, loss) of the first step.
        last: (step, loss) of the last step.
        evaluations: step -> data of its evaluation.
        seconds: stage -> seconds in all attempts.
        starts: number of attempts.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.first, self.last = (math.inf, math.nan), (-math.inf, math.nan)
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.starts = 0
        for event in events:
            self._add(event)

    def _add(self, event: Event) -> None:
        data = event.data
        match event.kind:
            case "start":
                self.starts += 1
            case "stage" if "seconds" in data:
                self._add_seconds(str(data["name"]), data)
            case "eval":
                self.evaluations[int(data["step"])] = dict(data)
                self._add_seconds("evaluation", data)
            case "step":
                step = (int(data["step"]), float(data["loss"]))
                self.first = step if step[0] <= self.first[0] else self.first
                self.last = step if step[0] >= self.last[0] else self.last
                self._add_seconds("steps", data)

    def _add_seconds(self, name: str, data: Mapping[str, Any]) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + float(data["seconds"])
