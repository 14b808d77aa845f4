"""One shard of a checkpoint: a safetensors file, written in one pass with its digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from trainload.capture.errors import CheckpointError
from trainload.launch.checkpoints.index import FileRecord
from trainload.packaging.canonical import canonical_json

_DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_BLOCK = 4 << 20


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Writes contiguous CPU tensors of any shape as a safetensors file and fsyncs it.

    The library's own writer wants the whole file in memory or reads it again for a digest, and hides the errno of a full disk.
    Returns: the file's name, size and sha256. Raises: OSError; CheckpointError for a dtype that safetensors does not have.
    """
    # The format wants no holes; widest first keeps every tensor aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                "a tensor has a dtype that safetensors does not hold",
                where=name,
                expected=", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES),
                got=str(tensor.dtype).removeprefix("torch."),
            )
        end = offset + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    head = canonical_json(header)
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        blocks = [memoryview(len(head).to_bytes(8, "little") + head)]
        blocks += [tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in names if tensors[name].nbytes]
        for block in blocks:
            for start in range(0, len(block), _BLOCK):
                piece = block[start : start + _BLOCK]
                file.write(piece)
                digest.update(piece)
                size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(name=path.name, size=size, sha256=digest.hexdigest())
