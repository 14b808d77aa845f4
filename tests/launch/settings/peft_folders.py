"""A folder as peft saves an adapter."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that are removed when the process ends."""


@functools.cache
def adapter_folder() -> tuple[str, str]:
    """Return the path of an adapter of a layer `second`, and the SHA-256 of its values."""
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="adapter-"))
    folder = Path(_FOLDERS[-1].name)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["second"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.second.lora_{}.weight"
    values = {name.format("A"): torch.ones(2, 8), name.format("B"): torch.ones(8, 2)}
    path = folder / "adapter_model.safetensors"
    save_file(values, path)
    return str(folder), hashlib.sha256(path.read_bytes()).hexdigest()
