"""Verification of signers by OpenSSF's library `model-signing` (extra `signing`).

A signature of a package lists the sha256 of manifest.json and of every file that the manifest
lists, so that any tool of that specification can verify the folder. The manifest contains all the
other digests. So a signature is compared only with the manifest here, and files with the manifest
when they are read: a worker need not read a hundred gigabytes in order to verify their signer. A
build is signed likewise, with build.json as its manifest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.core.errors import PackageError, SignatureError
from trainload.core.paths import write_bytes
from trainload.packaging.format.package_paths import OUTSIDE, SIGNATURES
from trainload.packaging.signatures.keys import Identity, certificate_key, library
from trainload.packaging.signatures.signature_file import (
    SignatureFile,
    read_signature,
    signature_paths,
)


@dataclass(frozen=True, slots=True)
class Vouched:
    """An identity that has signed a folder, with the `file` and the sha256 of the key as PEM."""

    identity: Identity
    file: str
    signer: str


@dataclass(frozen=True, slots=True)
class Refused:
    """An identity that has not signed a folder, and the reason for one file."""

    identity: Identity
    file: str
    reason: str


def vouched_for(
    path: Path, files: Mapping[str, str], identities: Sequence[Identity]
) -> tuple[tuple[Vouched, ...], tuple[Refused, ...]]:
    """Return the identities that have signed a folder and, for the others, the reasons for each
    signature file.

    Args:
        path: folder of a package or a build.
        files: path -> sha256 of exactly the files that must be signed.
        identities: the identities to look for.

    Raises:
        UnsafePackageError: signatures/ contains links, or too many files.
        SignatureError: the libraries are missing.
    """
    if identities:
        # raise here if it is missing, since that is not a problem of a signature
        library("model_signing.verifying")
    signatures: list[SignatureFile] = []
    broken: list[tuple[str, str]] = []
    for file in signature_paths(path):
        try:
            signatures.append(read_signature(path, file))
        except PackageError as error:
            broken.append((file, error.problem))
    vouched: list[Vouched] = []
    refused: list[Refused] = []
    for identity in identities:
        tried: list[Refused] = [Refused(identity, file, reason) for file, reason in broken]
        for signature in signatures:
            try:
                vouched.append(
                    Vouched(
                        identity,
                        signature.file,
                        check_signed_by(signature, path, files, identity),
                    )
                )
                break
            except SignatureError as error:
                tried.append(Refused(identity, signature.file, error.problem))
        else:
            refused += tried or [
                Refused(identity, SIGNATURES, f"there is no signature by {identity}")
            ]
    return tuple(vouched), tuple(refused)


def check_signed_by(
    signature: SignatureFile, path: Path, files: Mapping[str, str], identity: Identity
) -> str:
    """Check that a signature is by this identity and of these files.

    Return the sha256 of its key as PEM.

    Raises:
        SignatureError: it is by another identity, of other bytes, or invalid.
    """
    where = signature.file
    if signature.kind != identity.kind:
        other = (
            ", which `model_signing verify sigstore` can check"
            if signature.kind == "keyless"
            else ""
        )
        raise SignatureError(
            f"it is signed by {signature.by}{other}, not by {identity}", where=where
        )
    if identity.kind == "key" and signature.signer != identity.fingerprint:
        raise SignatureError(
            f"it is signed by another key, {signature.signer}, not by {identity}", where=where
        )
    signer = (
        signature.signer
        if identity.kind == "key"
        else certificate_key(signature.certificate, where)
    )
    different = signature.difference(files)
    if different is not None:
        raise SignatureError(different, where=where)
    # the library reads files: give it the bytes that were parsed, even if the file changed
    with tempfile.TemporaryDirectory() as folder:
        signed, pem = Path(folder) / "signature", Path(folder) / "identity"
        write_bytes(signed, signature.data)
        write_bytes(pem, identity.pem.encode())
        config = library("model_signing.verifying").Config().set_hashing_config(listed(files))
        if identity.kind == "key":
            config.use_elliptic_key_verifier(public_key=pem)
        else:
            config.use_certificate_verifier(certificate_chain=[pem])
        _verify(config, path, signed, where, identity)
    return signer


def _verify(config: Any, path: Path, signed: Path, where: str, identity: Identity) -> None:
    try:
        config.verify(path, signed)
    except library("cryptography.exceptions").InvalidSignature as error:
        raise SignatureError(
            f"it was not made by {identity}, or it is damaged", where=where
        ) from error
    except library("OpenSSL.crypto").X509StoreContextError as error:
        raise SignatureError(
            f"its certificate was not issued by {identity}: {error}", where=where
        ) from error
    except ValueError as error:
        raise SignatureError(f"it is not valid for {identity}: {error}", where=where) from error


def listed(files: Mapping[str, str]) -> Any:
    """Return a hashing configuration of the library that uses known digests instead of hashing the
    files.

    Args:
        files: path -> sha256 of the signed files.
    """
    base: Any = library("model_signing.hashing").Config
    manifests = library("model_signing.manifest")
    of_digest = library("model_signing._hashing.hashing").Digest  # there is no public constructor
    kind = manifests.SerializationType.from_args(
        {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": sorted(OUTSIDE),
        }
    )
    items = [
        kind.new_item(file, of_digest("sha256", bytes.fromhex(sha))) for file, sha in files.items()
    ]

    class Listed(base):  # type: ignore[misc]  # the library may be missing, so that its class is Any
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            return manifests.Manifest(
                Path(model_path).name or Path(model_path).resolve().name, items, kind
            )

    return Listed()
