"""Files that are read in parts, each of which is verified."""

from __future__ import annotations

import hashlib
import io
import random
from pathlib import Path

import pytest

from trainload.core.errors import IntegrityError
from trainload.packaging.tensors import chunks
from trainload.packaging.tensors.chunks import (
    ChunkDigests,
    ChunkedFile,
    LastChunk,
    chunk_digests,
    ranges_of,
)

CHUNK = 64
DATA = random.Random(1).randbytes(20 * CHUNK + 17)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", CHUNK)
    monkeypatch.setattr(chunks, "SPAN", 4 * CHUNK)


def damage(number: int) -> IntegrityError:
    return IntegrityError(f"chunk {number}")


def chunked(path: Path, data: bytes = DATA, last: LastChunk | None = None) -> ChunkedFile:
    """Return a file that contains `data`, with the digests of DATA."""
    path.write_bytes(data)
    digests = list(chunk_digests(io.BytesIO(DATA)))
    return ChunkedFile(
        lambda: ranges_of(path.open("rb", buffering=0)),
        len(DATA),
        digests,
        damage,
        last or LastChunk(),
    )


def test_digests_are_of_each_chunk_in_order() -> None:
    expected = [
        hashlib.sha256(DATA[at : at + CHUNK]).hexdigest() for at in range(0, len(DATA), CHUNK)
    ]
    assert list(chunk_digests(io.BytesIO(DATA))) == expected


@pytest.mark.parametrize("length", [1, 7, CHUNK, CHUNK + 1, 5 * CHUNK, len(DATA)])
def test_digests_do_not_depend_on_the_pieces(length: int) -> None:
    found = ChunkDigests()
    for at in range(0, len(DATA), length):
        found.update(DATA[at : at + length])
    assert found.finish() == tuple(chunk_digests(io.BytesIO(DATA)))


def test_an_empty_file_has_no_digests() -> None:
    assert ChunkDigests().finish() == ()


def test_every_part_reads_as_it_is(tmp_path: Path) -> None:
    file = chunked(tmp_path / "f")
    rng = random.Random(2)
    for _ in range(200):
        start, stop = sorted(rng.randrange(len(DATA) + 1) for _ in range(2))
        assert file.read(start, stop) == DATA[start:stop]


def test_files_that_share_the_last_chunk_do_not_mix_them_up(tmp_path: Path) -> None:
    last = LastChunk()
    first, second = chunked(tmp_path / "f", last=last), chunked(tmp_path / "g", last=last)
    (tmp_path / "g").write_bytes(DATA[:1] + bytes(CHUNK) + DATA[1 + CHUNK :])
    assert first.read(3, 5) == DATA[3:5]
    with pytest.raises(IntegrityError, match="chunk 0"):
        second.read(3, 5)


@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 9 * CHUNK + 5, len(DATA) - 1])
def test_a_flipped_bit_is_found_by_who_reads_its_chunk_and_by_no_one_else(
    tmp_path: Path, place: int
) -> None:
    file = chunked(tmp_path / "f", DATA[:place] + bytes([DATA[place] ^ 4]) + DATA[place + 1 :])
    number = place // CHUNK
    with pytest.raises(IntegrityError, match=f"chunk {number}$"):
        file.check()
    with pytest.raises(IntegrityError, match=f"chunk {number}$"):
        file.read(place, place + 1)
    assert file.read(0, number * CHUNK) == DATA[: number * CHUNK]
    after = min((number + 1) * CHUNK, len(DATA))
    assert file.read(after, len(DATA)) == DATA[after:]


def test_a_file_that_was_cut_is_found(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"chunk 20$"):
        chunked(tmp_path / "f", DATA[:-1]).check()


def test_nothing_is_read_for_nothing(tmp_path: Path) -> None:
    file = chunked(tmp_path / "f")
    (tmp_path / "f").unlink()
    assert file.read(5, 5) == b""


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 2**16), (2**26, 2**16), (2**26 + 1, 2**17), (2**31, 2**21), (2**40, 2**22)],
)
def test_a_file_that_many_read_has_about_a_thousand_chunks(
    monkeypatch: pytest.MonkeyPatch, size: int, expected: int
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 2**22)
    assert chunks.chunk_for(size) == expected


@pytest.mark.parametrize("chunk", [8, 16, 48])
def test_a_file_may_have_smaller_chunks(tmp_path: Path, chunk: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(DATA)
    digests = ChunkDigests(chunk)
    digests.update(DATA)
    found = digests.finish()
    assert len(found) == -(-len(DATA) // chunk)
    file = ChunkedFile(
        lambda: ranges_of(path.open("rb", buffering=0)),
        len(DATA),
        found,
        damage,
        LastChunk(),
        chunk,
    )
    rng = random.Random(3)
    for _ in range(100):
        start, stop = sorted(rng.randrange(len(DATA) + 1) for _ in range(2))
        assert file.read(start, stop) == DATA[start:stop]
    path.write_bytes(DATA[:500] + bytes([DATA[500] ^ 1]) + DATA[501:])
    assert file.read(0, 500 // chunk * chunk) == DATA[: 500 // chunk * chunk]
    with pytest.raises(IntegrityError, match=f"chunk {500 // chunk}"):
        file.read(0, len(DATA))
