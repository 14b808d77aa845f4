"""Export of a state dict: as one safetensors file, or as a checkpoint of
torch.distributed.checkpoint (DCP).

Names are those of the model's state dict. A checkpoint also has the other names of tied tensors, as
`Module.state_dict()` has, since DCP loads every name that the model has.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from trainload.capture.job.stored_tensors import has_equal_bits
from trainload.core.errors import PackageError
from trainload.exporting.weights_folder import Contents
from trainload.packaging.package import Package
from trainload.packaging.tensors.safetensors_file import TensorFileWriter, TensorSpec
from trainload.packaging.weight_sources.dcp_source import DcpSource


def write_state_file(path: Path, package: Package, contents: Contents) -> None:
    """Write a safetensors file, with one tensor in memory at a time.

    Raises:
        IntegrityError: the package is damaged.
        OSError: the disk is full.
    """
    specs = [TensorSpec(s.name, s.spec.dtype, s.spec.shape) for s in contents.tensors]
    with TensorFileWriter(path, specs) as writer:
        for stored in contents.tensors:
            writer.add(stored.name, package.weights.tensor(stored.spec.name))


def check_state_file(path: Path, package: Package, contents: Contents) -> None:
    """Read the file with safetensors and compare every tensor with the package's.

    Raises:
        PackageError: a tensor is missing or differs.
    """
    with safe_open(path, framework="pt") as opened:
        for stored in contents.tensors:
            _check_equal(package, stored.spec.name, opened.get_tensor(stored.name))


def write_dcp(root: Path, package: Package, contents: Contents) -> None:
    """Write a checkpoint into an empty folder. All tensors are in memory at once.

    Raises:
        IntegrityError: the package is damaged.
        OSError: the disk is full.
    """
    state = {s.name: package.weights.tensor(s.spec.name) for s in contents.tensors}
    state |= {alias: state[name] for alias, name in contents.aliases.items()}
    with warnings.catch_warnings():
        # it is the intent
        warnings.filterwarnings("ignore", ".*assuming the intent is to save in a single process")
        save(state, storage_writer=FileSystemWriter(root), no_dist=True)


def check_dcp(root: Path, package: Package, contents: Contents) -> None:
    """Read the checkpoint as a source of weights, which unpickles nothing, and compare every
    tensor with the package's.

    Raises:
        PackageError: a tensor is missing or differs.
    """
    source = DcpSource(root)
    names = {stored.name: stored.spec for stored in contents.tensors}
    names |= {alias: names[name] for alias, name in contents.aliases.items()}
    for name, spec in names.items():
        if name not in source.tensors:
            raise PackageError("a tensor was not written", where=name)
        whole = source.slice(name, 0, package.weights.tensor(spec.name).numel())
        _check_equal(package, spec.name, whole.reshape(spec.shape))


def _check_equal(package: Package, name: str, found: Tensor) -> None:
    if not has_equal_bits(found, package.weights.tensor(name)):
        raise PackageError("a written tensor differs from the package's", where=name)
