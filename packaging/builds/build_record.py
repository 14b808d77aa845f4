"""build.json: what a folder of compiled graphs was made from, what runs it, and its files."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.records import Record, Sealed, Text, Time
from trainload.packaging.format.field_types import SafePath, Sha256
from trainload.packaging.format.manifest_records import FileEntry

BUILD_FILE = "build.json"
INDEX_FILE = "index.json"
"""Name of the file, in the folder of each part, that describes its graphs."""
_PART = re.compile(r"(0|[1-9][0-9]{0,8})/")
_MOST_FILES = 100_000

GraphName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}$")]
FactName = Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,31}$")]
Facts = Annotated[dict[FactName, int | Text | None], Field(max_length=32)]
"""Names of facts about a machine or its software -> values."""


class Target(Record):
    """Everything that compiled graphs depend on: job, plan, software and device.

    Attributes:
        job: sha256 of the program, its graphs and the parts of the plan that determine them.
        toolchain: versions of what compiles and loads the graphs.
        architecture: properties of the device that the graphs depend on.
    """

    job: Sha256
    toolchain: Facts
    architecture: Facts

    @property
    def key(self) -> str:
        """Hash by which caches find a build, 32 hex digits."""
        return sha256_bytes(canonical_json(self.model_dump(mode="json")))[:32]

    def difference(self, other: Target) -> str | None:
        """Describe in words why graphs for this target do not fit another one; None if they do.

        Example:
            >>> for_avx2.difference(for_avx512)
            'its capability is AVX2, not AVX512'
        """
        if self.job != other.job:
            return "it is of another program, or of another plan"
        differences = [
            f"its {name.replace('_', ' ')} is {before.get(name)}, not {after.get(name)}"
            for before, after in (
                (self.toolchain, other.toolchain),
                (self.architecture, other.architecture),
            )
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        ]
        return "; ".join(differences) or None


class BuildRecord(Sealed):
    """The record of a build: the compiled graphs of a job under a plan, for one kind of device.

    It is native code and pickles, so whoever can write one can run code on the machines that load
    it.

    Attributes:
        target: what the graphs fit.
        release: release of trainload that has made it.
        compiled: names of all graphs.
        unverified: those that no device of this architecture has compared with the interpreted
            graphs.
        files: every file of the folder but this one and signatures/.
        created: time in UTC.
    """

    target: Target
    release: Text
    compiled: tuple[GraphName, ...]
    unverified: tuple[GraphName, ...]
    files: Annotated[dict[SafePath, FileEntry], Field(max_length=_MOST_FILES)]
    created: Time
    kind: Literal["build"] = "build"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if unknown := set(self.unverified) - set(self.compiled):
            raise ValueError(f"the graph {min(unknown)} is unverified, but not of this build")
        if wrong := [file for file in self.files if not _PART.match(file)]:
            raise ValueError(f"the file {min(wrong)} cannot be part of a build")
        parts = {file.partition("/")[0] for file in self.files}
        if parts != {str(index) for index in range(len(parts))} or not parts:
            raise ValueError("the parts of a build are numbered from 0")
        if lacking := [part for part in sorted(parts) if f"{part}/{INDEX_FILE}" not in self.files]:
            raise ValueError(f"part {lacking[0]} has no {INDEX_FILE}")
        return self

    @property
    def is_verified(self) -> bool:
        """True if a device of the architecture has compared all graphs."""
        return not self.unverified

    @property
    def bytes(self) -> int:
        """Total size of the files in bytes; files with equal bytes count once."""
        return sum({entry.sha256: entry.size for entry in self.files.values()}.values())
