"""Read a run's folder for its report.

Neither the cluster nor this machine's environment is queried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import TrainloadError
from trainload.launching.run.journal import stream_events
from trainload.launching.run.run_spec import RunSpec, read_spec
from trainload.launching.run.run_state import Phase, RunState, read_state
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.package import read_manifest
from trainload.report.frame.words import sanitize
from trainload.report.runs.episodes import Attempt, attempts_of
from trainload.report.runs.failures import Failure, failures_of, time_spent
from trainload.report.runs.history import History, read_history

_SETTINGS = (
    "keep",
    "keep_best",
    "keep_every",
    "eval_batches",
    "weights",
    "sinks",
    "require_compiled",
    "max_failures",
    "hang_timeout",
    "start_timeout",
    "storage_patience",
    "node_patience",
)


@dataclass(frozen=True, slots=True)
class Record:
    """Contents of a run's folder at the time of reading.

    Attributes:
        run_dir: folder of the run.
        spec: description of the run.
        manifest: manifest of its package; None if the package has changed or does not exist any
            more.
        state: last state that its driver wrote; None if there is none.
        history: events of the run.
        attempts: attempts of the run.
        failures: failures of the run.
        spent: use of the time -> seconds.
    """

    run_dir: Path
    spec: RunSpec
    manifest: Manifest | None
    state: RunState | None
    history: History
    attempts: Sequence[Attempt]
    failures: Sequence[Failure]
    spent: dict[str, float]

    @property
    def phase(self) -> Phase:
        """Phase of the run."""
        return self.history.summary.phase if self.state is None else self.state.phase


def read_run(run_dir: Path) -> Record:
    """Read a run. Raises StorageError if there is none, or its description cannot be read."""
    spec = read_spec(run_dir)
    state = read_state(run_dir)
    history = read_history(stream_events(run_dir))
    attempts = attempts_of(history, going_on=state is not None and state.alive)
    failures = failures_of(history, attempts)
    return Record(
        run_dir.absolute(),
        spec,
        _manifest(spec),
        state,
        history,
        attempts,
        failures,
        time_spent(history, attempts, failures),
    )


def _manifest(spec: RunSpec) -> Manifest | None:
    try:
        data = read_manifest(Path(spec.package))
        if sha256_bytes(data) != (spec.digest or spec.plan.package):
            return None
        return Manifest.from_bytes(data, MANIFEST)
    except (OSError, TrainloadError):
        # it was moved or changed; its digest is in the run's description
        return None


def facts_of(record: Record) -> list[tuple[str, str]]:
    """Return facts about the run as (name, value)."""
    spec, manifest = record.spec, record.manifest
    plan = (
        spec.plan
        if not record.attempts
        else next((p for p in spec.plans if p.world_size == record.attempts[-1].world), spec.plan)
    )
    facts: list[tuple[str, object]] = [
        ("package", Path(spec.package).name),
        ("digest", spec.digest or plan.package),
        (
            "program",
            (
                "the package is no longer at its place"
                if manifest is None
                else manifest.program_digest
            ),
        ),
    ]
    if manifest is not None:
        elements = sum(
            math.prod(entry.shape) for entry in manifest.parameters if entry.alias_of is None
        )
        facts.append(("parameters", f"{elements:,}"))
    last = record.attempts[-1] if record.attempts else None
    world = plan.world_size if last is None else last.world
    nodes = len(set(last.nodes)) if last is not None and last.nodes else plan.cluster.nodes
    facts += [
        ("strategy", (plan.strategy if last is None else last.strategy) + _axes(record)),
        ("ranks", f"{world} on {nodes} node{'s' if nodes > 1 else ''}, {plan.cluster.device}"),
        ("steps", f"{spec.steps:,}"),
        (
            "rows of a step",
            (
                f"{plan.global_batch:,} in {plan.accumulate}"
                f" microbatch{'es' if plan.accumulate > 1 else ''}"
            ),
        ),
        ("data", sanitize(spec.made.get("data", spec.data))),
    ]
    if spec.eval_data is not None:
        every = (
            "at the beginning and the end"
            if spec.eval_every is None
            else f"every {spec.eval_every:,} steps"
        )
        facts.append(
            ("held-out data", f"{sanitize(spec.made.get('eval_data', spec.eval_data))}, {every}")
        )
    facts.append(
        (
            "checkpoints",
            (
                "one at the end"
                if spec.checkpoint_every is None
                else f"every {spec.checkpoint_every:,} steps"
            ),
        )
    )
    if spec.plans:
        facts.append(
            ("elastic", f"from {spec.plans[0].world_size} to {spec.plans[-1].world_size} ranks")
        )
    if not spec.compile:
        facts.append(("compiled", "no"))
    changed = spec.overrides.model_dump(mode="json", exclude_defaults=True)
    if changed:
        facts.append(
            ("changed at launch", ", ".join(f"{name} {value}" for name, value in changed.items()))
        )
    settings = {
        name: getattr(spec, name)
        for name in _SETTINGS
        if getattr(spec, name) != RunSpec.model_fields[name].default
    }
    if settings:
        facts.append(
            ("settings", ", ".join(f"{name} {_plain(value)}" for name, value in settings.items()))
        )
    if spec.libraries:
        facts.append(("operator libraries", ", ".join(sorted(spec.libraries))))
    if spec.output is not None:
        facts.append(("trained package", sanitize(spec.output)))
    facts.append(
        (
            "launched with",
            ", ".join(f"{name} {version}" for name, version in spec.versions.items())
            or "not known",
        )
    )
    return [(name, sanitize(str(value))) for name, value in facts]


def _axes(record: Record) -> str:
    """Describe the axes of the run's plan other than the data axis."""
    plan = record.spec.plan
    parts = []
    if plan.tensor_ranks > 1:
        parts.append(
            f"tensor {plan.tensor_ranks}" + ("" if plan.divide == "tensor" else f"/{plan.divide}")
        )
    if plan.pipeline is not None:
        parts.append(f"pipeline {plan.pipeline.ranks} ({plan.pipeline.schedule})")
    return "".join(f", {part}" for part in parts)


def _plain(value: object) -> str:
    return (
        " ".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
