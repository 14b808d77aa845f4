"""Build the demo's corpus: the source text of this Python's standard library, as windows of bytes
in Parquet.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

HELD_OUT_SHARE = 20
"""One file in this many, chosen by the hash of its path, is held out."""
EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Location and size of a corpus: `train` and `held_out` are Parquet files with a column
    `tokens`.
    """

    train: Path
    held_out: Path
    files: int
    train_windows: int
    held_out_windows: int


def source_files(root: Path) -> list[Path]:
    """Return the .py files of the standard library at `root`, sorted by their relative paths."""
    found = (
        path
        for path in root.rglob("*.py")
        if not EXCLUDED.intersection(path.relative_to(root).parts)
    )
    return sorted(
        (path for path in found if path.is_file()),
        key=lambda path: path.relative_to(root).as_posix(),
    )


def is_held_out(relative: str) -> bool:
    """Return True if the file with this relative path is held out.

    Depends only on the path.
    """
    digest = hashlib.sha256(relative.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def windows(text: bytes, length: int) -> npt.NDArray[np.uint8]:
    """Split a text into rows of `length` bytes, shape (len(text) // length, length).

    An incomplete last row is dropped.
    """
    count = len(text) // length
    return np.frombuffer(text, dtype=np.uint8, count=count * length).reshape(count, length)


def write(rows: npt.NDArray[np.uint8], path: Path) -> None:
    """Write `rows`, shape (n, length), as one Parquet column `tokens` of
    fixed_size_list<uint8>[length].
    """
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    field = pa.field("tokens", tokens.type, nullable=False)
    table = pa.Table.from_arrays([tokens], schema=pa.schema([field]))
    pq.write_table(table, path, row_group_size=16384)


def build(folder: Path, context: int, root: Path | None = None) -> Corpus:
    """Build train.parquet and heldout.parquet in `folder`, in windows of `context + 1` bytes.

    Args:
        folder: output folder, created if it does not exist.
        context: number of bytes that the model sees; the last byte of a window is only a target.
        root: folder of the library. None: that of this Python.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = source_files(root)
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in files:
        parts[is_held_out(path.relative_to(root).as_posix())].append(path.read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = (windows(b"".join(parts[held]), context + 1) for held in (False, True))
    corpus = Corpus(
        folder / "train.parquet", folder / "heldout.parquet", len(files), len(train), len(held_out)
    )
    write(train, corpus.train)
    write(held_out, corpus.held_out)
    return corpus
