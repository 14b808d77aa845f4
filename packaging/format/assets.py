"""assets/: extra files of a package, which trainload itself does not interpret.

docs/guides/assets.md lists the conventional names. Media types come from a table in this module:
the system's table differs between machines, and media types are part of a package's identity.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trainload.capture.job.definition import Asset, AssetLike
from trainload.core.errors import PackageError, StorageError
from trainload.core.paths import write_bytes, write_copy
from trainload.core.suggestions import did_you_mean
from trainload.packaging.format.field_types import MediaType
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_files import copy_checked, new_file, new_folder
from trainload.packaging.format.package_paths import safe_path

ASSETS = "assets/"
UNKNOWN = "application/octet-stream"
_BY_SUFFIX: Mapping[str, str] = {
    ".csv": "text/csv",
    ".gz": "application/gzip",
    ".html": "text/html",
    ".jinja": "text/plain",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".md": "text/markdown",
    ".parquet": "application/vnd.apache.parquet",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".safetensors": "application/vnd.safetensors",
    ".svg": "image/svg+xml",
    ".toml": "application/toml",
    ".tsv": "text/tab-separated-values",
    ".txt": "text/plain",
    ".wav": "audio/wav",
    ".webp": "image/webp",
    ".whl": "application/zip",
    ".xml": "application/xml",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".zip": "application/zip",
}
_PLAIN = frozenset({"AUTHORS", "COPYING", "LICENCE", "LICENSE", "NOTICE", "README"})
"""Names without a suffix that denote text files."""
_ROLES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("licence", re.compile(r"(LICEN[SC]E|COPYING|NOTICE)([.-][^/]*)?", re.IGNORECASE)),
    ("model card", re.compile(r"(README|MODEL_CARD)(\.(md|txt))?", re.IGNORECASE)),
    ("label map", re.compile(r"(labels|label_map|id2label)\.(json|txt|csv|tsv)")),
    (
        "tokenizer",
        re.compile(
            r"tokenizer/.+|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
        ),
    ),
    (
        "tokenizer",
        re.compile(r"tokenizer\.model|spiece\.model|vocab\.txt|merges\.txt|chat_template\.jinja"),
    ),
    ("configuration", re.compile(r"([a-z]+_)?config\.json")),
)
_MEDIA_TYPE: TypeAdapter[str] = TypeAdapter(MediaType)


@dataclass(frozen=True, slots=True)
class AssetFile:
    """An asset of a package.

    Attributes:
        name: path below assets/.
        role: "licence", "model card", "label map", "tokenizer", "configuration", or "": the role
            that follows from the name.
        media_type: media type, as in the manifest.
        size: size in bytes.
        sha256: digest of the bytes, in hex.
    """

    name: str
    role: str
    media_type: str
    size: int
    sha256: str


def assets_of(manifest: Manifest) -> tuple[AssetFile, ...]:
    """Return the assets that a manifest lists, sorted by name."""
    files = {
        file.removeprefix(ASSETS): entry
        for file, entry in manifest.files.items()
        if file.startswith(ASSETS)
    }
    return tuple(
        AssetFile(name, role_of(name), entry.media_type, entry.size, entry.sha256)
        for name, entry in sorted(files.items())
    )


def role_of(name: str) -> str:
    """Return the role of an asset by its name, or "" if no convention applies."""
    return next((role for role, pattern in _ROLES if pattern.fullmatch(name)), "")


def media_type_of(name: str) -> str:
    """Return a file's media type by its name."""
    base = name.rsplit("/", 1)[-1]
    return (
        "text/plain"
        if base.upper() in _PLAIN
        else _BY_SUFFIX.get(Path(base).suffix.lower(), UNKNOWN)
    )


def no_such_asset(manifest: Manifest, name: str) -> StorageError:
    """Return the error for an unknown asset, with a hint that lists the existing ones."""
    names = [asset.name for asset in assets_of(manifest)]
    hint = (
        " ".join([f"It has: {', '.join(names[:8])}.", did_you_mean(name, names)]).strip()
        if names
        else "It has none: add assets with Job(assets={...}) or freeze --asset."
    )
    return StorageError("the package has no such asset", where=f"{ASSETS}{name}", hint=hint)


