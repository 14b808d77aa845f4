"""Corpus of the example."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.house.source import ROOT


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module examples/gpt/corpus.py."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "gpt"))
    import corpus

    yield corpus
    del sys.modules["corpus"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library: 60 modules, and a file that does not belong to it."""
    root = tmp_path / "library"
    (root / "site-packages").mkdir(parents=True)
    for number in range(60):
        (root / f"m{number:02}.py").write_bytes(bytes([number]) * 10)
    (root / "site-packages" / "other.py").write_bytes(b"\xff" * 100)
    return root


def column(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    tokens = pq.read_table(path)["tokens"].combine_chunks()
    values: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = (
        tokens.flatten().to_numpy().reshape(len(tokens), -1)
    )
    return values


def test_the_column_is_a_fixed_size_list_of_bytes(
    corpus: ModuleType, library: Path, tmp_path: Path
) -> None:
    made = corpus.build(tmp_path / "made", 9, library)
    assert pq.read_schema(made.train).field("tokens").type == pa.list_(pa.uint8(), 10)


def test_every_byte_of_the_library_is_in_one_of_the_parts(
    corpus: ModuleType, library: Path, tmp_path: Path
) -> None:
    made = corpus.build(tmp_path / "made", 9, library)
    both = np.concatenate([column(made.train), column(made.held_out)])
    assert sorted(both.flatten().tolist()) == sorted(np.repeat(np.arange(60), 10).tolist())


def test_files_are_held_out_whole(corpus: ModuleType, library: Path, tmp_path: Path) -> None:
    made = corpus.build(tmp_path / "made", 9, library)
    held = set(column(made.held_out).flatten().tolist())
    assert held == {number for number in range(60) if corpus.is_held_out(f"m{number:02}.py")}
    assert 0 < len(held) < 12


def test_installed_packages_are_no_part_of_it(corpus: ModuleType, library: Path) -> None:
    assert len(corpus.source_files(library)) == 60


def test_two_builds_give_the_same_bytes(corpus: ModuleType, library: Path, tmp_path: Path) -> None:
    one, two = (corpus.build(tmp_path / name, 9, library) for name in ("one", "two"))
    assert one.train.read_bytes() == two.train.read_bytes()
