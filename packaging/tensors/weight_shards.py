"""weights/: shards that any Hugging Face tool can read, digests of their chunks, and a lazy reader.

weights/chunks.json lists the sha256 of every chunk of every file. The reader reads only the
requested bytes, and checks each chunk that it touches, each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import IntegrityError, PackageError
from trainload.core.paths import open_inside, write_bytes
from trainload.core.work_steps import ByteStep
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_files import read_checked
from trainload.packaging.format.package_paths import CHUNKS, INDEX, NON_PERSISTENT
from trainload.packaging.tensors import chunks
from trainload.packaging.tensors.safetensors_file import (
    DTYPES,
    Place,
    TensorFileWriter,
    TensorSpec,
    bytes_of,
    header_length,
    parse_header,
    to_fill,
    write_tensors,
)

MAX_SHARD = 2 * 2**30
"""Maximum bytes of tensors in one shard, unless a single tensor is larger."""


def stored_tensors(manifest: Manifest) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the tensors in weights/: (parameters that are not aliases and persistent buffers,
    other buffers).
    """
    state = [
        TensorSpec(p.name, p.dtype, p.shape) for p in manifest.parameters if p.alias_of is None
    ]
    state += [TensorSpec(b.name, b.dtype, b.shape) for b in manifest.buffers if b.persistent]
    return tuple(state), tuple(
        TensorSpec(b.name, b.dtype, b.shape) for b in manifest.buffers if not b.persistent
    )


