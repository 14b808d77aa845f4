"""Folders that `save_to_disk` of Hugging Face datasets writes: Arrow files, and `state.json`, which
lists them; for a DatasetDict a folder of each split, and `dataset_dict.json`.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from trainload.core.canonical_json import parse_json
from trainload.core.errors import DataError, MissingDataError

STATE = "state.json"
SPLITS = "dataset_dict.json"
_INDICES = ("_indices_data_files", "_indices_files")
"""Keys of STATE by which early versions of datasets select and order rows."""


def data_files(content: bytes, folder: str) -> list[str] | None:
    """Return the names of a saved dataset's files in their order; None if the file is of another
    program.

    Args:
        content: bytes of its STATE.
        folder: path or URL of the folder, for messages.

    Raises:
        DataError: a name is not that of a file in the folder, or the rows are chosen by indices.
        MissingDataError: it has no files, and so no rows.
    """
    state = _parse(content)
    listed = state.get("_data_files")
    if not isinstance(listed, list):
        return None
    if any(state.get(key) for key in _INDICES):
        raise DataError(
            "a data set has a file of indices, which says which rows of the others are part of it",
            where=f"{folder}/{STATE}",
            expected="files with its rows only, as present versions of datasets write them",
            hint=(
                "Write it again with the version of datasets that wrote it:"
                " load_from_disk(FOLDER).flatten_indices().save_to_disk(ANOTHER)."
            ),
        )
    if not listed:
        raise MissingDataError("the data set has no rows", where=folder)
    names = [each.get("filename") if isinstance(each, dict) else None for each in listed]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or PurePosixPath(name).name != name:
            raise DataError(
                "a data set lists a file that is not in its folder",
                where=f"{folder}/{STATE}",
                expected="a name in this folder",
                got=repr(name)[:80],
                hint="Write it again with save_to_disk.",
            )
    return [str(name) for name in names]


def check_split(content: bytes, folder: str) -> None:
    """Raise MissingDataError if a file is the list of splits of a saved DatasetDict.

    Args:
        content: bytes of its SPLITS.
        folder: path or URL of the folder, whose user has named no split.
    """
    splits = _parse(content).get("splits")
    if isinstance(splits, list) and splits:
        raise MissingDataError(
            "this is a DatasetDict, which has a data set for each split",
            where=folder,
            expected=", ".join(f"{folder}/{split}" for split in splits),
            hint="Name the folder of one split.",
        )


def check_complete(missing: list[str], folder: str) -> None:
    """Raise MissingDataError if files that a saved dataset lists do not exist."""
    if missing:
        raise MissingDataError(
            "files of the data set are missing",
            where=folder,
            expected=f"the files that {STATE} lists",
            got=f"no {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""),
            hint="Copy the whole folder.",
        )


def _parse(content: bytes) -> dict[str, Any]:
    """Return a JSON object; {} for anything else, which is not a file of datasets."""
    try:
        document = parse_json(content)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
