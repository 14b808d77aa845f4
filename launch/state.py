"""What a run is doing now, as a file that its driver replaces every second: for those who ask from elsewhere."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from trainload.launch.spec import replace_file
from trainload.packaging.canonical import canonical_json

STATE_FILE = "state.json"


class RunState(BaseModel):
    """A run at one moment. `time`: seconds since 1970; `phase`: waiting (for nodes), running or over; `host`, `pid`: of the driver;
    `ranks`: rank -> Ray's id of its node, pid, seconds since it was last heard of, and what it does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    phase: str
    host: str
    pid: int
    attempt: int
    ranks: dict[int, tuple[str, int, float, str]]


def write_state(run_dir: Path, state: RunState) -> None:
    """Replaces the file. Raises: OSError."""
    replace_file(run_dir / STATE_FILE, canonical_json(state.model_dump(mode="json")), durable=False)


def read_state(run_dir: Path) -> RunState | None:
    """What the driver last said; None where it has said nothing, or nothing that can be read."""
    try:
        return RunState.model_validate_json((run_dir / STATE_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
