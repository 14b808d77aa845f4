"""Jobs whose packages are exported, and functions that open exports in other processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tests.capture.jobs import job
from tests.laws.isolated import Environment
from torch import Tensor, nn

from trainload.capture.job.definition import Job
from trainload.packaging.package import Package


class Small(nn.Module):
    """(rows, 8) -> (rows, 8).

    It has tied weights, a counter of its calls, a buffer that is in no state dict, and a constant.
    """

    calls: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("offset", torch.linspace(-1, 1, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        hidden = self.norm(self.first(x)).relu() + self.offset * torch.tensor([0.5])
        result: Tensor = self.last(hidden) + 0.01 * self.calls
        return result


def predict(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    y = model(batch["x"]) * batch["scale"]
    return {"y": y, "best": y.argmax(-1)}


def small_job(**options: Any) -> Job:
    torch.manual_seed(0)
    return job(
        Small(),
        predict=predict,
        batch={"x": torch.randn(4, 8), "scale": torch.rand(4, 1)},
        **options,
    )


_CHILD = """
import importlib.util, json, sys
import numpy, torch
from safetensors.torch import save_file

assert importlib.util.find_spec("trainload") is None
kind, calls, *folders = sys.argv[1:]
for folder in folders:
    path = f"{folder}/export.pt2"
    rows = numpy.load(f"{folder}/rows.npz")
    batch = {name: torch.from_numpy(values) for name, values in rows.items()}
    if kind == "pt2":
        files = {"trainload.json": ""}
        call = torch.export.load(path, extra_files=files).module()
        note = files["trainload.json"]
    else:
        call = torch._inductor.aoti_load_package(path)
        note = call.get_metadata()["trainload.json"]
    names = [output["name"] for output in json.loads(note)["outputs"]]
    for number in range(int(calls)):
        results = dict(zip(names, call(batch) if kind == "pt2" else call(**batch), strict=True))
        assert not any(value.requires_grad for value in results.values())
        contiguous = {name: value.contiguous() for name, value in results.items()}
        save_file(contiguous, f"{folder}/results.{number}")
    print(json.dumps(json.loads(note)))
"""


@dataclass(frozen=True)
class Found:
    """Results of a process that cannot import trainload.

    They are the outputs of each call by name, and the note.
    """

    results: tuple[dict[str, Tensor], ...]
    note: dict[str, Any]


Opened = Sequence[tuple[Path, Mapping[str, Tensor]]]
"""Exports, each with the batch that it is called with."""


def opened_elsewhere(
    outside: Environment, kind: str, exports: Opened, folder: Path, calls: int = 1
) -> list[Found]:
    """Open .pt2 files or AOTInductor packages in one process that cannot import trainload.

    Each is called `calls` times with its batch.
    """
    folders = [folder / f"export-{number}" for number in range(len(exports))]
    for place, (path, batch) in zip(folders, exports, strict=True):
        place.mkdir()
        (place / "export.pt2").symlink_to(path)
        rows: dict[str, Any] = {name: value.numpy() for name, value in batch.items()}
        np.savez(place / "rows.npz", **rows)
    notes = outside.run(_CHILD, folder, kind, str(calls), *folders).splitlines()
    results = [
        tuple(load_file(place / f"results.{number}") for number in range(calls))
        for place in folders
    ]
    return [Found(found, json.loads(note)) for found, note in zip(results, notes, strict=True)]


def own_results(
    package: Package, graph: str, batch: Mapping[str, Tensor], calls: int = 1
) -> tuple[dict[str, Tensor], ...]:
    """Return the outputs of the package's own graph for each call, by name."""
    module = package.graph(graph).module(check_guards=False)
    names = [output.name for output in package.manifest.graphs[graph].outputs]
    with torch.no_grad():
        return tuple(
            dict(zip(names, module(dict(sorted(batch.items()))), strict=True)) for _ in range(calls)
        )


def model_of(package: Package, model: nn.Module) -> nn.Module:
    """Return a model of the same code with the package's weights, in evaluation mode."""
    names = model.state_dict().keys()
    model.load_state_dict({name: package.weights.tensor(name) for name in names})
    return model.eval()
