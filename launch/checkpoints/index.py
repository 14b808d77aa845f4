"""The index of a checkpoint: canonical JSON with its own digest and those of all shards; names of
checkpoint folders.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
from trainload.core.errors import CheckpointError, PackageError
from trainload.packaging.tensors import chunks
from trainload.sharding.plans.plan import Bucket, Shard
from trainload.sharding.plans.strategies import Strategy

VERSION = 3
"""Version of the index's format. 1: a digest of each whole shard. 2: a digest of each 4 MiB, so
that a rank can read its part only. 3: the chunk size is stored for each shard, and is less for
small shards.
"""
_READABLE = (2, VERSION)

INDEX = "index.json"
CHECKPOINTS = "checkpoints"
"""Subfolder of a run's folder that contains its checkpoints."""

_FOLDER = re.compile(r"step-([0-9]{8,})")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """A shard: its path in the checkpoint's folder, its size in bytes, and the hex SHA-256 of each
    chunk of `chunk` bytes.

    See packaging/tensors/chunks.py.
    """

    name: str
    size: int = Field(ge=0)
    chunk: int = Field(default=chunks.CHUNK, gt=0)
    chunks: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.chunks) != -(-self.size // self.chunk):
            raise ValueError(f"{self.name} does not have one digest per chunk")
        return self


class DataPosition(_Record):
    """Position of a run in its data: fingerprint of the data, seed of its order, number of rows
    read.
    """

    fingerprint: str
    seed: int
    position: int = Field(ge=0)


class CheckpointIndex(_Record):
    """Contents of a checkpoint.

    Laws:
        - `step` is the next step to run.
        - With n = world_size, shard i of `files`, regardless of the rank that wrote it, contains
          the elements [i * length / n, (i + 1) * length / n) of each entry of each bucket.
        - For a bucket that a tensor axis of t ranks divides, it contains the elements
          [p * length / d, (p + 1) * length / d) of rank i % t, with p = i // t and d = n / t.
        - Shard 0 also contains the scalars, and the entries of parameters that have shapes of their
          own (`own`: parameter -> entries).
        - If a pipeline of s ranks wrote the checkpoint, the shards are s runs of n = world_size / s
          shards. A bucket, with its scalars and `own`, is in the run of the first rank that has one
          of its stages (`stage_ranks`), as in a checkpoint of that run alone. A buffer is in the
          first shard of its run (`buffer_ranks`; 0 if it is not named there).
        - `entries` and `scalars` have the names of all buckets.

    `attempt` is the name of the attempt of the run that wrote it; `user` is any JSON object.
    """

    version: int = VERSION
    package: str
    step: int = Field(ge=0)
    attempt: str
    strategy: Strategy
    world_size: int = Field(ge=1)
    tensor_ranks: int = Field(default=1, ge=1)
    tensor_shards: dict[str, Shard] = {}
    stage_ranks: tuple[int, ...] = ()
    buckets: tuple[Bucket, ...]
    entries: dict[str, tuple[str, ...]]
    scalars: dict[str, tuple[str, ...]]
    own: dict[str, tuple[str, ...]] = {}
    buffers: tuple[str, ...]
    buffer_ranks: dict[str, int] = {}
    data: DataPosition
    files: tuple[FileRecord, ...]
    user: dict[str, Any]

    @property
    def run_length(self) -> int:
        """Number of shards of each pipeline rank."""
        return self.world_size // max(1, len(set(self.stage_ranks)))

    def first_shard(self, bucket: Bucket) -> int:
        """Return the number of the first shard of the run of shards that contains a bucket."""
        return self.run_length * min(
            (self.stage_ranks[stage] for stage in bucket.stages), default=0
        )


class Written(_Record):
    """Contents of a rank's shard: entries and scalars of its buckets, and entries of parameters
    with their own shapes.
    """

    file: FileRecord
    entries: dict[str, tuple[str, ...]] = {}
    scalars: dict[str, tuple[str, ...]] = {}
    own: dict[str, tuple[str, ...]] = {}


def folder_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08}"


def shard_name(rank: int, world: int) -> str:
    """Return the file name of a rank's shard."""
    return f"rank-{rank:05}-of-{world:05}.safetensors"


def flat_key(bucket: str, entry: str) -> str:
    """Return the name of a bucket's entry in a shard."""
    return f"flat/{entry}/{bucket}"


def scalar_key(bucket: str, entry: str) -> str:
    """Return the name of a bucket's 0-dim entry in shard 0."""
    return f"scalar/{entry}/{bucket}"


def own_key(parameter: str, entry: str) -> str:
    """Return the name, in shard 0, of a parameter's entry that has its own shape."""
    return f"own/{entry}/{parameter}"


def buffer_key(name: str) -> str:
    """Return the name of a buffer in shard 0."""
    return f"buffer/{name}"


def published(run_dir: Path) -> dict[int, Path]:
    """Return step -> folder of every checkpoint in a run's own folder, oldest first."""
    return checkpoints_in(run_dir / CHECKPOINTS)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return step -> folder of every checkpoint in a folder, oldest first."""
    if not folder.is_dir():
        return {}
    checkpoints = {
        step: path
        for path in folder.iterdir()
        if (step := step_of(path.name)) is not None and (path / INDEX).is_file()
    }
    return dict(sorted(checkpoints.items()))


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint with this folder name; None if it is not the name of a
    checkpoint.
    """
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def encode_index(index: CheckpointIndex) -> bytes:
    """Return the bytes of index.json. Raises PackageError for a NaN in `user`.

    Law: decode_index(encode_index(x), "") == x.
    """
    content = index.model_dump(mode="json")
    return canonical_json({"content": content, "sha256": sha256_bytes(canonical_json(content))})


def decode_index(data: bytes, where: str) -> CheckpointIndex:
    """Decode index.json.

    Raises CheckpointError if it has changed since it was written, or has an unsupported version.
    """
    try:
        value = parse_canonical(data, where)
        if not isinstance(value, dict) or set(value) != {"content", "sha256"}:
            raise CheckpointError(
                "this is not the index of a checkpoint", where=where, expected="content and sha256"
            )
        digest = sha256_bytes(canonical_json(value["content"]))
        if digest != value["sha256"]:
            raise CheckpointError(
                "the index has changed since it was written",
                where=where,
                expected=f"sha256 {value['sha256']}",
                got=digest,
                hint="Resume from an earlier checkpoint.",
            )
        version = value["content"].get("version")
        if version not in _READABLE:
            raise CheckpointError(
                "the checkpoint has an unsupported format version",
                where=where,
                expected=f"version {' or '.join(map(str, _READABLE))}",
                got=f"version {version}",
                hint="Use the version of trainload that wrote it.",
            )
        return CheckpointIndex.model_validate(value["content"])
    except (PackageError, ValidationError) as error:
        problem = error.problem if isinstance(error, PackageError) else str(error)
        raise CheckpointError(
            f"the index cannot be read: {problem}",
            where=where,
            expected="the bytes that were written",
            hint="Resume from an earlier checkpoint.",
        ) from error
