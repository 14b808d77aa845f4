"""Signing packages and builds with OpenSSF's library `model-signing` (extra `signing`)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainload.core.atomic import create_file, sync_folder
from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import PackageError, SignatureError, StorageError
from trainload.core.paths import is_full
from trainload.packaging.builds.build_folder import check_build, is_build, listed_digests
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST, OUTSIDE, SIGNATURES
from trainload.packaging.package import read_manifest
from trainload.packaging.signatures.keys import PrivateKey, identity_of, library, read_pem
from trainload.packaging.signatures.signature_file import (
    NAME,
    SUFFIX,
    SignatureFile,
    parse_signature,
    signed_files,
)
from trainload.packaging.signatures.verify import verify_package
from trainload.packaging.signatures.vouching import check_signed_by, listed


def sign_folder(
    path: Path,
    key: PrivateKey,
    name: str | None = None,
    *,
    certificate: Path | None = None,
    chain: Sequence[Path] = (),
) -> SignatureFile:
    """Sign a package or build: write signatures/NAME.sig.

    Its digest and other signatures do not change. Every byte that its manifest lists is read and
    compared first.

    Args:
        path: folder of a package or a build.
        key: the signing key.
        name: NAME; None: the first 16 digits of the key's fingerprint.
        certificate: PEM file with the key's certificate. It becomes part of the signature, which is
            then verified by the certificate's issuer.
        chain: PEM files of the issuers between the certificate and its root.

    Raises:
        SignatureError: the folder is damaged, or the key or certificate cannot be used.
        StorageError: a signature of this name exists, or a file cannot be read or written.
        PackageError: there is no package, or its manifest cannot be read.
    """
    path = Path(path)
    name = name or key.fingerprint[:16]
    for pem in (*chain, *(() if certificate is None else (certificate,))):
        read_pem(pem)
    if certificate is not None and key.password is not None:
        raise SignatureError(
            "an encrypted key cannot be used with a certificate",
            where=str(key.path),
            hint="Decrypt it to a file that only you can read.",
        )
    if not NAME.fullmatch(name):
        raise SignatureError(
            "this is not a valid signature name",
            got=repr(name),
            expected="letters, digits and _ . + -",
        )
    file = f"{SIGNATURES}/{name}{SUFFIX}"
    files = _checked_files(path)
    if (path / file).exists():
        raise StorageError(
            "a signature of this name already exists",
            where=str(path / file),
            hint="Choose another --name, or remove the existing signature.",
        )
    config = library("model_signing.signing").Config().set_hashing_config(listed(files))
    refusals = (ValueError, TypeError, library("cryptography.exceptions").UnsupportedAlgorithm)
    try:
        if certificate is not None:
            # the library requires a chain; the certificate itself changes nothing
            issuers = chain or (certificate,)
            config.use_certificate_signer(
                private_key=key.path, signing_certificate=certificate, certificate_chain=issuers
            )
        else:
            config.use_elliptic_key_signer(private_key=key.path, password=key.password)
        with tempfile.TemporaryDirectory() as folder:
            config.sign(path, Path(folder) / "signature")
            signature = parse_signature((Path(folder) / "signature").read_bytes(), file)
    except refusals as error:
        raise SignatureError(
            f"the key cannot sign: {error}", where=str(certificate or key.path)
        ) from error
    if certificate is None:
        check_signed_by(signature, path, files, identity_of(key.public_pem, str(key.path)))
    _write_signature(path, signature)
    return signature


def _checked_files(path: Path) -> dict[str, str]:
    """Read every byte of a package or build, and return the files that are to be signed: path ->
    sha256.

    Raises:
        SignatureError: it is damaged.
    """
    if is_build(path):
        try:
            return listed_digests(*check_build(path))
        except PackageError as error:
            raise SignatureError(
                f"the build has problems, so it was not signed: {error.problem}",
                where=f"{path}/{error.where}",
            ) from error
    report = verify_package(path)
    wrong = next(
        (problem for problem in report.problems if problem.file.split("/")[0] not in OUTSIDE), None
    )
    if wrong is not None:
        raise SignatureError(
            f"the package has problems, so it was not signed: {wrong.problem}",
            where=str(path / wrong.file),
        )
    data = read_manifest(path)
    if sha256_bytes(data) != report.digest:
        raise SignatureError("the package was changed while it was being checked", where=str(path))
    return signed_files(Manifest.from_bytes(data, MANIFEST), report.digest)


def _write_signature(path: Path, signature: SignatureFile) -> None:
    """Write the signature file atomically.

    Raises:
        StorageError: it exists or cannot be written.
    """
    target = path / signature.file
    try:
        target.parent.mkdir(exist_ok=True)
        created = create_file(target, signature.data)
        sync_folder(target.parent)
    except OSError as error:
        reason = "the disk is full" if is_full(error) else error.strerror or str(error)
        raise StorageError(
            f"the signature cannot be written: {reason}", where=str(target)
        ) from error
    if not created:
        raise StorageError(
            "a signature of this name already exists",
            where=str(target),
            hint="Choose another --name, or remove the existing signature.",
        )
