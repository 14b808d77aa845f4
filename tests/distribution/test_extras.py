"""Without an extra, what needs it says which one to install."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.distribution.requirements import DEVELOPERS, extras
from tests.laws.isolated import make_environment

from trainload.packaging.package import Package

LAUNCH = ("launch", "tiny.tl", "--data", "rows.npz", "--run-dir", "run")
COMMANDS = {
    ("ray", "launch"): LAUNCH,
    ("ray", "dry run"): (*LAUNCH, "--dry-run"),
    ("ray", "evaluate"): ("evaluate", "tiny.tl", "--data", "rows.npz"),
    ("tensorboard", "launch"): (*LAUNCH, "--backend", "local", "--set", "sinks=tensorboard"),
    ("mlflow", "launch"): (*LAUNCH, "--backend", "local", "--set", "sinks=mlflow"),
    ("report", "report"): ("report", "tiny.tl", "-o", "page.html"),
    ("report", "plan"): ("plan", "tiny.tl", "--html", "page.html"),
    ("signing", "sign"): ("sign", "tiny.tl", "--key", "key.pem"),
    ("s3", "push"): ("push", "tiny.tl", "s3://bucket/store"),
    ("s3", "status"): ("status", "s3://bucket/run"),
    ("oci", "push"): ("push", "tiny.tl", "oci://localhost:5000/tiny:1"),
    ("wandb", "launch"): (*LAUNCH, "--backend", "local", "--set", "sinks=wandb"),
    ("opentelemetry", "launch"): (*LAUNCH, "--backend", "local", "--set", "sinks=opentelemetry"),
    ("hub", "push"): ("push", "tiny.tl", "hf://owner/tiny"),
    ("onnx", "export"): ("export", "tiny.tl", "--to", "onnx", "--graph", "eval"),
}
SETTINGS = {
    ("transformers", "schedule"): {"lr_scheduler_type": "cosine"},
    ("transformers", "optimizer"): {"optim": "adafactor"},
}
"""Settings of a Trainer that transformers implements."""
CHILD = """
import contextlib, io, json, sys
from types import SimpleNamespace

import torch
import trainload
from trainload.cli.main import run
from trainload.huggingface import job_of

commands, settings = json.loads(sys.argv[1])
outcomes = []
for words in commands:
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        status = run(words)
    outcomes.append([status, written.getvalue()])
model = torch.nn.Linear(1, 1)
for each in settings:
    job = None
    try:
        args = SimpleNamespace(max_steps=2, **each)
        job = job_of(model, {"x": torch.zeros(2, 1)}, args)
        job.optimizer(model)
        outcomes.append([0, ""])
    except trainload.JobError as error:
        outcomes.append([2, str(error)])
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(
    wheel: Path, tiny: Package, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[int, str]]:
    """Exit status and message of each use of an extra, where no extra is installed."""
    folder = tmp_path_factory.mktemp("extras")
    environment = make_environment(folder / "venv", wheel)
    shutil.copytree(tiny.path, folder / "tiny.tl")
    shutil.copy(tiny_data, folder / "rows.npz")
    (folder / "key.pem").write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
    )
    uses = json.dumps([list(COMMANDS.values()), list(SETTINGS.values())])
    results = json.loads(environment.run(CHILD, folder, uses).splitlines()[-1])
    return dict(zip([*COMMANDS, *SETTINGS], results, strict=True))


@pytest.mark.parametrize("use", [*COMMANDS, *SETTINGS], ids=" ".join)
def test_what_needs_an_extra_that_is_not_installed_names_it(
    use: tuple[str, str], outcomes: dict[tuple[str, str], tuple[int, str]]
) -> None:
    status, message = outcomes[use]
    assert status == 2
    assert f"trainload[{use[0]}]" in message.replace("\n", " ")


def test_every_extra_of_users_is_tried() -> None:
    assert {extra for extra, _ in [*COMMANDS, *SETTINGS]} == extras() - DEVELOPERS
