"""Mixtures: JSON files that list datasets, with constants and a weight for each.

{"parts": [{"data": "images.parquet", "constants": {"task": "caption"}, "weight": 2.0}, {"data":
"text.parquet", "name": "text"}]}

For held-out data, each part that has a name is also evaluated separately.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainload.core.errors import DataError, MissingDataError
from trainload.core.reading import reading
from trainload.core.storage.open_files import open_bounded
from trainload.core.storage.places import Where, is_url, local_path, split_url
from trainload.launching.data.data_files import Source

ENDING = ".json"
MOST_PARTS = 256
_MOST_BYTES = 2**24

Constant = bool | int | float | str | None


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    data: str | Annotated[list[str], Field(min_length=1)]
    constants: dict[str, Constant] = Field(default_factory=dict)
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    name: Annotated[str, Field(pattern=r"^[^\x00-\x1f]{1,128}$")] | None = None


class _Mixture(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    parts: Annotated[list[_Part], Field(min_length=1, max_length=MOST_PARTS)]


@dataclass(frozen=True, slots=True)
class Part:
    """A dataset of a run.

    Attributes:
        source: its files.
        constants: constants of its batches, by dotted name.
        weight: relative frequency of its global batches; None for its number of rows.
        where: its name in errors.
        name: name of its separate evaluation; None for no separate evaluation.
    """

    source: Source
    constants: Mapping[str, Constant]
    weight: float | None
    where: str
    name: str | None = None


def parts_of(source: Source) -> tuple[Part, ...]:
    """Return the parts of a mixture, or a single part for any other dataset.

    Args:
        source: path or URL of a mixture, which ends in .json, or a dataset. Relative paths in a
            mixture are relative to its folder.

    Raises:
        DataError: the mixture does not exist or is invalid, or two parts have the same name.
        StorageError: it cannot be read.
    """
    if not isinstance(source, str | Path) or Path(source).suffix != ENDING:
        return (Part(source, {}, None, ""),)
    path = source
    content = _read(source)
    if content is None:
        raise MissingDataError(
            "there is no such mixture",
            where=str(path),
            expected="a JSON file that lists parts",
            got="no file",
        )
    try:
        mixture = _Mixture.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"this is not a valid mixture: {place + ': ' if place else ''}{first['msg']}",
            where=str(path),
            expected=json.dumps(
                {"parts": [{"data": "rows.parquet", "constants": {}, "weight": 1.0}]}
            ),
            hint="See docs/guides/variants.md#mixtures.",
        ) from error
    names = [part.name for part in mixture.parts if part.name is not None]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            "two parts of a mixture have the same name",
            where=str(path),
            got=", ".join(twice),
            hint="Give each part its own name.",
        )
    return tuple(
        Part(
            source=(
                [_resolve_path(path, each) for each in part.data]
                if isinstance(part.data, list)
                else _resolve_path(path, part.data)
            ),
            constants=part.constants,
            weight=part.weight,
            where=f"{path}, part {number}",
            name=part.name,
        )
        for number, part in enumerate(mixture.parts, 1)
    )


def _read(mixture: Where) -> bytes | None:
    """Return the bytes of a mixture; None if it does not exist."""
    if is_url(mixture):
        folder, name = split_url(str(mixture))
        return open_bounded(folder).read(name, _MOST_BYTES)
    path = local_path(mixture)
    with reading("the data", path):
        return path.read_bytes() if path.is_file() else None


def _resolve_path(mixture: Where, data: str) -> str:
    if is_url(data):
        return data
    if is_url(mixture) and not Path(data).is_absolute():
        return f"{split_url(str(mixture))[0]}/{data}"
    return str(local_path(mixture).parent / data)
