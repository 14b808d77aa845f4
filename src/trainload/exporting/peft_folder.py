"""Export of a run's adapters as a folder that peft opens.

    model = peft.PeftModel.from_pretrained(model, folder)

Names are those of the transformers model, if the package names one, and otherwise of the job's
model. Parameters that were trained beside the adapters are in the folder with the rest of their
modules, which peft replaces whole (`modules_to_save`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainload.capture.job.stored_tensors import has_equal_bits
from trainload.core.canonical_json import canonical_json
from trainload.core.errors import PackageError
from trainload.core.paths import write_bytes
from trainload.exporting.weights_folder import (
    CARD,
    MADE_OF,
    NOTE,
    read_json_asset,
    transformers_part,
)
from trainload.launching.api.run_weights import RunWeights
from trainload.launching.settings.adapter_names import WEIGHT
from trainload.launching.settings.peft_adapter import CONFIG, PREFIX, VALUES
from trainload.packaging.format.assets import ASSETS
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.package import Package
from trainload.packaging.tensors.safetensors_file import write_tensors

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""Suffix of the name of a transformers class -> peft's name of its task."""


def write_peft_folder(root: Path, run: RunWeights, note: Mapping[str, Any]) -> dict[str, Tensor]:
    """Write the adapters of a run into an empty folder; return the tensors by their names there.

    Args:
        root: the folder.
        run: the run's weights, with adapters.
        note: fields of NOTE.

    Raises:
        PackageError: the run has no adapters, peft could not apply them, or the model has changed
            in ways that they do not contain.
        OSError: the disk is full.
    """
    if not run.adapters:
        raise PackageError(
            "the run has no adapters",
            where="to",
            got="peft",
            hint="Launch with --set adapters.rank=N, or export the weights: --to huggingface.",
        )
    manifest = run.frozen.manifest
    part = transformers_part(run.frozen) or ""
    prefix = f"{part}." if part else ""
    targets: list[str] = []
    tensors: dict[str, Tensor] = {}
    for adapter in run.adapters:
        module = _within(adapter.weight, prefix).removesuffix(WEIGHT)
        if not adapter.weight.endswith(WEIGHT):
            raise PackageError(
                "peft has adapters of linear layers only, whose parameter is `weight`",
                where=adapter.weight,
                hint="Export the merged weights: --to huggingface or --to safetensors.",
            )
        targets.append(module)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = run.values[adapter.down]
        tensors[f"{PREFIX}{module}.lora_B.weight"] = run.values[adapter.up]
    # peft replaces a module with a copy, so a tied parameter is replaced in each module that has it
    owners = {entry.name: entry.alias_of or entry.name for entry in manifest.parameters}
    trained = {owners[name] for name in run.also}
    names = [name for name, owner in owners.items() if owner in trained]
    saved = sorted({_within(name, prefix).rpartition(".")[0] for name in names})
    _check_saved_modules(saved, targets)
    state = _state_of(run, saved, prefix)
    _check_other_buffers(run, {f"{prefix}{name}" for name in state})
    rank, scale = run.adapters[0].rank, run.adapters[0].scale
    config = {
        "peft_type": "LORA",
        "task_type": _task_type(run.frozen),
        "base_model_name_or_path": _base_model(run.frozen),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(scale * rank) if (scale * rank).is_integer() else scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": _selected(targets, _modules(manifest, prefix)),
        "modules_to_save": saved or None,
    }
    write_bytes(root / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    tensors |= {f"{PREFIX}{name}": value for name, value in state.items()}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    write_tensors(root / VALUES, tensors)
    write_bytes(root / NOTE, canonical_json({**note, "part": part, "step": run.step}))
    write_bytes(root / CARD, _card(config, note).encode())
    return tensors


def check_peft_folder(root: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read a folder with safetensors and compare every tensor with those that were to be written.

    Raises:
        PackageError: a tensor is missing or differs.
    """
    with safe_open(root / VALUES, framework="pt") as opened:
        for name, value in tensors.items():
            if not has_equal_bits(opened.get_tensor(name), value):
                raise PackageError("a written tensor differs from the run's", where=name)


def _within(name: str, prefix: str) -> str:
    """Return the name of a parameter in the exported model."""
    if not name.startswith(prefix):
        raise PackageError(
            "a trained parameter is outside the transformers model, which the adapters are of",
            where=name,
            expected=f"a parameter of {prefix.removesuffix('.')}",
            hint="Export the merged weights: --to safetensors.",
        )
    return name.removeprefix(prefix)


def _modules(manifest: Manifest, prefix: str) -> set[str]:
    """Return the modules of the exported model that have parameters of their own."""
    return {
        entry.name.removeprefix(prefix).rpartition(".")[0]
        for entry in manifest.parameters
        if entry.name.startswith(prefix)
    }


def _selected(targets: Collection[str], modules: Collection[str]) -> list[str] | str:
    """Return peft's selection of modules: the last parts of their names if these select no other
    module, otherwise an expression of the whole names.

    A list of whole names would also select modules whose names end like them.
    """
    last = sorted({name.rpartition(".")[2] for name in targets})
    if {name for name in modules if name.rpartition(".")[2] in last} == set(targets):
        return last
    return "|".join(re.escape(name) for name in targets)


def _check_saved_modules(saved: Collection[str], targets: Collection[str]) -> None:
    """Check that peft can replace modules: the model itself cannot be one, nor one with adapters.

    Raises:
        PackageError: it cannot.
    """
    for module in saved:
        inside = next((name for name in targets if f"{name}.".startswith(f"{module}.")), None)
        if not module or inside is not None:
            raise PackageError(
                "peft cannot save a trained parameter of a module that contains adapters",
                where="adapters.also",
                got=f"a parameter of {module or 'the model itself'}",
                hint="Export the merged weights: --to huggingface or --to safetensors.",
            )


def _state_of(run: RunWeights, modules: Collection[str], prefix: str) -> dict[str, Tensor]:
    """Return the state dict of modules of the exported model, by names there."""
    manifest = run.frozen.manifest
    stored = {entry.name: entry.alias_of or entry.name for entry in manifest.parameters}
    stored |= {entry.name: entry.name for entry in manifest.buffers if entry.persistent}
    return {
        name.removeprefix(prefix): run.package.weights.tensor(owner)
        for name, owner in stored.items()
        if any(name.startswith(f"{prefix}{module}.") for module in modules)
    }


def _check_other_buffers(run: RunWeights, saved: Collection[str]) -> None:
    """Check that the run has changed no buffer that the folder would not contain.

    Raises:
        PackageError: it has, so the adapters do not give the run's results.
    """
    for entry in run.frozen.manifest.buffers:
        value = run.buffers.get(entry.name)
        if (
            entry.persistent
            and value is not None
            and entry.name not in saved
            and not torch.equal(value, run.frozen.weights.tensor(entry.name))
        ):
            raise PackageError(
                "the run has changed a buffer of the model, which adapters cannot contain",
                where=entry.name,
                hint="Export the merged weights: --to huggingface or --to safetensors.",
            )


def _task_type(package: Package) -> str | None:
    name = _asset(package, MADE_OF).get("class")
    return next((task for end, task in _TASKS.items() if str(name).endswith(end)), None)


def _base_model(package: Package) -> str | None:
    name = _asset(package, "config.json").get("_name_or_path")
    return name if isinstance(name, str) and name else None


def _asset(package: Package, name: str) -> Mapping[str, Any]:
    """Return a JSON asset; {} if there is none."""
    if f"{ASSETS}{name}" not in package.manifest.files:
        return {}
    document = read_json_asset(package, name)
    return document if isinstance(document, dict) else {}


def _card(config: Mapping[str, Any], note: Mapping[str, Any]) -> str:
    base = config["base_model_name_or_path"]
    head = ["library_name: peft", "tags: [trainload, lora]"]
    head += [f"base_model: {base}"] if base else []
    return "\n".join(
        [
            "---",
            *head,
            "---",
            "",
            "# Adapters of a trainload run",
            "",
            f"LoRA of rank {config['r']}, alpha {config['lora_alpha']}, of the package"
            f" {note['package']}.",
            "",
            "```python",
            'model = peft.PeftModel.from_pretrained(model, ".")',
            "```",
            "",
        ]
    )
