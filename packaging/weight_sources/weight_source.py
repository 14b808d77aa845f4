"""The interface of sources of weights, and the record of their files."""

from __future__ import annotations

from typing import Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from trainload.core.storage.places import Where, absolute_place
from trainload.packaging.tensors.safetensors_file import TensorSpec

INIT = "init"
"""Name of the source that computes a package's first values."""


class SourceFile(BaseModel):
    """A file of a source, as it was when it was checked.

    Attributes:
        name: its name within the source.
        size: its size in bytes.
        state: changes if the file's content does: the version that its storage states, or a digest
            of its header and of parts of its tensors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size: int = Field(ge=0)
    state: str


class WeightSource(Protocol):
    """Tensors that are read in parts.

    All methods raise StorageError if the storage cannot be reached, and WeightsError if a file is
    malformed, or not the one that was checked.
    """

    @property
    def where(self) -> str:
        """Path or URL of the source, for messages."""

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """Tensors by their names. A dtype that packages do not support has its format's name."""

    def files(self, names: set[str]) -> tuple[SourceFile, ...]:
        """Return the files that have these tensors."""

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened tensor, of shape (stop - start,)."""


def source_of_weights(source: Where | None) -> str | None:
    """Return INIT as it is, or the absolute path or URL of a source; see `absolute_place`."""
    return source if source == INIT and isinstance(source, str) else absolute_place(source)
