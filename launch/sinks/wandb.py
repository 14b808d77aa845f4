"""A sink that logs a run's numbers to Weights & Biases.

The variables of the library configure it: WANDB_MODE, WANDB_BASE_URL, WANDB_API_KEY, WANDB_PROJECT
(default: trainload), WANDB_ENTITY, WANDB_NAME, WANDB_RUN_ID, WANDB_DIR (default: the run's folder)
and so on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from trainload.core.atomic import replace_file
from trainload.core.errors import StorageError, first_line
from trainload.launching.run.working_copy import SINK_PREFIX
from trainload.launching.sinks.protocol import Outcome
from trainload.launching.sinks.run_parameters import parameters_of

PROJECT = "trainload"
FILE = f"{SINK_PREFIX}wandb"
"""File by which a resumed run finds its run in W&B."""
_DEFAULTS = {"silent": True, "init_timeout": 20.0, "finish_timeout": 25.0}
"""Settings that have other values here unless their variables are set.

W&B's own would let the process of a driver wait for 90 s, or forever, for a server that is
unavailable, since W&B waits at the end of the process as well.
"""
_ONLINE = ("online", "run", "shared")
"""Modes of W&B that need a server."""
_STEP = "step"
_LONGEST = 5000
_MAX_SETTINGS = 300


class Wandb:
    """A `Sink` for W&B. A resumed run continues the same W&B run.

    W&B discards numbers of a step that is smaller than an earlier one, which occurs after a
    restart. So the step is a number of its own, over which all others are plotted.
    """

    def __init__(self, run_dir: Path) -> None:
        given = os.environ
        file = run_dir / FILE
        if not file.exists():
            run_id = given.get("WANDB_RUN_ID") or secrets.token_hex(4)
            replace_file(file, f"{run_id}\n".encode())
        # W&B otherwise copies what the driver prints, records its git repository and its code, and
        # prints a summary between the lines of the driver's progress
        try:
            settings = wandb.Settings(
                console="off", disable_code=True, disable_git=True, disable_job_creation=True
            )
            for name, value in _DEFAULTS.items():
                if f"WANDB_{name.upper()}" not in given:
                    setattr(settings, name, value)
            # a driver must not wait for somebody to type a key
            if given.get("WANDB_MODE", "online") in _ONLINE and not wandb.login(prompt=False):
                raise wandb.errors.UsageError("there is no API key")
            self._run = wandb.init(
                project=given.get("WANDB_PROJECT") or PROJECT,
                name=given.get("WANDB_NAME") or run_dir.name,
                id=file.read_text().strip(),
                dir=given.get("WANDB_DIR") or str(run_dir),
                resume=None if given.get("WANDB_MODE") == "offline" else "allow",
                reinit="create_new",
                config=parameters_of(run_dir),
                settings=settings,
            )
        except ValueError as error:  # pydantic's, several lines of which the first says nothing
            raise StorageError(
                "W&B does not accept its settings",
                where="variables WANDB_...",
                got=" ".join(str(error).split())[:_MAX_SETTINGS],
                hint="Correct the variable that it names.",
            ) from error
        except wandb.errors.Error as error:
            raise StorageError(
                "W&B did not accept the run",
                where="WANDB_BASE_URL",
                got=first_line(error),
                hint="Check WANDB_API_KEY and WANDB_ENTITY, or set WANDB_MODE=offline.",
            ) from error
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        self._run.log({_STEP: step, "_timestamp": time, **values})

    def text(self, kind: str, message: str, step: int, time: float) -> None:
        self._run.summary[f"last {kind}"] = message[:_LONGEST]

    def close(self, outcome: Outcome, /) -> None:
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
