"""Who stands behind a package, and what differs between two: sign, verify, diff."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainload.packaging.comparison.package_difference import PackageDifference, package_difference
from trainload.packaging.signatures.keys import read_identity, read_private_key
from trainload.packaging.signatures.signature_file import SignatureFile
from trainload.packaging.signatures.signing import sign_package
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
    """Signs a package: writes signatures/NAME.sig into its folder. Needs the extra `signing`; docs/trust.md.

    Args:
        package: its folder.
        key: the private key, a PEM file.
        name: NAME; None: the first 16 digits of the key's fingerprint.
        password: of an encrypted key.
        certificate: the key's, to sign with it: a PEM file.
        chain: PEM files of the certificate's issuers below the root.

    Raises:
        SignatureError: the package is not sound, or the key cannot be used.
        StorageError: a file cannot be read or written, or there is a signature of this name.
        PackageError: there is no package.
    """
    read = read_private_key(Path(key), password)
    own = None if certificate is None else Path(certificate)
    return sign_package(Path(package), read, name, certificate=own, chain=[Path(issuer) for issuer in chain])


def verify(package: str | Path, identities: Sequence[str | Path] = ()) -> VerifyReport:
    """Reads every byte of a package and says what is wrong with which file, and who has signed it.

    Args:
        package: its folder.
        identities: PEM files of public keys or of issuers' certificates; each must have signed it.

    Raises:
        StorageError: there is no package, or a key cannot be read.
        SignatureError: an identity is none, or the extra `signing` is missing.
    """
    return verify_package(Path(package), [read_identity(Path(identity)) for identity in identities])


def diff(before: str | Path, after: str | Path, *, weights: bool = True) -> PackageDifference:
    """Compares two packages by name; docs/diff.md.

    Args:
        before: a package's folder.
        after: another one.
        weights: whether tensors are compared too.

    Raises:
        StorageError: there is no package.
        PackageError: one of them is damaged or unsafe.
    """
    return package_difference(Path(before), Path(after), weights=weights)
