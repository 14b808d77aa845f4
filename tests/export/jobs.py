"""Jobs whose packages are exported, and what opens an export elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tests.capture.jobs import job
from tests.laws.isolated import Environment
from torch import Tensor, nn

from trainload.capture.job import Job
from trainload.packaging.read import Package


class Small(nn.Module):
    """(rows, 8) -> (rows, 8), with tied weights, a count of its calls, a buffer in no state dict and a constant."""

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
    y = model(batch["x"])
    return {"y": y, "best": y.argmax(-1)}


def small_job(**options: Any) -> Job:
    torch.manual_seed(0)
    return job(Small(), predict=predict, **options)


_CHILD = """
import importlib.util, json, sys
import numpy, torch
from safetensors.torch import save_file

assert importlib.util.find_spec("trainload") is None
kind, path, rows, written, calls = sys.argv[1:]
batch = {name: torch.from_numpy(values) for name, values in numpy.load(rows).items()}
if kind == "pt2":
    files = {"trainload.json": ""}
    call = torch.export.load(path, extra_files=files).module()
    note = files["trainload.json"]
else:
    call = torch._inductor.aoti_load_package(path)
    note = call.get_metadata()["trainload.json"]
with torch.no_grad():
    for _ in range(int(calls)):
        results = call(batch)
names = [output["name"] for output in json.loads(note)["outputs"]]
save_file({name: value.contiguous() for name, value in zip(names, results, strict=True)}, written)
print(note)
"""


def opened_elsewhere(
    outside: Environment, kind: str, path: Path, batch: Mapping[str, Tensor], folder: Path, calls: int = 1
) -> tuple[dict[str, Tensor], str]:
    """What a process that cannot import trainload gets of a .pt2 or AOTInductor package in its last call, by name; and the note."""
    rows: dict[str, Any] = {name: value.numpy() for name, value in batch.items()}
    np.savez(folder / "rows.npz", **rows)
    note = outside.run(_CHILD, folder, kind, path, folder / "rows.npz", folder / "results.safetensors", str(calls))
    return load_file(folder / "results.safetensors"), note


def own_results(package: Package, graph: str, batch: Mapping[str, Tensor], calls: int = 1) -> dict[str, Tensor]:
    """What the package's own graph gives in its last call, by name."""
    module = package.graph(graph).module(check_guards=False)
    with torch.no_grad():
        for _ in range(calls):
            results = module(dict(batch))
    return dict(zip((output.name for output in package.manifest.graphs[graph].outputs), results, strict=True))


def model_of(package: Package, model: nn.Module) -> nn.Module:
    """A model of the same code with the package's weights, in evaluation mode."""
    names = model.state_dict().keys()
    model.load_state_dict({name: package.weights.tensor(name) for name in names})
    return model.eval()
