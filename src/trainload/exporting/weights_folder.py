"""Export of weights as a folder for Hugging Face's tools, which `from_pretrained` opens.

Names are those of the model's state dict. Of tied tensors only one is written, as is usual in
safetensors and transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from trainload.capture.job.stored_tensors import has_equal_bits
from trainload.core.canonical_json import canonical_json, parse_json
from trainload.core.errors import PackageError
from trainload.core.paths import write_bytes
from trainload.core.suggestions import did_you_mean
from trainload.packaging.format.assets import ASSETS, assets_of
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_files import copy_checked
from trainload.packaging.package import Package
from trainload.packaging.tensors.safetensors_file import TensorFileWriter, TensorSpec
from trainload.packaging.tensors.weight_shards import MAX_SHARD, shard_layout

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CARD = "README.md"
NOTE = "trainload.json"
MADE_OF = "huggingface.json"
"""Asset that names the module of the job's model that is a transformers model, and its class."""
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
TOKENIZER = "tokenizer/"
"""Folder of assets that are put next to the weights, where transformers looks for them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the folder: its name there, and its spec with the name in the package."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Contents:
    """The part of a package's state that a folder contains.

    Attributes:
        part: module of the job's model whose state it is; "": all of it.
        tensors: tensors in the package's order; names are relative to `part`.
        aliases: name that is not written -> name whose tensor it shares.
    """

    part: str
    tensors: tuple[Stored, ...]
    aliases: dict[str, str]


def contents_of(manifest: Manifest, part: str) -> Contents:
    """Return the contents of a folder for one module of the job's model.

    Args:
        manifest: the package's manifest.
        part: the module's dotted name; "": the model itself.

    Raises:
        PackageError: there is no such module, or it has no state.
    """
    prefix = f"{part}." if part else ""
    owners = {p.name: p.alias_of or p.name for p in manifest.parameters}
    specs = [*((p.name, p.dtype, p.shape) for p in manifest.parameters)]
    specs += [(b.name, b.dtype, b.shape) for b in manifest.buffers if b.persistent]
    by_owner: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    # Parameters that are not aliases come first, so that they keep their names if they are in the
    # module.
    inside = [spec for spec in specs if spec[0].startswith(prefix)]
    for name, dtype, shape in sorted(
        inside, key=lambda spec: owners.get(spec[0], spec[0]) != spec[0]
    ):
        owner, short = owners.get(name, name), name.removeprefix(prefix)
        if owner in by_owner:
            aliases[short] = by_owner[owner].name
        else:
            by_owner[owner] = Stored(short, TensorSpec(name, dtype, shape))
    if not by_owner:
        modules = sorted({name.rpartition(".")[0] for name, _, _ in specs} - {""})
        raise PackageError(
            "the model has no module of this name with weights",
            where=part,
            hint=did_you_mean(
                part, modules, f"Modules with weights: {', '.join(modules[:8]) or 'none'}."
            ),
        )
    return Contents(part, tuple(by_owner.values()), dict(sorted(aliases.items())))


def read_json_asset(package: Package, name: str) -> Any:
    """Return the value of an asset that the package has. Raises PackageError if it is not JSON."""
    try:
        return parse_json(package.asset(name))
    except ValueError as error:
        raise PackageError("not valid JSON", where=f"{ASSETS}{name}") from error


def transformers_part(package: Package) -> str | None:
    """Return the module of the job's model that is a transformers model, or None if the package
    does not name one.

    Raises:
        PackageError: the asset that names it is malformed.
    """
    if f"{ASSETS}{MADE_OF}" not in package.manifest.files:
        return None
    document = read_json_asset(package, MADE_OF)
    part = document.get("part") if isinstance(document, dict) else None
    if not isinstance(part, str):
        raise PackageError(
            "the file does not name a module",
            where=f"{ASSETS}{MADE_OF}",
            expected='{"part": "..."}',
            got=repr(document)[:80],
        )
    return part


def write_folder(
    root: Path,
    package: Package,
    contents: Contents,
    note: dict[str, Any],
    max_shard: int = MAX_SHARD,
) -> None:
    """Write the files into an empty folder, with one tensor in memory at a time.

    Args:
        root: the empty folder.
        package: the package.
        contents: `contents_of` its manifest.
        note: fields of NOTE in addition to `part` and `aliases`.
        max_shard: bytes of tensors in one file.

    Raises:
        PackageError: two files have the same name; nothing was written.
        IntegrityError: the package is damaged.
        OSError: the disk is full.
    """
    assets = _assets(package, contents)
    shards = _shards(contents, max_shard)
    for file, stored in shards.items():
        with ExitStack() as stack:
            writer = stack.enter_context(
                TensorFileWriter(
                    root / file, [TensorSpec(s.name, s.spec.dtype, s.spec.shape) for s in stored]
                )
            )
            for each in stored:
                writer.add(each.name, package.weights.tensor(each.spec.name))
    if len(shards) > 1:
        total = sum(each.spec.nbytes for each in contents.tensors)
        homes = {each.name: file for file, stored in shards.items() for each in stored}
        write_bytes(
            root / INDEX, canonical_json({"metadata": {"total_size": total}, "weight_map": homes})
        )
    write_bytes(
        root / NOTE, canonical_json({**note, "part": contents.part, "aliases": contents.aliases})
    )
    for target, name in assets.items():
        place = root / target
        place.parent.mkdir(parents=True, exist_ok=True)
        copy_checked(
            package.path, f"{ASSETS}{name}", package.manifest.files[f"{ASSETS}{name}"], place
        )
    if CARD not in assets:
        write_bytes(root / CARD, _card(package, contents).encode("utf-8"))


def check_folder(root: Path, package: Package, contents: Contents) -> None:
    """Read the folder with safetensors and compare every tensor with the package's.

    Raises:
        PackageError: a tensor is missing or differs.
    """
    unchecked = {stored.name: stored.spec.name for stored in contents.tensors}
    for file in sorted(root.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys() & unchecked.keys():
                if not has_equal_bits(
                    opened.get_tensor(name), package.weights.tensor(unchecked.pop(name))
                ):
                    raise PackageError(
                        "a written tensor differs from the package's", where=f"{file.name}, {name}"
                    )
    if unchecked:
        raise PackageError("a tensor was not written", where=min(unchecked))


def _shards(contents: Contents, max_shard: int) -> dict[str, Sequence[Stored]]:
    by_name = {stored.spec.name: stored for stored in contents.tensors}
    layout = shard_layout([stored.spec for stored in contents.tensors], max_shard)
    shards = {
        file.removeprefix("weights/"): [by_name[spec.name] for spec in specs]
        for file, specs in layout.items()
    }
    return {ONE: next(iter(shards.values()))} if len(shards) == 1 else dict(shards)


def _assets(package: Package, contents: Contents) -> dict[str, str]:
    """Return path in the folder -> asset.

    A configuration is included only with the weights of its own model.

    Raises:
        PackageError: two files have the same name.
    """
    made_for = transformers_part(package)
    asset_names: dict[str, str] = {}
    for asset in assets_of(package.manifest):
        if asset.name == MADE_OF or (
            asset.role == "configuration" and made_for not in (None, contents.part)
        ):
            continue
        place = asset.name.removeprefix(TOKENIZER)
        if place in asset_names or place in (INDEX, NOTE) or _WEIGHTS.fullmatch(place):
            raise PackageError(
                "two files of the folder have the same name",
                where=f"{ASSETS}{asset.name}",
                got=place,
                hint="Rename the asset.",
            )
        asset_names[place] = asset.name
    return asset_names


def _card(package: Package, contents: Contents) -> str:
    """Return a model card for a package without one."""
    manifest = package.manifest
    transformers = f"{ASSETS}{MADE_OF}" in manifest.files
    count = sum(math.prod(stored.spec.shape) for stored in contents.tensors)
    rows = [
        ("package", package.digest),
        ("made from", manifest.parent or "a freeze"),
        ("entries of weights and buffers", f"{count:,} in {len(contents.tensors)} tensors"),
        ("optimizer", manifest.recipe.optimizer),
    ]
    if contents.part:
        rows.insert(0, ("module", contents.part))
    load = (
        'transformers.AutoModel.from_pretrained(".")  # or the class that config.json names'
        if transformers
        else (
            f'safetensors.torch.load_model(model, "{ONE}")  # a model of the same code; or'
            " load_file"
        )
    )
    head = [
        "---",
        "library_name: transformers" if transformers else "library_name: safetensors",
        "tags: [trainload]",
        "---",
    ]
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(
        [
            *head,
            "",
            "# Weights of a trainload package",
            "",
            *table,
            "",
            "```python",
            load,
            "```",
            "",
        ]
    )