def valued_tensors(manifest: Manifest) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return those of `stored_tensors` that have values in weights/: all, or in an abstract package
    those that a launch has added.
    """
    state, others = stored_tensors(manifest)
    if manifest.abstract is None:
        return state, others
    return tuple(spec for spec in state if spec.name in manifest.abstract.added), ()


def trained_tensors(
    manifest: Manifest, parameters: Collection[str] | None = None
) -> frozenset[str]:
    """Return the names of tensors that training may change: `parameters` (None: those that the
    package trains), and all buffers.
    """
    if parameters is None:
        parameters = [entry.name for entry in manifest.parameters if entry.trainable]
    return frozenset(parameters) | {entry.name for entry in manifest.buffers}


def shard_layout(
    specs: Sequence[TensorSpec], max_shard: int = MAX_SHARD, changing: Collection[str] | None = None
) -> dict[str, tuple[TensorSpec, ...]]:
    """Return file -> its tensors: those of `changing` first, then the others in separate files,
    each in the order of `specs`.

    So files of tensors that training does not change are byte for byte the same before and after
    it, and a store keeps them once.

    Args:
        specs: the tensors.
        max_shard: maximum bytes of a file; a tensor that would exceed it begins a new file.
        changing: names of tensors that may change; None: all of them.
    """
    first = [spec for spec in specs if changing is None or spec.name in changing]
    others = [spec for spec in specs if changing is not None and spec.name not in changing]
    shards = [shard for part in (first, others) for shard in _fill_shards(part, max_shard)] or [[]]
    total = len(shards)
    return {
        f"weights/model-{i:05d}-of-{total:05d}.safetensors": tuple(shard)
        for i, shard in enumerate(shards, 1)
    }


def _fill_shards(specs: Sequence[TensorSpec], max_shard: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = []
    used_bytes = 0
    for spec in specs:
        if not shards or used_bytes + spec.nbytes > max_shard:
            shards.append([])
            used_bytes = 0
        shards[-1].append(spec)
        used_bytes += spec.nbytes
    return shards


def write_weights(
    root: Path,
    specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard: int = MAX_SHARD,
    changing: Collection[str] | None = None,
) -> list[str]:
    """Write weights/ under `root`, with one tensor of `tensors` in memory at a time, in any order.

    Args:
        root: folder of a package that is being written.
        specs: tensors as returned by `stored_tensors`.
        tensors: (name, tensor) for each of them.
        max_shard: as for `shard_layout`.
        changing: as for `shard_layout`.

    Returns:
        The files written, relative to `root`.

    Raises:
        PackageError: a tensor is missing, unknown, occurs twice or does not fit.
        OSError: the disk is full.
    """
    state, others = specs
    layout = shard_layout(state, max_shard, changing)
    if others:
        layout[NON_PERSISTENT] = tuple(others)
    (root / "weights").mkdir()
    with ExitStack() as stack:
        writers = {
            path: stack.enter_context(TensorFileWriter(root / path, shard))
            for path, shard in layout.items()
        }
        home = {spec.name: writers[path] for path, shard in layout.items() for spec in shard}
        size = sum(spec.nbytes for spec in (*state, *others))
        written = ByteStep("writing weights", size)
        for name, tensor in tensors:
            if name not in home:
                raise PackageError("the package has no such tensor", where=name)
            home[name].add(name, tensor)
            written.add(tensor.nbytes)
    names = {
        spec.name: path.removeprefix("weights/")
        for path, shard in layout.items()
        for spec in shard
        if path != NON_PERSISTENT
    }
    _write_lists(
        root,
        sum(spec.nbytes for spec in state),
        names,
        _digests_of_all(root, list(layout)),
    )
    return [*layout, INDEX, CHUNKS]


def add_weights(
    package: Path, manifest: Manifest, root: Path, added: Mapping[str, torch.Tensor]
) -> list[str]:
    """Write a weight file of new parameters under `root`, and the lists of weights/ for it and the
    files of another package.

    Args:
        package: the other package's folder.
        manifest: its manifest.
        root: folder of a package that is being written. The caller puts the other package's weight
            files there, unchanged.
        added: name -> parameter that the other package lacks; at least one.

    Returns:
        The files written, relative to `root`.

    Raises:
        IntegrityError: the other's lists are damaged.
        OSError: the disk is full.
    """
    state, _ = valued_tensors(manifest)
    homes: dict[str, str] = {}
    digests: dict[str, list[str]] = {}
    sizes = {
        path: entry.size
        for path, entry in manifest.files.items()
        if path.startswith("weights/") and path not in (INDEX, CHUNKS)
    }
    if INDEX in manifest.files:
        index = parse_canonical(read_checked(package, INDEX, manifest.files[INDEX]), INDEX)
        homes = _weight_map(index, {spec.name for spec in state})
        table = parse_canonical(read_checked(package, CHUNKS, manifest.files[CHUNKS]), CHUNKS)
        digests = _chunk_table(table, sizes)
    number = next(n for n in range(1, len(sizes) + 2) if _added_file(n) not in sizes)
    (root / "weights").mkdir(exist_ok=True)
    write_tensors(root / _added_file(number), added)
    digests[_added_file(number)] = _digests(root / _added_file(number))
    homes |= dict.fromkeys(added, _added_file(number).removeprefix("weights/"))
    _write_lists(
        root,
        sum(spec.nbytes for spec in state) + sum(tensor.nbytes for tensor in added.values()),
        homes,
        digests,
    )
    return [_added_file(number), INDEX, CHUNKS]


def _added_file(number: int) -> str:
    return f"weights/model-added-{number:05d}.safetensors"


def _write_lists(
    root: Path, size: int, homes: Mapping[str, str], digests: Mapping[str, list[str]]
) -> None:
    write_bytes(
        root / INDEX, canonical_json({"metadata": {"total_size": size}, "weight_map": homes})
    )
    write_bytes(root / CHUNKS, canonical_json({"chunk_size": chunks.CHUNK, "files": digests}))


def _digests_of_all(root: Path, files: Sequence[str]) -> dict[str, list[str]]:
    sizes = {file: (root / file).stat().st_size for file in files}
    read = ByteStep("computing the digests of weights", sum(sizes.values()))
    digests: dict[str, list[str]] = {}
    for file, size in sizes.items():
        digests[file] = _digests(root / file)
        read.add(size)
    return digests


def _digests(path: Path) -> list[str]:
    with path.open("rb") as file:
        return list(chunks.chunk_digests(file))


class WeightReader:
    """Lazy reader of a package's parameters and buffers.

    Opening it reads two small JSON files; only the last chunk is cached.

    Laws: a byte is returned only after the digest of its chunk was checked; a returned tensor has
    its own memory.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._specs: dict[str, tuple[str, TensorSpec]] = {}
        self._places: dict[str, dict[str, Place]] = {}
        state, others = valued_tensors(manifest)
        self._aliases = {p.name: p.alias_of for p in manifest.parameters if p.alias_of is not None}
        state_specs = {spec.name: spec for spec in state}
        index = parse_canonical(read_checked(root, INDEX, manifest.files[INDEX]), INDEX)
        homes = _weight_map(index, set(state_specs))
        for name, spec in state_specs.items():
            self._specs[name] = (f"weights/{homes[name]}", spec)
        for spec in others:
            self._specs[spec.name] = (NON_PERSISTENT, spec)
        used_files = {path for path, _ in self._specs.values()}
        listed = {path for path in manifest.files if path.startswith("weights/")} - {INDEX, CHUNKS}
        if used_files - listed or {
            path
            for path in listed
            if path not in used_files and (state_specs or path == NON_PERSISTENT)
        }:
            raise IntegrityError(
                "the files in the index do not match the manifest",
                where=INDEX,
                got=", ".join(sorted(used_files ^ listed)[:5]),
            )
        sizes = {path: manifest.files[path].size for path in listed}
        table = _chunk_table(
            parse_canonical(read_checked(root, CHUNKS, manifest.files[CHUNKS]), CHUNKS), sizes
        )
        last = chunks.LastChunk()
        self._files = {
            path: _open_chunked(root, path, sizes[path], digests, last)
            for path, digests in table.items()
        }

    def names(self) -> tuple[str, ...]:
        """Return the names of every parameter that is not an alias, and of every buffer."""
        return tuple(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter or buffer. Raises KeyError if the name is unknown."""
        return DTYPES[self._find(name)[1].dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter or buffer. Raises KeyError if the name is unknown."""
        return self._find(name)[1].shape

    def nbytes(self, name: str) -> int:
        """Return the bytes of a parameter or buffer. Raises KeyError if the name is unknown."""
        return self._find(name)[1].nbytes

    def tensor(self, name: str) -> torch.Tensor:
        """Read a parameter (or alias) or buffer into CPU memory.

        Raises:
            KeyError: the name is unknown.
            IntegrityError: the bytes are damaged.
        """
        path, spec = self._find(name)
        place = self._place(path, name)
        tensor = to_fill(spec.shape, DTYPES[spec.dtype])
        self._files[path].fill(place.start, bytes_of(tensor), onward=True)
        return tensor

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened tensor, of shape (stop - start,).

        Only their chunks are read.

        Raises:
            KeyError: the name is unknown.
            ValueError: the range is not within the tensor.
            IntegrityError: the bytes are damaged.
        """
        path, spec = self._find(name)
        place = self._place(path, name)
        item = DTYPES[spec.dtype].itemsize
        if not 0 <= start <= stop <= (place.stop - place.start) // item:
            raise ValueError(
                f"elements {start} to {stop} are not within {name} of shape {spec.shape}"
            )
        tensor = to_fill((stop - start,), DTYPES[spec.dtype])
        self._files[path].fill(place.start + start * item, bytes_of(tensor))
        return tensor

    def check_headers(self) -> None:
        """Check, by the headers, that every weight file contains the tensors of the manifest.

        No tensor is read.

        Raises:
            IntegrityError: a file does not, or its header is damaged.
        """
        for name, (path, _) in self._specs.items():
            self._place(path, name)

    def file(self, name: str) -> str:
        """Return the file that contains a parameter or buffer.

        Raises KeyError if the name is unknown.
        """
        return self._find(name)[0]

    def digests(self, name: str) -> tuple[int, tuple[str, ...]]:
        """Identify a tensor's bytes without reading them: return its offset in its first chunk, and
        the digests of its chunks.

        Law: if these are equal for two tensors of the same dtype and shape, so are the tensors.
        They may differ for equal tensors.

        Raises:
            KeyError: the name is unknown.
            IntegrityError: the file's header is damaged.
        """
        path, _ = self._find(name)
        place = self._place(path, name)
        return place.start % chunks.CHUNK, self._files[path].digests(place.start, place.stop)

    def check(self, name: str) -> None:
        """Read a tensor's bytes and compare their digests, without keeping them.

        Raises:
            KeyError: the name is unknown.
            IntegrityError: the bytes are damaged.
        """
        path, _ = self._find(name)
        place = self._place(path, name)
        self._files[path].check(place.start, place.stop)

    def _find(self, name: str) -> tuple[str, TensorSpec]:
        return self._specs[self._aliases.get(name, name)]

    def _place(self, path: str, name: str) -> Place:
        places = self._places.get(path)
        if places is None:
            file = self._files[path]
            length = header_length(file.read(0, min(8, file.size)), file.size, path)
            specs = [spec for home, spec in self._specs.values() if home == path]
            places = self._places[path] = parse_header(
                file.read(0, 8 + length), file.size, path, specs
            )
        return places[self._aliases.get(name, name)]


def _open_chunked(
    root: Path, path: str, size: int, digests: Sequence[str], last: chunks.LastChunk
) -> chunks.ChunkedFile:
    def damaged(number: int) -> IntegrityError:
        return IntegrityError(
            "a file of weights is damaged",
            where=path,
            expected=f"sha256 {digests[number]} of bytes from {number * chunks.CHUNK}",
            got="another",
            hint="Fetch the package again.",
        )

    return chunks.ChunkedFile(
        lambda: chunks.ranges_of(open_inside(root, path)), size, digests, damaged, last
    )


class Weights(Protocol):
    """Parameters and buffers that are read when they are needed; see `WeightReader`."""

    def names(self) -> tuple[str, ...]: ...

    def __contains__(self, name: object) -> bool: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor: ...

    def check_headers(self) -> None: ...


class LazyState(Mapping[str, torch.Tensor]):
    """`Program.state` of a package: each access reads the tensor from disk."""

    def __init__(self, reader: Weights) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._reader:
            raise KeyError(name)
        return self._reader.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._reader

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.names())

    def __len__(self) -> int:
        return len(self._reader.names())


def _weight_map(index: Any, expected_names: set[str]) -> dict[str, str]:
    if (
        not isinstance(index, dict)
        or set(index) != {"metadata", "weight_map"}
        or not isinstance(index["weight_map"], dict)
    ):
        raise IntegrityError("the index is malformed", where=INDEX)
    homes = index["weight_map"]
    if set(homes) != expected_names or not all(isinstance(home, str) for home in homes.values()):
        raise IntegrityError(
            "the tensors in the index do not match the manifest",
            where=INDEX,
            got=", ".join(sorted(set(homes) ^ expected_names)[:5]),
        )
    return dict(homes)


def _chunk_table(document: Any, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    if (
        not isinstance(document, dict)
        or set(document) != {"chunk_size", "files"}
        or canonical_json(document["chunk_size"]) != canonical_json(chunks.CHUNK)
    ):
        raise IntegrityError("the list of chunks is malformed", where=CHUNKS)
    files = document["files"]
    if not isinstance(files, dict) or set(files) != set(sizes):
        raise IntegrityError(
            "the files in the list of chunks do not match the manifest", where=CHUNKS
        )
    for path, size in sizes.items():
        if not isinstance(files[path], list) or len(files[path]) != -(-size // chunks.CHUNK):
            raise IntegrityError(
                "the list of chunks does not match the file's length", where=f"{CHUNKS}, {path}"
            )
    return dict(files)
