"""A run's numbers as TensorBoard's event files, in the folder `tensorboard` of the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

from trainload.launching.sinks.protocol import Outcome

FOLDER = "tensorboard"


class TensorBoard:
    """See `Sink`. Steps that are done again after a restart are there again; TensorBoard shows the later ones."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = SummaryWriter(str(run_dir / FOLDER), flush_secs=5)

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        self._writer.add_text(kind, message, step, walltime=time)

    def close(self, _outcome: Outcome, /) -> None:
        self._writer.close()
