"""Keys and certificates of signers, from PEM files.

Requires the library `cryptography` (extra `signing`).
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainload.core.errors import SignatureError, StorageError, first_line

PASSWORD = "TRAINLOAD_KEY_PASSWORD"
"""Environment variable: the password of a private key."""
CURVES = ("secp256r1", "secp384r1", "secp521r1")
"""Elliptic curves of OpenSSF model signing."""
MAX_PEM = 2**20
_KINDS = "a public key or certificates in PEM, of an elliptic curve (P-256, P-384, P-521)"


@dataclass(frozen=True, slots=True)
class Identity:
    """An identity whose signature is required.

    Attributes:
        name: source of the key, for messages.
        kind: "key": signatures by the private key of this public key; "certificate": signatures by
            a key whose certificate is one of these, or was issued by one of them, directly or
            indirectly.
        fingerprint: sha256 of the public key as PEM, or of the first certificate as DER.
        pem: text of the file.
    """

    name: str
    kind: Literal["key", "certificate"]
    fingerprint: str
    pem: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint} ({self.name})"


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A private key file and its password. `fingerprint` is the sha256 of the public key as PEM."""

    path: Path
    fingerprint: str
    public_pem: str = field(repr=False)
    password: bytes | None = field(repr=False)


def library(name: str) -> Any:
    """Import a module of the libraries that signatures need.

    Raises:
        SignatureError: the library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SignatureError(
            f"signatures need libraries that are not installed: {error}",
            where=name.partition(".")[0],
            hint='Install them: pip install "trainload[signing]".',
        ) from error


def read_pem(path: Path) -> str:
    """Return the text of a PEM file.

    Raises:
        StorageError: the file cannot be read.
        SignatureError: it is not a PEM file, or too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PEM + 1)
    except OSError as error:
        raise StorageError(f"the key cannot be read: {error.strerror}", where=str(path)) from error
    if len(data) > MAX_PEM or b"-----BEGIN " not in data or not data.isascii():
        raise SignatureError("this is not a key file", where=str(path), expected=_KINDS)
    return data.decode("ascii")


def read_identity(path: Path) -> Identity:
    """Return the identity in a PEM file.

    Raises: as `read_pem` and `identity_of`.
    """
    return identity_of(read_pem(path), str(path))


def identity_of(pem: str, name: str) -> Identity:
    """Return the identity in PEM text: one public key, or certificates.

    `name` is its source, for messages.

    Raises:
        SignatureError: the text contains something else, or the libraries are missing.
    """
    if "PRIVATE KEY" in pem:
        raise SignatureError(
            "this is a private key, which only its owner should have",
            where=name,
            expected=_KINDS,
            hint="Extract the public key: openssl pkey -in KEY -pubout",
        )
    serialization = library("cryptography.hazmat.primitives.serialization")
    try:
        if "-----BEGIN CERTIFICATE-----" in pem:
            first = library("cryptography.x509").load_pem_x509_certificates(pem.encode())[0]
            return Identity(
                name,
                "certificate",
                hashlib.sha256(first.public_bytes(serialization.Encoding.DER)).hexdigest(),
                pem,
            )
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, library("cryptography.exceptions").UnsupportedAlgorithm) as error:
        raise SignatureError(
            "the key cannot be read", where=name, expected=_KINDS, got=first_line(error)
        ) from error
    public = _public_pem(key, name)
    return Identity(name, "key", hashlib.sha256(public.encode()).hexdigest(), public)


def is_encrypted(path: Path) -> bool:
    """Return True if a private key needs a password.

    Also False if it is not a key, which `read_private_key` reports.

    Raises: as `read_pem`.
    """
    data = read_pem(path).encode()
    try:
        library("cryptography.hazmat.primitives.serialization").load_pem_private_key(data, None)
    except TypeError:  # a password is missing
        return True
    except (ValueError, library("cryptography.exceptions").UnsupportedAlgorithm):
        return False
    return False


def read_private_key(path: Path, password: bytes | None = None) -> PrivateKey:
    """Read a private key for signing.

    Args:
        path: a PEM file with a key of an elliptic curve.
        password: password of an encrypted key.

    Raises:
        SignatureError: it is not such a key, it is encrypted, or the password is wrong; otherwise
            as `read_pem`.
    """
    data = read_pem(path).encode()
    serialization = library("cryptography.hazmat.primitives.serialization")
    try:
        key = serialization.load_pem_private_key(data, password)
    except TypeError as error:  # a password is missing, or was given for a key without one
        if password is None:
            raise SignatureError(
                "the private key is encrypted", where=str(path), hint=f"Set {PASSWORD}."
            ) from error
        raise SignatureError(
            "the private key is not encrypted, but a password was given", where=str(path)
        ) from error
    except (ValueError, library("cryptography.exceptions").UnsupportedAlgorithm) as error:
        wrong = (
            "the password is wrong, or the private key is damaged"
            if password is not None
            else "this is not a private key"
        )
        raise SignatureError(
            wrong, where=str(path), expected=f"PEM of {', '.join(CURVES)}", got=first_line(error)
        ) from error
    public = _public_pem(key.public_key(), str(path))
    return PrivateKey(path, hashlib.sha256(public.encode()).hexdigest(), public, password)


def certificate_key(der: bytes, where: str) -> str:
    """Return the sha256 of a certificate's public key as PEM.

    Raises:
        SignatureError: it is not a certificate, or its key cannot sign packages.
    """
    try:
        key = library("cryptography.x509").load_der_x509_certificate(der).public_key()
    except (ValueError, library("cryptography.exceptions").UnsupportedAlgorithm) as error:
        raise SignatureError(
            f"its certificate cannot be read: {first_line(error)}", where=where
        ) from error
    return hashlib.sha256(_public_pem(key, where).encode()).hexdigest()


def _public_pem(key: Any, name: str) -> str:
    """Return a public key as PEM, in the canonical form from which its fingerprint is computed."""
    curve = getattr(getattr(key, "curve", None), "name", type(key).__name__)
    if curve not in CURVES:
        raise SignatureError(
            "a key of this kind cannot sign packages",
            where=name,
            expected=", ".join(CURVES),
            got=curve,
        )
    serialization = library("cryptography.hazmat.primitives.serialization")
    pem: bytes = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem.decode()
