"""Signatures, verification and comparison of packages: sign, verify, diff."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainload.core.storage.places import path_here
from trainload.packaging.comparison.package_difference import PackageDifference, package_difference
from trainload.packaging.signatures.keys import read_identity, read_private_key
from trainload.packaging.signatures.signature_file import SignatureFile
from trainload.packaging.signatures.signing import sign_folder
from trainload.packaging.signatures.verify import VerifyReport, verify_package


def sign(
    package: str | Path,
    key: str | Path,
    *,
    name: str | None = None,
    password: bytes | None = None,
    certificate: str | Path | None = None,
    chain: Sequence[str | Path] = (),
) -> SignatureFile:
    """Sign a package or build: write signatures/NAME.sig into its folder.

    Requires the extra `signing`; see docs/guides/trust.md.

    Args:
        package: folder of a package, or one that `build` wrote.
        key: PEM file with the private key.
        name: NAME; None: the first 16 digits of the key's fingerprint.
        password: password of an encrypted key.
        certificate: PEM file with the key's certificate, in order to sign with it.
        chain: PEM files of the certificate's issuers below the root.

    Raises:
        SignatureError: the folder is damaged, or the key cannot be used.
        StorageError: a file cannot be read or written, or a signature of this name exists.
        PackageError: there is no package.

    Example:
        signature = trainload.sign("gpt.tl", "release-key.pem", name="release")
        print(signature.file, signature.signer)
    """
    private_key = read_private_key(Path(key), password)
    certificate_path = None if certificate is None else Path(certificate)
    return sign_folder(
        path_here(package),
        private_key,
        name,
        certificate=certificate_path,
        chain=[Path(issuer) for issuer in chain],
    )


def verify(package: str | Path, identities: Sequence[str | Path] = ()) -> VerifyReport:
    """Read every byte of a package, and report all problems and signatures.

    Args:
        package: the package's folder.
        identities: PEM files of public keys or of issuers' certificates, each of which must have
            signed the package.

    Raises:
        StorageError: there is no package, or a key cannot be read.
        SignatureError: an identity is invalid, or the extra `signing` is missing.

    Example:
        report = trainload.verify("gpt.tl", ["release-key.pub.pem"])
        assert report.ok, report.problems
    """
    return verify_package(
        path_here(package), [read_identity(Path(identity)) for identity in identities]
    )


def diff(before: str | Path, after: str | Path, *, weights: bool = True) -> PackageDifference:
    """Compare two packages by name; see docs/guides/diff.md.

    Args:
        before: a package's folder.
        after: another package's folder.
        weights: if True, compare tensors too.

    Raises:
        StorageError: there is no package.
        PackageError: a package is damaged or unsafe.

    Example:
        difference = trainload.diff("gpt.tl", "gpt-retrained.tl")
        print(difference.same, [tensor.name for tensor in difference.weights or ()])
    """
    return package_difference(path_here(before), path_here(after), weights=weights)
