"""Low-rank adapters (Hu et al. 2021): which parameters get one, what it begins with, and what becomes of it when a run has ended."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from trainload.autograd_trace.low_rank import LowRank
from trainload.autograd_trace.random import RandomKey
from trainload.capture.errors import JobError
from trainload.core.atomic import replacing
from trainload.launching.checkpoints.load import full_parameters
from trainload.launching.checkpoints.read import Checkpoint
from trainload.launching.checkpoints.state import MEAN, PARAM
from trainload.packaging.manifest import Manifest, ParameterEntry
from trainload.packaging.tensors import write_tensors

ADAPTERS_FILE = "adapters.safetensors"
"""Of a run's folder: the adapters that it has trained."""
_PEFT = "base_model.model."
"""What the names of peft's files begin with."""


class Adapters(BaseModel):
    """Low-rank adapters in place of the training of whole parameters: W becomes W + alpha / rank * B A, and only A and B are trained.

    Attributes:
        rank: rows of A (rank, in) and columns of B (out, rank).
        layers: patterns, as in a shell, of names of parameters W (out, in), each the weight of linear layers and nothing else.
        alpha: None: the rank, so that B A counts as it is.
        also: patterns of names of other parameters that are trained as the package says (norms, heads); all others stay as they are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=1)
    layers: tuple[str, ...] = Field(min_length=1)
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    also: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def chosen(self, manifest: Manifest) -> tuple[LowRank, ...]:
        """The adapters of a package, in the order of its parameters.

        Raises:
            JobError: a pattern fits nothing, or a parameter that cannot have an adapter of this rank; a name is taken.
        """
        parameters = {entry.name: entry for entry in manifest.parameters}
        matrices = [entry.name for entry in manifest.parameters if len(entry.shape) == 2]
        wanted = _matched(self.layers, list(parameters), matrices, "adapters.layers")
        tied = {entry.alias_of: entry.name for entry in manifest.parameters if entry.alias_of is not None}
        found = tuple(self._of(parameters[name], tied) for name in parameters if name in wanted)
        taken = {*parameters, *(buffer.name for buffer in manifest.buffers)}
        clash = next((name for each in found for name in (each.down, each.up) if name in taken), None)
        if clash is not None:
            raise JobError(
                "the package has a parameter of an adapter's name",
                where="adapters.layers",
                got=clash,
                cure="It was frozen with adapters: choose other layers, or freeze it with the adapters merged.",
            )
        return found

    def kept(self, manifest: Manifest) -> frozenset[str]:
        """The parameters that are trained beside the adapters.

        Raises:
            JobError: a pattern fits no trained parameter, or one that gets an adapter.
        """
        names = list(dict.fromkeys(name for group in manifest.recipe.groups for name in group.parameters))
        found = _matched(self.also, names, names, "adapters.also")
        both = sorted(found & {each.weight for each in self.chosen(manifest)})
        if both:
            raise JobError(
                "a parameter gets an adapter and is trained as well",
                where="adapters.also",
                got=both[0],
                cure="Name it in adapters.layers or in adapters.also.",
            )
        return found

    def _of(self, entry: ParameterEntry, tied: Mapping[str, str]) -> LowRank:
        other = entry.alias_of or tied.get(entry.name)
        if other is not None:
            raise JobError(
                f"{entry.name} and {other} are one parameter, and an adapter of it would be in both places",
                where="adapters.layers",
                got=entry.name,
                cure="Leave it out of the pattern, or train it as it is: adapters.also.",
            )
        if len(entry.shape) != 2:
            raise JobError(
                f"{entry.name} is no linear layer's weight",
                where="adapters.layers",
                expected="parameters of two dims (out, in)",
                got=f"shape {tuple(entry.shape)}",
                cure="Match the weights alone: '*.q_proj.weight'.",
            )
        if self.rank > min(entry.shape):
            raise JobError(
                "the rank is greater than a layer's",
                where="adapters.rank",
                expected=f"at most {min(entry.shape)}, as {entry.name} has shape {tuple(entry.shape)}",
                got=str(self.rank),
            )
        module, _, last = entry.name.rpartition(".")
        prefix = f"{module}." if module else ""
        return LowRank(entry.name, f"{prefix}lora_A.{last}", f"{prefix}lora_B.{last}", self.rank, self.scale)


def _matched(patterns: Sequence[str], names: Sequence[str], like: Sequence[str], where: str) -> frozenset[str]:
    """The names that some pattern fits. Raises: JobError where one fits none; it lists what is near among `like`."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, like, n=5, cutoff=0.3) or list(like[:5])
            raise JobError(
                f"no {'trained ' if where == 'adapters.also' else ''}parameter has a name like {pattern!r}",
                where=where,
                expected=", ".join(near) + (", ..." if len(like) > len(near) else ""),
                cure="Patterns are those of a shell: `*.q_proj.weight`. `trainload inspect --json` lists the names.",
            )
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def first_values(adapters: Sequence[LowRank], manifest: Manifest, seed: int) -> dict[str, Tensor]:
    """What adapters begin with: A uniform within 1 / sqrt(in) of zero, which is Kaiming's bound for a = sqrt(5), as in peft; B zero. A
    value follows from the seed, the parameter's name and its place alone.

    Args:
        adapters: of a package's parameters.
        manifest: the package's.
        seed: the run's.

    Returns:
        By name, tensors of the adapted parameter's dtype: A (rank, in), B (out, rank).
    """
    entries = {entry.name: entry for entry in manifest.parameters}
    found: dict[str, Tensor] = {}
    for each in adapters:
        rows, columns = entries[each.weight].shape
        dtype: torch.dtype = getattr(torch, entries[each.weight].dtype)
        site = int.from_bytes(hashlib.sha256(each.down.encode()).digest()[:4])
        key = RandomKey.of(torch.tensor(seed), torch.tensor(0), torch.tensor(0), 1)
        uniform = key.uniform(site, (each.rank, columns), None, torch.float32).to(torch.float64)
        found[each.down] = ((2.0 * uniform - 1.0) / math.sqrt(columns)).to(dtype)
        found[each.up] = torch.zeros(rows, each.rank, dtype=dtype)
    return found


