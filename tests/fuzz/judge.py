"""Judgement of a mutant: rejected with a proper error, or read as exactly what its files say."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tests.fuzz.mutants import Files, Mutant, files_of
from tests.hostile.guarded import watched

from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import TrainloadError
from trainload.packaging.derived import read_derived
from trainload.packaging.format.package_paths import NON_PERSISTENT, OUTSIDE
from trainload.packaging.graphs.graph_json import flat_to_json, graph_to_json
from trainload.packaging.package import Package, open_package

MEMORY = 512
"""Memory that reading a small package may use, in MiB on top of the process's own."""


def judge(folder: Path, files: Files, mutant: Mutant) -> tuple[str, str]:
    """Read the mutant in `folder`, and judge the result.

    Args:
        folder: folder of the changed package.
        files: files of the package before the change.
        mutant: the change.

    Returns:
        ("refused", the message), ("taken", ""), or ("wrong", a description of what is wrong).
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with watched(count=False) as noted:
        try:
            package = open_package(folder)
            package.check_contents()
            found = _differences(package, files_of(folder))
        except TrainloadError as error:
            found, refused = [], str(error)
        except Exception as error:  # noqa: BLE001 - a user would see a traceback
            found, refused = [f"it fails with {type(error).__name__}: {error}"], ""
        else:
            refused = ""
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    if noted.acts:
        return "wrong", f"it acted: {noted.acts[0]}"
    if grown > MEMORY:
        return "wrong", f"it took {grown} MiB"
    if refused:
        return (
            ("refused", refused)
            if "\n" not in refused
            else ("wrong", "the refusal has several lines")
        )
    if not mutant.sealed and not found:
        present = files_of(folder)
        changed = {
            file
            for file in {*present, *files}
            if present.get(file) != files.get(file) and file.split("/")[0] not in OUTSIDE
        }
        found = [f"{file} is another than its digest says" for file in sorted(changed)]
    return ("wrong", found[0]) if found else ("taken", "")


def _differences(package: Package, present: Files) -> list[str]:
    """Return the differences between the loaded package and its files."""
    found: list[str] = []
    program = package.program()
    exported = {
        package.manifest.graphs[name].file: graph.exported for name, graph in program.graphs.items()
    }
    for entry, update in zip(package.manifest.updates, package.updates(), strict=True):
        exported |= {entry.first: update.first, entry.following: update.following}
    for file, graph in exported.items():
        if (
            told := first_difference(
                parse_canonical(present[file], file), graph_to_json(graph, file).document
            )
        ) is not None:
            found.append(f"{file} is read as something else: {told}")
    for file, data in present.items():
        if file.startswith("weights/") and file.endswith(".safetensors"):
            try:
                raw = safetensors.torch.load(data)
            except safetensors.SafetensorError as error:
                found.append(f"{file}: the library safetensors refuses it: {error}")
                continue
            found += [
                f"{file}, {name}: other bytes"
                for name, tensor in raw.items()
                if not _same(package.weights.tensor(name), tensor)
            ]
    dict(program.state)
    for file in present:
        if file.startswith("assets/"):
            package.asset(file.removeprefix("assets/"))
    others = [name for name in package.weights.names() if name not in program.state]
    found += [f"{NON_PERSISTENT}, {name}: it is no state" for name in others]
    for key in {
        file.split("/")[1]
        for file in present
        if file.startswith("derived/") and file.endswith("/step.json")
    }:
        step = read_derived(package, key)
        if step is not None:
            told = parse_canonical(present[f"derived/{key}/step.json"], key)
            difference = first_difference(told["graph"], flat_to_json(step.module, key).document)
            if difference is not None:
                found.append(f"derived/{key}/step.json is read as something else: {difference}")
    return found


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def first_difference(told: Any, read: Any, place: str = "") -> str | None:
    """Return where and how two JSON values differ; None if they are equal."""
    if isinstance(told, dict) and isinstance(read, dict):
        for key in sorted({*told, *read}):
            if key not in told or key not in read:
                return f"{place}.{key} is only {'read' if key not in told else 'told'}"
            if (inner := first_difference(told[key], read[key], f"{place}.{key}")) is not None:
                return inner
        return None
    if isinstance(told, list) and isinstance(read, list):
        if len(told) != len(read):
            return f"{place} has {len(told)} entries, and is read with {len(read)}"
        for number, (one, other) in enumerate(zip(told, read, strict=True)):
            if (inner := first_difference(one, other, f"{place}.{number}")) is not None:
                return inner
        return None
    return (
        None
        if canonical_json(told) == canonical_json(read)
        else f"{place} is {told!r:.80}, and is read as {read!r:.80}"
    )
