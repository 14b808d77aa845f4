"""Weights of low-rank adapters (Hu et al. 2021): initial values, the merge with the adapted
weights, and peft's file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainload.autograd_trace.low_rank import LowRank
from trainload.autograd_trace.randomness.random_key import RandomKey
from trainload.core.atomic import replacing
from trainload.launching.checkpoints.load import full_parameters, whole_parameter
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.tensors.safetensors_file import write_tensors

ADAPTERS_FILE = "adapters.safetensors"
"""File in a run's folder with the trained adapters."""
_PEFT = "base_model.model."
"""Prefix of the names in peft's files."""


def first_values(adapters: Sequence[LowRank], manifest: Manifest, seed: int) -> dict[str, Tensor]:
    """Return the initial values of adapters.

    A is uniform within 1 / sqrt(in) of zero, which is Kaiming's bound for a = sqrt(5), as in peft;
    B is zero. A value depends only on the seed, the parameter's name and its place.

    Args:
        adapters: adapters of a package's parameters.
        manifest: manifest of the package.
        seed: seed of the run.

    Returns:
        Name -> tensor of the adapted parameter's dtype: A (rank, in), B (out, rank).
    """
    entries = {entry.name: entry for entry in manifest.parameters}
    values: dict[str, Tensor] = {}
    for adapter in adapters:
        rows, columns = entries[adapter.weight].shape
        dtype: torch.dtype = getattr(torch, entries[adapter.weight].dtype)
        site = int.from_bytes(hashlib.sha256(adapter.down.encode()).digest()[:4])
        key = RandomKey.of(torch.tensor(seed), torch.tensor(0), torch.tensor(0), 1)
        uniform = key.uniform(site, (adapter.rank, columns), None, torch.float32).to(torch.float64)
        values[adapter.down] = ((2.0 * uniform - 1.0) / math.sqrt(columns)).to(dtype)
        values[adapter.up] = torch.zeros(rows, adapter.rank, dtype=dtype)
    return values


def merged(
    checkpoint: Checkpoint, adapters: Sequence[LowRank], *, mean: bool
) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters of a run's frozen package, with W + scale B A of each adapter in place
    of W.

    Arguments and errors are those of `full_parameters`.
    """
    own = {name for adapter in adapters for name in (adapter.down, adapter.up)}
    adapted = {adapter.weight: adapter for adapter in adapters}
    for name, tensor in full_parameters(checkpoint, mean=mean):
        if name not in own:
            yield name, with_adapter(checkpoint, tensor, adapted.get(name), mean=mean)


def with_adapter(
    checkpoint: Checkpoint, tensor: Tensor, adapter: LowRank | None, *, mean: bool
) -> Tensor:
    """Return a parameter with its adapter, if it has one, merged into it; see `merged`."""
    if adapter is None:
        return tensor
    wide = torch.promote_types(tensor.dtype, torch.float32)
    up, down = (
        whole_parameter(checkpoint, part, mean=mean).to(wide) for part in (adapter.up, adapter.down)
    )
    return (tensor.to(wide) + adapter.scale * (up @ down)).to(tensor.dtype)


def write_adapters(
    checkpoint: Checkpoint, adapters: Sequence[LowRank], run_dir: Path, *, mean: bool
) -> Path:
    """Write the adapters of a checkpoint to the run's folder, under peft's names. An existing file
    is replaced.

    Raises:
        CheckpointError: a shard has changed.
        OSError: the disk is full.
    """
    names = [name for adapter in adapters for name in (adapter.down, adapter.up)]
    path = run_dir / ADAPTERS_FILE
    with replacing(path) as temporary:
        write_tensors(
            temporary,
            {_PEFT + name: whole_parameter(checkpoint, name, mean=mean) for name in names},
        )
    return path
