"""Command lines of `trainload manifest kuberay`, and the manifests that they print."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

LEAST = ("--image", "registry.example/trainload:1", "--claim", "shared", "--memory", "16Gi")
JOB = ("gpt.tl", "--data", "train.parquet", *LEAST)
VARIANTS: dict[str, tuple[str, ...]] = {
    "a job": JOB,
    "a job on GPUs": (*JOB, "--workers", "8/cuda", "--nodes", "4"),
    "an elastic job": (*JOB, "--workers", "8/cuda", "--nodes", "2:8"),
    "an elastic job on CPUs": (*JOB, "--workers", "4", "--nodes", "1:3"),
    "a job of everything": (
        *(
            "--name",
            "gpt-7b",
            "--namespace",
            "research",
            "--run-dir",
            "/trainload/runs/a b",
            "--retries",
            "0",
            *JOB,
        ),
        *(
            "--secret",
            "s3-keys",
            "--secret",
            "tracking",
            "--env",
            "NCCL_DEBUG=INFO",
            "--env",
            "EMPTY=",
            "--service-account",
            "trainer",
        ),
        *(
            "--",
            "--steps",
            "100",
            "--eval-data",
            "s3://bucket/held-out.parquet",
            "--set",
            "lr=3e-4",
            "--output",
            "trained.tl",
        ),
    ),
    "a job under a plan": (*JOB, "--workers", "2", "--nodes", "2", "--", "--plan", "plan.json"),
    "a job without a volume": (
        *("gpt.tl", "--data", "rows/*.parquet", "--image", "registry.example/trainload:1"),
        *("--store", "s3://bucket/jobs", "--memory", "16Gi", "--", "--output", "trained.tl"),
    ),
    "a queued job on AMD": (*JOB, "--workers", "8/amd.com/gpu", "--queue", "research:high"),
    "a cluster": ("--kind", "RayCluster", "--name", "shared", *LEAST),
    "a growing cluster": (
        "--kind",
        "RayCluster",
        *LEAST,
        "--workers",
        "8/cuda",
        "--nodes",
        "1:16",
        "--secret",
        "s3-keys",
    ),
}


TRAIN_JOBS: dict[str, tuple[str, ...]] = {
    "a train job": JOB,
    "a queued train job": (
        *(*JOB, "--workers", "8/cuda", "--nodes", "4", "--queue", "research:high"),
        *("--namespace", "research", "--secret", "s3-keys", "--", "--plan", "plan.json"),
    ),
}
RETRAINING = {
    "store": "s",
    "line": "gpt",
    "data": {"files": "x/*.parquet"},
    "evaluation": {"hold_out": 0.1},
    "schedule": {"cron": "30 2 * * *", "zone": "Europe/Berlin"},
    "cluster": {"address": "auto", "nodes": 2, "workers": 8, "device": "cuda"},
}


@cache
def manifests() -> dict[str, dict[str, Any]]:
    """Return all kinds of manifests for KubeRay and Kubeflow Trainer, by name."""
    found = {name: made("manifest", "kuberay", *arguments) for name, arguments in VARIANTS.items()}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "retrain.yaml"
        file.write_text(yaml.safe_dump(RETRAINING))
        found["a retraining"] = made(
            "retrain", "manifest", "raycronjob", str(file), *LEAST, "--secret", "s3-keys"
        )
    for name, arguments in TRAIN_JOBS.items():
        at = arguments.index("--") if "--" in arguments else len(arguments)
        listed = made("manifest", "trainjob", *arguments[:at], "--json", *arguments[at:])
        found |= {f"{name}, {each['kind']}": each for each in listed["items"]}
    return found


def made(*arguments: str) -> dict[str, Any]:
    """Run a command line and return its parsed output."""
    command = [sys.executable, "-m", "trainload", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found
