"""A checkpoint's index: canonical JSON that holds its own digest and those of all shards, and the names of checkpoint folders."""

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
"""Of the index's format. 1: the first, with a digest of each shard as a whole. 2: with one of each 4 MiB, so that a rank reads its part. 3:
each shard says how many bytes are under one, fewer for small shards."""
_READABLE = (2, VERSION)

INDEX = "index.json"
CHECKPOINTS = "checkpoints"
"""The folder of a run's folder that holds its checkpoints."""
DRAFT = ".tmp-"
"""What the names of folders begin with that are not, or no longer, checkpoints."""

_FOLDER = re.compile(r"step-([0-9]{8,})")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """A shard: its path in the checkpoint's folder, its bytes, and the sha256 in hex of each `chunk` of them (packaging.tensors.chunks)."""

    name: str
    size: int = Field(ge=0)
    chunk: int = Field(default=chunks.CHUNK, gt=0)
    chunks: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.chunks) != -(-self.size // self.chunk):
            raise ValueError(f"{self.name} has another number of digests than of chunks")
        return self


class DataPosition(_Record):
    """Where the run is in its data: which data, which order, how far."""

    fingerprint: str
    seed: int
    position: int = Field(ge=0)


class CheckpointIndex(_Record):
    """What a checkpoint holds.

    Laws: `step` is the next step to run. Shard i of `files`, whichever rank has written it, holds of each entry of each bucket the
    elements [i * length / n, (i + 1) * length / n), with n = world_size; of a bucket that a tensor axis of t ranks divides, those elements
    [p * length / d, (p + 1) * length / d) that rank i % t of it has, with p = i // t and d = n / t. Shard 0 also holds the
    scalars, and what parameters have in shapes of their own (`own`: parameter -> entries). Where a pipeline of s ranks wrote it, the shards
    are s runs of n = world_size / s; a bucket, with its scalars and `own`, lies in the run of the first rank that has one of its stages
    (`stage_ranks`), as it would in a checkpoint of that run alone. A buffer lies in the first shard of its run (`buffer_ranks`; 0 where it
    is not named). `entries` and `scalars` have the names of all buckets. `attempt` says which attempt of the run wrote it. `user` is
    anything that JSON can hold.
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
        """How many shards a rank of the pipeline has."""
        return self.world_size // max(1, len(set(self.stage_ranks)))

    def first_shard(self, bucket: Bucket) -> int:
        """The number of the first shard of the run that a bucket lies in."""
        return self.run_length * min((self.stage_ranks[stage] for stage in bucket.stages), default=0)


class Written(_Record):
    """What a rank has put into its shard: entries and scalars of the buckets that it answers for, and what parameters have of their own."""

    file: FileRecord
    entries: dict[str, tuple[str, ...]] = {}
    scalars: dict[str, tuple[str, ...]] = {}
    own: dict[str, tuple[str, ...]] = {}


def folder_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08}"


def shard_name(rank: int, world: int) -> str:
    """The name of a rank's shard."""
    return f"rank-{rank:05}-of-{world:05}.safetensors"


def flat_key(bucket: str, entry: str) -> str:
    """The name of a bucket's entry in a shard."""
    return f"flat/{entry}/{bucket}"


def scalar_key(bucket: str, entry: str) -> str:
    """The name of a bucket's 0-dim entry in shard 0."""
    return f"scalar/{entry}/{bucket}"


def own_key(parameter: str, entry: str) -> str:
    """The name of a parameter's entry of a shape of its own in shard 0."""
    return f"own/{entry}/{parameter}"


def buffer_key(name: str) -> str:
    """The name of a buffer in shard 0."""
    return f"buffer/{name}"


def published(run_dir: Path) -> dict[int, Path]:
    """Step -> folder of every checkpoint of a run that keeps them in its folder, oldest first."""
    return checkpoints_in(run_dir / CHECKPOINTS)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step -> folder of every checkpoint in a folder, oldest first."""
    if not folder.is_dir():
        return {}
    found = {step: path for path in folder.iterdir() if (step := step_of(path.name)) is not None}
    return dict(sorted(found.items()))


def step_of(name: str) -> int | None:
    """The step whose checkpoint has this name; None: of none."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def encode_index(index: CheckpointIndex) -> bytes:
    """The bytes of index.json. Law: decode_index(encode_index(x), "") == x. Raises: PackageError for a NaN in `user`."""
    content = index.model_dump(mode="json")
    return canonical_json({"content": content, "sha256": sha256_bytes(canonical_json(content))})


def decode_index(data: bytes, where: str) -> CheckpointIndex:
    """Reads index.json. Raises: CheckpointError where a bit of it has changed, or a newer version wrote it."""
    try:
        value = parse_canonical(data, where)
        if not isinstance(value, dict) or set(value) != {"content", "sha256"}:
            raise CheckpointError("this is no index of a checkpoint", where=where, expected="content and sha256")
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
                "the checkpoint has another format",
                where=where,
                expected=f"version {' or '.join(map(str, _READABLE))}",
                got=f"version {version}",
                hint="Use the trainload that wrote it.",
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
