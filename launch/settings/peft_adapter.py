"""Adapters in peft's format: a folder with `adapter_config.json` and `adapter_model.safetensors`.

A folder that would be computed in another way than `Adapters` computes is rejected: every setting
of peft's configuration is known here, or must have no value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from trainload.autograd_trace.low_rank import LowRank
from trainload.core.canonical_json import parse_json, sha256_bytes
from trainload.core.errors import WeightsError, printable
from trainload.launching.settings.adapter_names import WEIGHT, source_prefix
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.weight_sources.source_files import files_at

CONFIG = "adapter_config.json"
VALUES = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of the names in peft's files."""
_KEY = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_MAX_CONFIG = 2**24
_MAX_VALUES = 2**36
_MAX_ALPHA = 2.0**64
_WITHOUT_EFFECT = frozenset(
    {
        # what the folder belongs to, and how peft opens it
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
        # the names and shapes in the weights say the same
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "r",
        "target_modules",
        # initial values, which the weights replace
        "eva_config",
        # of peft's training, and of options that have their own switch
        "ensure_weight_tying",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
    }
)
_READ = frozenset({"bias", "init_lora_weights", "lora_alpha", "peft_type", "use_rslora"})
_INITIALISATIONS = (True, False, None, "eva", "gaussian", "orthogonal")
"""Initialisations that leave the weights of the model as they are. Others subtract B A from them,
so the adapter does not belong to the model as it is published.
"""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter of peft.

    Attributes:
        rank: rank of all its matrices.
        alpha: scale of B A, times the rank.
        modules: names of the adapted modules in the model that peft wrapped, sorted.
        digest: SHA-256 of the weights' file.
        values: tensors by (module, "A" or "B").
        dropout: dropout that peft trained it with.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    digest: str
    values: Mapping[tuple[str, str], torch.Tensor]
    dropout: float


