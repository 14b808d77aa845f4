"""signatures/NAME.sig: parser of signature files as hostile input.

Signatures are not verified here.

A file is a Sigstore bundle around an in-toto statement, as in OpenSSF model signing 1.0;
docs/reference/format.md specifies the subset that packages use. It is parsed without the signing
library, so that every reader can list signatures.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from trainload.core.canonical_json import nesting
from trainload.core.errors import IntegrityError, UnsafePackageError
from trainload.core.paths import open_inside
from trainload.packaging.format.field_types import SafePath, Sha256
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_files import walk
from trainload.packaging.format.package_paths import MANIFEST, SIGNATURES

SUFFIX = ".sig"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
"""Pattern of a signature's name, without its suffix."""
MAX_SIGNATURE = 4 * 2**20
"""Maximum size of one file in bytes."""
MAX_DEPTH = 32
MAX_SIGNATURES = 100
"""Maximum number of files in signatures/."""

Kind = Literal["key", "certificate", "keyless"]
Parsed = TypeVar("Parsed", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SignatureFile:
    """The unverified claims of a well-formed signature.

    Attributes:
        file: path in the package.
        kind: "key": made with a bare key; "certificate": with the key of a certificate; "keyless":
            by Sigstore's services.
        signer: for a key, the sha256 of the public key as PEM; otherwise the sha256 of the
            certificate as DER.
        files: path -> sha256 of every signed file.
        data: the file's bytes.
        certificate: the signer's certificate as DER; b"" for a key.
    """

    file: str
    kind: Kind
    signer: str
    files: Mapping[str, str] = field(repr=False)
    data: bytes = field(repr=False)
    certificate: bytes = field(repr=False)

    @property
    def by(self) -> str:
        """The claimed signer, for messages."""
        return f"a {self.kind} {'certificate ' if self.kind == 'keyless' else ''}{self.signer}"

    def difference(self, expected_files: Mapping[str, str]) -> str | None:
        """Describe how the signed files differ from those that must be, or return None if they do
        not.

        Args:
            expected_files: path -> sha256 of exactly the files that must be signed.
        """
        missing, extra = (
            sorted(set(expected_files) - set(self.files)),
            sorted(set(self.files) - set(expected_files)),
        )
        changed = sorted(
            path
            for path in set(expected_files) & set(self.files)
            if expected_files[path] != self.files[path]
        )
        differences = [("changed", changed), ("missing", missing), ("extra", extra)]
        if not (changed or missing or extra):
            return None
        listed = ", ".join(
            f"{word} {_abbreviate_paths(paths)}" for word, paths in differences if paths
        )
        return f"the signed files differ from those that are here: {listed}"


def signed_files(manifest: Manifest, digest: str) -> dict[str, str]:
    """Return exactly the files that a signature of a package must cover: path -> sha256 of
    manifest.json and every file that it lists.
    """
    return {MANIFEST: digest, **{path: entry.sha256 for path, entry in manifest.files.items()}}


def signature_paths(root: Path) -> tuple[str, ...]:
    """Return the files in signatures/, sorted.

    Names that begin with a dot are left out: they are temporary files, perhaps of a killed writer.

    Raises:
        UnsafePackageError: a link or special file, or too many files.
    """
    folder = root / SIGNATURES
    if folder.is_symlink():
        raise UnsafePackageError(
            "a package may contain only regular files and folders", where=SIGNATURES, got="a link"
        )
    if not folder.is_dir():
        return ()
    paths: list[str] = []
    for path, _ in walk(folder):
        if not path.startswith("."):
            paths.append(f"{SIGNATURES}/{path}")
        if len(paths) > MAX_SIGNATURES:
            raise UnsafePackageError(
                "there are too many signatures",
                where=SIGNATURES,
                expected=f"at most {MAX_SIGNATURES}",
            )
    return tuple(paths)


def read_signature(root: Path, path: str) -> SignatureFile:
    """Read a file of signatures/.

    Raises:
        UnsafePackageError: it is a link, too large, or nested too deeply.
        IntegrityError: it is missing or malformed.
    """
    name = path.removeprefix(f"{SIGNATURES}/").removesuffix(SUFFIX)
    if not path.endswith(SUFFIX) or not NAME.fullmatch(name):
        raise IntegrityError(
            "this is not a signature file",
            where=path,
            expected=f"{SIGNATURES}/NAME{SUFFIX}",
            hint="Remove it.",
        )
    with open_inside(root, path) as file:
        return parse_signature(file.read(MAX_SIGNATURE + 1), path)


def parse_signature(data: bytes, where: str) -> SignatureFile:
    """Parse the bytes of a signature. `where` is the file's path in the package.

    Raises: as `read_signature`.
    """
    bundle = _validate_record(_Bundle, _parse_json(data, where), where)
    payload = _decode_base64(bundle.dsse_envelope.payload, where)
    statement = _validate_record(_Statement, _parse_json(payload, where), where)
    files: dict[str, str] = {}
    for resource in statement.predicate.resources:
        if resource.name in files:
            raise IntegrityError(
                "the signature is malformed: it lists a file twice", where=where, got=resource.name
            )
        files[resource.name] = resource.digest
    kind, certificate = _signer(bundle.verification_material, where)
    key = bundle.verification_material.public_key
    return SignatureFile(
        where,
        kind,
        key.hint if key is not None else hashlib.sha256(certificate).hexdigest(),
        files,
        data,
        certificate,
    )


def _abbreviate_paths(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


class _Strict(BaseModel):
    """An object of a bundle: exactly these fields and spellings, since another reader might
    interpret other spellings differently.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=False,
    )


class _Open(BaseModel):
    """An object of a statement, whose version lets writers add fields."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _PublicKey(_Strict):
    hint: Sha256


class _Certificate(_Strict):
    raw_bytes: str


class _Chain(_Strict):
    certificates: Annotated[
        tuple[_Certificate, ...], Field(min_length=1, max_length=16, strict=False)
    ]


class _Material(_Strict):
    public_key: _PublicKey | None = None
    x509_certificate_chain: _Chain | None = None
    certificate: _Certificate | None = None
    tlog_entries: list[Any] = []
    timestamp_verification_data: Any = None


class _Mark(_Strict):
    sig: str
    keyid: str | None = None


class _Envelope(_Strict):
    payload: str
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: Annotated[tuple[_Mark, ...], Field(min_length=1, max_length=1, strict=False)]


class _Bundle(_Strict):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: _Envelope


class _Serialization(_Open):
    method: Literal["files"]
    hash_type: Literal["sha256"]
    allow_symlinks: Literal[False]


class _Resource(_Open):
    name: SafePath
    algorithm: Literal["sha256"]
    digest: Sha256


class _Predicate(_Open):
    serialization: _Serialization
    resources: list[_Resource]


class _Statement(_Open):
    type_: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    predicate_type: Annotated[
        Literal["https://model_signing/signature/v1.0"], Field(alias="predicateType")
    ]
    predicate: _Predicate


def _validate_record(kind: type[Parsed], value: object, where: str) -> Parsed:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise IntegrityError(
            f"the signature is malformed: {place}: {first['msg']}",
            where=where,
            expected="a Sigstore bundle 0.3 of OpenSSF model signing 1.0, by files, sha256",
            hint="Sign the package again: trainload sign.",
        ) from error


def _signer(material: _Material, where: str) -> tuple[Kind, bytes]:
    """Return the kind of signature, and the signer's certificate."""
    materials = [
        value
        for value in (material.public_key, material.x509_certificate_chain, material.certificate)
        if value is not None
    ]
    if len(materials) != 1:
        raise IntegrityError(
            "the signature is malformed: it names no signer, or several", where=where
        )
    if isinstance(materials[0], _PublicKey):
        return "key", b""
    if isinstance(materials[0], _Chain):
        return "certificate", _decode_base64(materials[0].certificates[0].raw_bytes, where)
    return "keyless", _decode_base64(materials[0].raw_bytes, where)


def _decode_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise IntegrityError(
            "the signature is malformed: it contains invalid base64", where=where
        ) from error


def _parse_json(data: bytes, where: str) -> Any:
    """Decode JSON of any writer: it need not be canonical, but keys must be unique."""
    if len(data) > MAX_SIGNATURE:
        raise UnsafePackageError(
            "a signature is too large",
            where=where,
            expected=f"at most {MAX_SIGNATURE} bytes",
            got="more",
        )
    if (depth := nesting(data)) > MAX_DEPTH:
        raise UnsafePackageError(
            "JSON is nested too deeply",
            where=where,
            expected=f"at most {MAX_DEPTH} levels",
            got=str(depth),
        )
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=lambda pairs: _object_of_unique_keys(pairs, where),
        )
    except ValueError as error:
        raise IntegrityError(
            f"the signature is malformed: it is not JSON in UTF-8: {error}", where=where
        ) from error


def _object_of_unique_keys(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise IntegrityError(
            "the signature is malformed: an object has a duplicate key", where=where
        )
    return fields
