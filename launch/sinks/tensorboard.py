"""A sink that writes a run's numbers as TensorBoard event files, in the subfolder `tensorboard` of
the run's folder.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

from trainload.launching.sinks.protocol import Outcome

FOLDER = "tensorboard"


class TensorBoard:
    """A `Sink` for TensorBoard.

    Steps that are repeated after a restart are written again; TensorBoard shows the later ones.
    """

    def __init__(self, run_dir: Path) -> None:
        # without a configuration of logging it would print a line for every number that is not
        # finite
        logging.getLogger("tensorboardX").addHandler(logging.NullHandler())
        self._writer = SummaryWriter(str(run_dir / FOLDER), flush_secs=5)

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        self._writer.add_text(kind, message, step, walltime=time)

    def close(self, _outcome: Outcome, /) -> None:
        self._writer.close()