def read_adapter(folder: str) -> PeftAdapter:
    """Read an adapter of peft.

    Args:
        folder: path or URL of its folder.

    Raises:
        WeightsError: there is none, it is malformed, or it is not a plain LoRA adapter of linear
            layers.
        StorageError: it cannot be reached.
    """
    files = files_at(folder)
    text, data = files.read(CONFIG, _MAX_CONFIG), files.read(VALUES, _MAX_VALUES)
    if text is None or data is None:
        raise WeightsError(
            "there is no adapter of peft",
            where=folder,
            expected=f"a folder with {CONFIG} and {VALUES}",
            got=f"no {CONFIG if text is None else VALUES}",
            hint="Save it with PeftModel.save_pretrained(folder).",
        )
    config = _parse_config(text, f"{folder}/{CONFIG}")
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise WeightsError(
            "not a valid safetensors file", where=f"{folder}/{VALUES}", got=str(error)
        ) from error
    values: dict[tuple[str, str], torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None or tensor.ndim != 2 or not tensor.is_floating_point():
            raise WeightsError(
                "the adapter has a tensor that is not an A or B of a linear layer",
                where=f"{folder}/{VALUES}",
                expected=f"{PREFIX}MODULE.lora_A.weight or {PREFIX}MODULE.lora_B.weight",
                got=f"{printable(name)}, {tensor.dtype}, of shape {tuple(tensor.shape)}",
                hint="Merge it into its model with peft, and launch with --weights FOLDER.",
            )
        values[match["module"], match["part"]] = tensor
    modules = tuple(sorted({module for module, _ in values}))
    rank = _common_rank(values, modules, f"{folder}/{VALUES}")
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    dropout = float(config.get("lora_dropout") or 0.0)
    return PeftAdapter(rank, scale * rank, modules, sha256_bytes(data), values, dropout)


def source_values(
    source: str, digest: str, adapters: Sequence[LowRank], manifest: Manifest
) -> dict[str, torch.Tensor]:
    """Return the values of adapters that a folder of peft has, in the dtypes of their weights.

    Args:
        source: path or URL of the folder.
        digest: SHA-256 of its weights' file.
        adapters: adapters of a package's parameters, one for each module of the folder.
        manifest: manifest of the package.

    Raises:
        WeightsError: it has changed, or a matrix does not have the shape of its layer.
        StorageError: it cannot be reached.
    """
    found = read_adapter(source)
    check_digest(found, digest, source)
    entries = {entry.name: entry for entry in manifest.parameters}
    prefix = source_prefix([f"{module}{WEIGHT}" for module in found.modules], entries.keys())
    values: dict[str, torch.Tensor] = {}
    for adapter in adapters:
        entry = entries[adapter.weight]
        module = adapter.weight.removeprefix(prefix).removesuffix(WEIGHT)
        rows, columns = entry.shape
        expected = {"A": (adapter.rank, columns), "B": (rows, adapter.rank)}
        for part, name in (("A", adapter.down), ("B", adapter.up)):
            tensor = found.values[module, part]
            if tuple(tensor.shape) != expected[part]:
                raise WeightsError(
                    f"the adapter does not fit {adapter.weight}",
                    where=f"{source}/{VALUES}, {module}.lora_{part}",
                    expected=f"shape {expected[part]}",
                    got=f"shape {tuple(tensor.shape)}",
                )
            values[name] = tensor.to(getattr(torch, entry.dtype))
    return values


def check_digest(adapter: PeftAdapter, digest: str, source: str) -> None:
    """Raise WeightsError unless an adapter's weights have the expected digest."""
    if adapter.digest != digest:
        raise WeightsError(
            "the adapter is not the one that was named",
            where=f"{source}/{VALUES}",
            expected=digest,
            got=adapter.digest,
            hint="Restore the file, or launch a new run.",
        )


def _common_rank(
    values: Mapping[tuple[str, str], torch.Tensor], modules: Sequence[str], where: str
) -> int:
    """Return the rank of all matrices."""
    ranks: set[int] = set()
    for module in modules:
        down, up = values.get((module, "A")), values.get((module, "B"))
        if down is None or up is None:
            raise WeightsError(
                "a module has only one of A and B", where=f"{where}, {printable(module)}"
            )
        ranks |= {down.shape[0], up.shape[1]}
    if len(ranks) != 1 or 0 in ranks:
        raise WeightsError(
            "the matrices of the adapter have no common rank",
            where=where,
            expected="one rank for all modules",
            got=", ".join(map(str, sorted(ranks))) or "no matrices",
            hint="Merge it into its model with peft, and launch with --weights FOLDER.",
        )
    return ranks.pop()


def _number(value: Any) -> float:
    """Return a number of JSON as it is, and NaN for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else math.nan


def _parse_config(text: bytes, where: str) -> dict[str, Any]:
    try:
        config = parse_json(text)
    except ValueError as error:
        raise WeightsError("not valid JSON", where=where) from error
    is_object = isinstance(config, dict)
    if not is_object or not 0 < _number(config.get("lora_alpha")) <= _MAX_ALPHA:
        raise WeightsError(
            "not a configuration of an adapter",
            where=where,
            expected="a JSON object with a positive lora_alpha",
            got=repr(config.get("lora_alpha") if is_object else config)[:80],
        )
    if not 0 <= _number(config.get("lora_dropout") or 0) <= 1:
        raise WeightsError(
            "not a configuration of an adapter",
            where=f"{where}, lora_dropout",
            expected="a number from 0 to 1",
            got=repr(config["lora_dropout"])[:80],
        )
    expected: dict[str, Sequence[Any]] = {
        "peft_type": ("LORA",),
        "bias": (None, "none"),
        "init_lora_weights": _INITIALISATIONS,
        "use_rslora": (None, False, True),
        **dict.fromkeys(config.keys() - _WITHOUT_EFFECT - _READ, (None, False, "", [], {})),
    }
    for name, values in expected.items():
        if config.get(name) not in values:
            raise WeightsError(
                "the adapter is computed in a way that runs do not support",
                where=f"{where}, {printable(name)}",
                expected=" or ".join(map(repr, values)),
                got=printable(repr(config.get(name)))[:80],
                hint="Merge it into its model with peft, and launch with --weights FOLDER.",
            )
    return dict(config)
