"""Whose signature a package has, asked of OpenSSF's library `model-signing` (extra `signing`).

A signature lists the sha256 of manifest.json and of every file that the manifest lists, so that any tool of that specification can
check the folder. The manifest holds all the other digests. So here a signature is compared with the manifest alone, and the files with
the manifest when they are read: a worker need not read a hundred gigabytes to know who signed them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.core.errors import PackageError, SignatureError
from trainload.core.paths import write_bytes
from trainload.packaging.format.manifest import OUTSIDE, Manifest
from trainload.packaging.signatures.keys import Identity, certificate_key, library
from trainload.packaging.signatures.signature_file import FOLDER, SignatureFile, read_signature, signature_paths, signed_files


@dataclass(frozen=True, slots=True)
class Vouched:
    """An identity whose signature a package has: `file` in signatures/, and the sha256 of the key that made it, as PEM."""

    identity: Identity
    file: str
    signer: str


@dataclass(frozen=True, slots=True)
class Refused:
    """An identity whose signature a package lacks: what is wrong with which file."""

    identity: Identity
    file: str
    reason: str


def vouched_for(
    path: Path, manifest: Manifest, digest: str, identities: Sequence[Identity]
) -> tuple[tuple[Vouched, ...], tuple[Refused, ...]]:
    """Which of the identities have signed a package, and of the others, what is wrong with which signature.

    Args:
        path: the package's folder.
        manifest: its manifest, as it was read.
        digest: the sha256 of the bytes that were read.
        identities: whose signatures are asked for.

    Raises:
        UnsafePackageError: signatures/ holds links, or too many files.
        SignatureError: the libraries are missing.
    """
    if identities:
        library("model_signing.verifying")  # that it is missing is no fault of a signature
    signatures: list[SignatureFile] = []
    broken: list[tuple[str, str]] = []
    for file in signature_paths(path):
        try:
            signatures.append(read_signature(path, file))
        except PackageError as error:
            broken.append((file, error.problem))
    held: list[Vouched] = []
    refused: list[Refused] = []
    for identity in identities:
        tried: list[Refused] = [Refused(identity, file, reason) for file, reason in broken]
        for signature in signatures:
            try:
                held.append(Vouched(identity, signature.file, check_signed_by(signature, path, manifest, digest, identity)))
                break
            except SignatureError as error:
                tried.append(Refused(identity, signature.file, error.problem))
        else:
            refused += tried or [Refused(identity, FOLDER, f"there is no signature, so none by {identity}")]
    return tuple(held), tuple(refused)


def check_signed_by(signature: SignatureFile, path: Path, manifest: Manifest, digest: str, identity: Identity) -> str:
    """Check that a signature is by this identity and of this package. Return the sha256 of its key, as PEM.

    Raises:
        SignatureError: it is another's, of other bytes, or not what its key gives.
    """
    where = signature.file
    if signature.kind != identity.kind:
        other = ", which `model_signing verify sigstore` can check" if signature.kind == "keyless" else ""
        raise SignatureError(f"it is signed by {signature.by}{other}, not by {identity}", where=where)
    if identity.kind == "key" and signature.signer != identity.fingerprint:
        raise SignatureError(f"it is signed by another key, {signature.signer}, not by {identity}", where=where)
    signer = signature.signer if identity.kind == "key" else certificate_key(signature.certificate, where)
    different = signature.difference(manifest, digest)
    if different is not None:
        raise SignatureError(different, where=where)
    with tempfile.TemporaryDirectory() as folder:  # the library reads files: these are the bytes that were looked at, whatever is there now
        signed, pem = Path(folder) / "signature", Path(folder) / "identity"
        write_bytes(signed, signature.data)
        write_bytes(pem, identity.pem.encode())
        config = library("model_signing.verifying").Config().set_hashing_config(listed(manifest, digest))
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
        raise SignatureError(f"it was not made by {identity}, or it is damaged", where=where) from error
    except library("OpenSSL.crypto").X509StoreContextError as error:
        raise SignatureError(f"its certificate was not issued by {identity}: {error}", where=where) from error
    except ValueError as error:
        raise SignatureError(f"it does not hold for {identity}: {error}", where=where) from error


def listed(manifest: Manifest, digest: str) -> Any:
    """A hashing configuration of the library that knows a package's digests already: of exactly what a signature must cover."""
    base: Any = library("model_signing.hashing").Config
    manifests = library("model_signing.manifest")
    of_digest = library("model_signing._hashing.hashing").Digest  # nothing public makes one
    kind = manifests.SerializationType.from_args(
        {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": sorted(OUTSIDE)}
    )
    items = [kind.new_item(file, of_digest("sha256", bytes.fromhex(sha))) for file, sha in signed_files(manifest, digest).items()]

    class Listed(base):  # type: ignore[misc]  # a class of a library that may be missing
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            return manifests.Manifest(Path(model_path).name or Path(model_path).resolve().name, items, kind)

    return Listed()
