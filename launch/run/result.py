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
from trainload.core.storage.places import Where, is_url
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
from trainload.packaging.package import Package, read_manifest
from trainload.packaging.stores.package_at_url import (
    check_writable_url,
    digest_at,
    manifest_at,
    send_package,
)
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
        output: path or URL of the package with the trained weights, if one was requested.
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
    output: Where | None = None
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
    digest = None
    if spec.output is not None:
        tensors = chain(merged(checkpoint, adapters, mean=mean), checkpoint.buffers().items())
        digest = _write_trained(package, spec, tensors, _training_entry(spec, checkpoint))
    totals = _JournalTotals(stream_events(spec.folder))
    return RunResult(
        run_dir=spec.place,
        steps=checkpoint.index.step,
        first_loss=totals.first[1],
        last_loss=totals.last[1],
        evaluations=[totals.evaluations[s] for s in sorted(totals.evaluations)],
        seconds={name: round(value, 3) for name, value in totals.seconds.items()},
        restarts=max(0, totals.starts - 1),
        checkpoint=usable.path,
        output=_output_of(spec),
        output_digest=digest,
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
    if is_url(spec.output):
        existing = manifest_at(spec.output)
        if existing is None or (not new and _parent_of(existing) == spec.digest):
            check_writable_url(spec.output)
            return
        raise _output_exists_error(spec.output)
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
    raise _output_exists_error(spec.output)


def output_exists(spec: RunSpec) -> bool:
    """Return True if something is where the run's output is to be written."""
    if spec.output is None:
        return False
    return (
        manifest_at(spec.output) is not None if is_url(spec.output) else Path(spec.output).exists()
    )


def _output_of(spec: RunSpec) -> Where | None:
    return spec.output if spec.output is None or is_url(spec.output) else Path(spec.output)


def _output_exists_error(place: str) -> StorageError:
    return StorageError(
        "it exists already", where=place, hint="Choose another --output, or remove it."
    )


def _parent_digest(path: Path) -> str | None:
    """Return the digest of the package from which a package was trained; None if there is none, or
    no package at this path.
    """
    try:
        return _parent_of(read_manifest(path))
    except (OSError, TrainloadError):
        return None


def _parent_of(manifest: bytes) -> str | None:
    try:
        return Manifest.from_bytes(manifest, MANIFEST).parent
    except TrainloadError:
        return None


def _training_entry(spec: RunSpec, checkpoint: Checkpoint) -> TrainingEntry:
    """Return the trained package's record of the run."""
    index = checkpoint.index
    return TrainingEntry(
        steps=index.step,
        data=index.data.fingerprint,
        changed=settings_of(spec),
        weights=None if spec.given is None else spec.given.entry(),
    )


def _write_trained(
    package: Package, spec: RunSpec, tensors: Iterable[tuple[str, Tensor]], training: TrainingEntry
) -> str:
    """Write a run's output, and return its digest.

    If the same output exists already, because the run was killed after writing it, it is kept.

    Raises:
        StorageError: something else exists there, or it cannot be written.
    """
    assert spec.output is not None, "an output was asked for"
    names = spec.overrides.trained(package.manifest)

    def write(path: Path) -> Package:
        return with_weights(package, path, tensors, training=training, trained=names)

    if is_url(spec.output):
        # beside the working copy, if there is one, or in the folder of the run
        with tempfile.TemporaryDirectory(prefix=".output-", dir=spec.folder.parent) as folder:
            made = write(Path(folder) / "trained.tl")
            _check_same(digest_at(spec.output), made.digest, spec.output)
            send_package(made.path, spec.output)
            return made.digest
    output = Path(spec.output)
    if not output.exists():
        return write(output).digest
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        made = write(Path(folder) / output.name)
        _check_same(sha256_bytes(read_manifest(output)), made.digest, spec.output)
        return made.digest


def _check_same(existing: str | None, digest: str, where: str) -> None:
    """Check that an existing output is this one."""
    if existing not in (None, digest):
        raise StorageError(
            "the run's result cannot be written: another file or folder is in its place",
            where=where,
            expected=f"nothing, or the package {digest}",
            hint="Move it, then resume the run.",
        )


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