def merged(checkpoint: Checkpoint, adapters: Sequence[LowRank], *, mean: bool) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a run's package as it was frozen: each adapter's W + scale B A in place of W. Otherwise as `full_parameters`."""
    own = {name for each in adapters for name in (each.down, each.up)}
    adapted = {each.weight: each for each in adapters}
    for name, tensor in full_parameters(checkpoint, mean=mean):
        if name in own:
            continue
        each = adapted.get(name)
        if each is None:
            yield name, tensor
            continue
        wide = torch.promote_types(tensor.dtype, torch.float32)
        up, down = (_parameter(checkpoint, part, mean=mean).to(wide) for part in (each.up, each.down))
        yield name, (tensor.to(wide) + each.scale * (up @ down)).to(tensor.dtype)


def write_adapters(checkpoint: Checkpoint, adapters: Sequence[LowRank], run_dir: Path, *, mean: bool) -> Path:
    """Writes a checkpoint's adapters into the run's folder, under peft's names for them, in place of what lies there.

    Raises:
        CheckpointError: a shard has changed.
        OSError: the disk is full.
    """
    names = [name for each in adapters for name in (each.down, each.up)]
    path = run_dir / ADAPTERS_FILE
    with replacing(path) as temporary:
        write_tensors(temporary, {_PEFT + name: _parameter(checkpoint, name, mean=mean) for name in names})
    return path


def _parameter(checkpoint: Checkpoint, name: str, *, mean: bool) -> Tensor:
    """One parameter, as `full_parameters` gives it."""
    bucket, _ = checkpoint.bucket_of(name)
    entry = MEAN if mean and MEAN in checkpoint.index.entries[bucket.name] else PARAM
    shape = checkpoint.shape(name)
    return checkpoint.parameter_interval(name, entry, 0, math.prod(shape)).reshape(shape)