def save_assets(root: Path, manifest: Manifest, name: str, target: Path) -> tuple[AssetFile, ...]:
    """Write an asset, or all assets of a folder, to a new path; see `Package.save_asset`."""
    assets = assets_of(manifest)
    for asset in assets:
        if asset.name == name:
            with new_file(target) as place:
                copy_checked(root, f"{ASSETS}{name}", manifest.files[f"{ASSETS}{name}"], place)
            return (asset,)
    prefix = f"{name.rstrip('/')}/" if name else ""
    inner = tuple(asset for asset in assets if asset.name.startswith(prefix))
    if not inner:
        raise no_such_asset(manifest, name)
    with new_folder(target) as folder:
        for asset in inner:
            place = folder / asset.name.removeprefix(prefix)
            place.parent.mkdir(parents=True, exist_ok=True)
            copy_checked(
                root, f"{ASSETS}{asset.name}", manifest.files[f"{ASSETS}{asset.name}"], place
            )
    return inner


@dataclass(frozen=True, slots=True)
class AssetSource:
    """A file that is to become an asset: its path in the package, its source, and its media type if
    the user gave one.
    """

    path: str
    source: Path | bytes
    media_type: str | None


def asset_sources(assets: Mapping[str, AssetLike]) -> tuple[AssetSource, ...]:
    """Return the files that `Job.assets` stands for. Nothing is written.

    Raises:
        PackageError: a name is not allowed in a package, two assets have the same name, or a media
            type is malformed.
        StorageError: a source is missing or cannot be read.
    """
    sources: dict[str, AssetSource] = {}
    for asset_name, asset in assets.items():
        media_type = asset.media_type if isinstance(asset, Asset) else None
        if media_type is not None:
            _check_media_type(asset_name, media_type)
        for name, source in _files(asset_name, asset.source if isinstance(asset, Asset) else asset):
            path = _asset_path(name)
            if path.casefold() in sources:
                raise PackageError(
                    "two assets have one name",
                    where=path,
                    hint=(
                        "Give each asset a different name; names are compared without regard to"
                        " case."
                    ),
                )
            sources[path.casefold()] = AssetSource(path, source, media_type)
    return tuple(sources.values())


def write_assets(root: Path, assets: Mapping[str, AssetLike]) -> dict[str, str]:
    """Write assets/ of a package.

    Args:
        root: the package's folder.
        assets: as `Job.assets`.

    Returns:
        Path in the package -> media type, for the assets whose media type was given.

    Raises: as `asset_sources`.
    """
    sources = asset_sources(assets)
    for asset in sources:
        if isinstance(asset.source, bytes):
            write_bytes(root / asset.path, asset.source)
        else:
            write_copy(asset.source, root / asset.path)
    return {asset.path: asset.media_type for asset in sources if asset.media_type is not None}


def _files(name: str, source: str | os.PathLike[str] | bytes) -> Iterator[tuple[str, Path | bytes]]:
    """Yield (name, source) of each file that an asset stands for, sorted by name."""
    if isinstance(source, bytes):
        yield name, source
        return
    path = Path(source)
    if path.is_dir():
        relative_paths = sorted(
            file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()
        )
        if not relative_paths:
            raise StorageError("an asset is an empty folder", where=str(path), hint="Omit it.")
        yield from (
            (f"{name.rstrip('/')}/{each}", _readable_file(path / each)) for each in relative_paths
        )
    elif path.is_file():
        yield name, _readable_file(path)
    else:
        raise StorageError("an asset is neither a file nor a folder", where=str(path))


def _readable_file(path: Path) -> Path:
    try:
        path.open("rb").close()
    except OSError as error:
        raise StorageError(f"an asset cannot be read: {error.strerror}", where=str(path)) from error
    return path


def _asset_path(name: str) -> str:
    try:
        return safe_path(f"{ASSETS}{name}")
    except ValueError as error:
        raise PackageError(
            "an asset's name is not allowed in a package",
            where=name,
            expected=(
                "letters, digits and _ . + - between slashes, and no part that begins with . + or -"
            ),
            got=repr(name),
            hint="Rename it. To omit some files of a folder, list the others one by one.",
        ) from error


def _check_media_type(name: str, media_type: str) -> None:
    try:
        _MEDIA_TYPE.validate_python(media_type)
    except ValidationError as error:
        raise PackageError(
            "this is not a media type",
            where=name,
            expected='type/subtype, such as "text/plain"',
            got=repr(media_type),
        ) from error
