"""Training text: bytes of the standard library's source, and tokens with a larger vocabulary."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measure import see_example

see_example()

import corpus  # noqa: E402  # from the example


def byte_windows(rows: int, length: int) -> npt.NDArray[np.uint8]:
    """Return the first `rows` windows of the standard library's source text, uint8 (rows, length).

    They depend only on the version of the library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in corpus.source_files(root):
        text += path.read_bytes()
        if len(text) >= rows * length:
            break
    return corpus.windows(bytes(text[: rows * length]), length).copy()


def word_windows(rows: int, length: int, vocabulary: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """Return tokens of a vocabulary too large for bytes, int32 (rows, length).

    They are drawn from a Zipf distribution; every second token is determined by the one before it,
    so that a model has something to learn.
    """
    generator = np.random.default_rng(seed)
    drawn = np.minimum(generator.zipf(1.2, size=(rows, length)), vocabulary) - 1
    drawn[:, 1::2] = (
        drawn[:, 0 : length - 1 : 2][:, : drawn[:, 1::2].shape[1]] * 31 + 7
    ) % vocabulary
    return drawn.astype(np.int32)
