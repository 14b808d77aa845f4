"""Records of a package in an OCI registry: an artifact with the media types of ModelPack.

ModelPack (github.com/modelpack/model-spec) is the CNCF's format for models in registries: an image
manifest with an artifact type, a config that describes the model, and a layer for each file,
neither packed nor compressed. `org.opencontainers.image.title` of a layer is its path too, so that
`oras pull` writes the package's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import IntegrityError, UnsafePackageError
from trainload.packaging.format.assets import media_type_of
from trainload.packaging.format.field_types import SafePath
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.stores.releases import check_files

MAX_MANIFEST = 4 * 2**20
"""Maximum size of an OCI manifest in bytes, which is the limit of registries."""
IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
WEIGHT = "application/vnd.cncf.model.weight.v1.raw"
WEIGHT_CONFIG = "application/vnd.cncf.model.weight.config.v1.raw"
CODE = "application/vnd.cncf.model.code.v1.raw"
DOC = "application/vnd.cncf.model.doc.v1.raw"
FILEPATH = "org.cncf.model.filepath"
TITLE = "org.opencontainers.image.title"
DESCRIPTION = "org.opencontainers.image.description"
PACKAGE = "trainload.package"
"""Annotation of the manifest with the package's digest."""


class Descriptor(BaseModel):
    """A blob's entry in an OCI manifest. Other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, populate_by_name=True)

    media_type: Annotated[str, Field(alias="mediaType", max_length=256)]
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0, lt=2**63)]
    annotations: dict[str, str] = {}


class Layer(Descriptor):
    """A file of the package."""

    @property
    def path(self) -> str:
        """Unvalidated path in the package."""
        return self.annotations.get(FILEPATH, "")


class OciManifest(BaseModel):
    """An OCI manifest of an artifact."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, populate_by_name=True)

    artifact_type: Annotated[str, Field(alias="artifactType", max_length=256)]
    config: Descriptor
    layers: Annotated[list[Layer], Field(max_length=100_000)]


class _Path(BaseModel):
    path: SafePath


def media_type(path: str) -> str:
    """Return ModelPack's media type for a package's file."""
    top, name = path.split("/")[0], path.rpartition("/")[2]
    if path.endswith(".safetensors"):
        return WEIGHT
    if top == "graphs":
        return CODE
    if (
        top in ("debug", "signatures")
        or name.endswith((".md", ".txt"))
        or name.upper().startswith(("LICENSE", "LICENCE", "NOTICE", "README"))
    ):
        return DOC
    return WEIGHT_CONFIG


def config_bytes(name: str, manifest: Manifest, files: Mapping[str, FileEntry]) -> bytes:
    """Return the artifact's config: the facts about a model that ModelPack's readers show."""
    owners = [entry for entry in manifest.parameters if entry.alias_of is None]
    count = 0
    for entry in owners:
        elements = 1
        for length in entry.shape:
            elements *= length
        count += elements
    precisions = sorted({entry.dtype for entry in owners})
    config = {
        "format": "trainload",
        "paramSize": _abbreviate_count(count),
        **({"precision": precisions[0]} if len(precisions) == 1 else {}),
    }
    layers = [f"sha256:{entry.sha256}" for _, entry in sorted(files.items())]
    return canonical_json(
        {
            "descriptor": {"name": name},
            "config": config,
            "modelfs": {"type": "layers", "diffIds": layers},
        }
    )


def manifest_bytes(
    digest: str, config: bytes, files: Mapping[str, FileEntry], message: str
) -> bytes:
    """Return the artifact's manifest. Law: the same package and message yield the same bytes."""
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": IMAGE_MANIFEST,
            "artifactType": ARTIFACT_TYPE,
            "config": {
                "mediaType": CONFIG_TYPE,
                "digest": f"sha256:{sha256_bytes(config)}",
                "size": len(config),
            },
            "layers": [
                {
                    "mediaType": media_type(path),
                    "digest": f"sha256:{entry.sha256}",
                    "size": entry.size,
                    "annotations": {FILEPATH: path, TITLE: path},
                }
                for path, entry in sorted(files.items())
            ],
            "annotations": {PACKAGE: digest, **({DESCRIPTION: message} if message else {})},
        }
    )


def files_of(data: bytes, where: str) -> dict[str, FileEntry]:
    """Return the files that an OCI manifest lists. The manifest may be hostile.

    Raises:
        IntegrityError: the manifest is not JSON.
        UnsafePackageError: it is too large, not of a package, or lists files that a package must
            not contain.
    """
    if len(data) > MAX_MANIFEST:
        raise UnsafePackageError(
            "the artifact's manifest is too large",
            where=where,
            expected=f"at most {MAX_MANIFEST} bytes",
        )
    try:
        raw: Any = json.loads(data)
        artifact = OciManifest.model_validate_json(data)
    except RecursionError as error:
        raise UnsafePackageError(
            "the artifact's manifest is nested too deeply", where=where
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        stated_type = raw.get("mediaType") if isinstance(raw, dict) else None
        raise UnsafePackageError(
            f"this is not an artifact of a package: {place}: {first['msg']}",
            where=where,
            expected=ARTIFACT_TYPE,
            got=str(stated_type)[:80],
        ) from error
    except ValueError as error:
        raise IntegrityError(
            "the artifact's manifest is not readable as JSON", where=where
        ) from error
    if artifact.artifact_type != ARTIFACT_TYPE:
        raise UnsafePackageError(
            "this is not an artifact of a model",
            where=where,
            expected=ARTIFACT_TYPE,
            got=artifact.artifact_type,
        )
    files: dict[str, FileEntry] = {}
    for layer in artifact.layers:
        try:
            path = _Path(path=layer.path).path
        except ValidationError as error:
            raise UnsafePackageError(
                "a layer's path is not a safe relative path",
                where=where,
                expected=FILEPATH,
                got=layer.path[:80],
            ) from error
        if path in files:
            raise UnsafePackageError("two layers have the same path", where=where, got=path)
        files[path] = FileEntry(
            media_type=media_type_of(path),
            sha256=layer.digest.removeprefix("sha256:"),
            size=layer.size,
        )
    if MANIFEST not in files:
        raise UnsafePackageError(
            "the artifact contains no package",
            where=where,
            expected=f"a layer {MANIFEST}",
            got=", ".join(sorted(files)[:5]),
        )
    check_files(files, where)
    return files


def _abbreviate_count(count: int) -> str:
    """Abbreviate a number: `1234567` -> "1.2M"."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
