"""A first job, from freeze to export, by the commands of an installed trainload.

    python first_job.py compiled|interpreted [ray]

Runs in any environment that has trainload, without the repository. With `ray` the package is also
trained on a Ray cluster. The commands run in one process, so that torch is imported once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

JOB = '''
"""A regression of four inputs."""

import torch
from torch import nn

import trainload

torch.manual_seed(0)
job = trainload.Job(
    model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
    batch={"x": torch.zeros(2, 4), "y": torch.zeros(2, 1)},
    loss=lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"]),
    predict=lambda model, batch: model(batch["x"]),
    predict_inputs=["x"],
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    steps=6,
    global_batch=8,
)
'''
LAUNCH = ["launch", "tiny.tl", "--plan", "plan.json", "--data", "rows.npz"]


def commands(*, compiled: bool, ray: bool) -> list[list[str]]:
    """Return the arguments of each command of trainload, in their order."""
    launch = [*LAUNCH, "--run-dir", "run", "--output", "trained.tl", "--backend", "local"]
    on_ray = [*LAUNCH, "--run-dir", "run-on-ray", "--no-compile"]
    return [
        ["freeze", "job.py:job", "-o", "tiny.tl"],
        ["verify", "tiny.tl"],
        ["plan", "tiny.tl", "-o", "plan.json"],
        launch if compiled else [*launch, "--no-compile"],
        *([on_ray] if ray else []),
        ["verify", "trained.tl"],
        ["export", "trained.tl", "--to", "pt2", "-o", "model.pt2"],
    ]


def check_prediction() -> None:
    """Run the exported model without trainload."""
    import torch

    program = torch.export.load("model.pt2")  # noqa: TID251  # this process has written it
    (prediction,) = program.module()({"x": torch.zeros(3, 4)})
    assert prediction.shape == (3, 1)


def main(execution: str, backend: str = "local") -> None:
    """Write the job and its rows into the working directory, and run every command."""
    from trainload.cli.main import run

    Path("job.py").write_text(JOB)
    rows = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    np.savez("rows.npz", x=rows, y=rows.sum(1, keepdims=True))
    subprocess.run([sys.executable, "-m", "trainload", "--help"], check=True, capture_output=True)
    for command in commands(compiled=execution == "compiled", ray=backend == "ray"):
        print("trainload", *command, flush=True)
        status = run(command)
        if status != 0:
            sys.exit(status)
    check_prediction()
    print("predicts")


if __name__ == "__main__":
    main(*sys.argv[1:])
