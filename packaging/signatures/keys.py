"""Keys and certificates of signers, from PEM files. Needs the library `cryptography`, which comes with the extra `signing`."""

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
"""The elliptic curves of OpenSSF model signing."""
MAX_PEM = 2**20
_KINDS = "a public key or certificates in PEM, of an elliptic curve (P-256, P-384, P-521)"


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody whose signature is asked for.

    Attributes:
        name: where the key was found, for people.
        kind: "key": who signed with the private key of this public one; "certificate": who signed with a key whose certificate was issued,
            directly or not, by one of these, or is one of them.
        fingerprint: the sha256 of the public key as PEM, or of the first certificate as DER.
        pem: the file's text.
    """

    name: str
    kind: Literal["key", "certificate"]
    fingerprint: str
    pem: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint} ({self.name})"


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A private key's file that can be used with this password. `fingerprint`: the sha256 of its public key as PEM."""

    path: Path
    fingerprint: str
    public_pem: str = field(repr=False)
    password: bytes | None = field(repr=False)


def library(name: str) -> Any:
    """A module of the libraries that signatures need.

    Raises:
        SignatureError: it is not installed.
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
    """The text of a small file of keys.

    Raises:
        StorageError: it cannot be read.
        SignatureError: it is no PEM.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PEM + 1)
    except OSError as error:
        raise StorageError(f"the key cannot be read: {error.strerror}", where=str(path)) from error
    if len(data) > MAX_PEM or b"-----BEGIN " not in data or not data.isascii():
        raise SignatureError("this is no file of keys", where=str(path), expected=_KINDS)
    return data.decode("ascii")


def read_identity(path: Path) -> Identity:
    """The identity in a file.

    Raises: as `read_pem` and `identity_of`.
    """
    return identity_of(read_pem(path), str(path))


def identity_of(pem: str, name: str) -> Identity:
    """The identity that PEM text holds: one public key, or certificates. `name`: where it is from.

    Raises:
        SignatureError: it holds something else, or the libraries are missing.
    """
    if "PRIVATE KEY" in pem:
        raise SignatureError(
            "this is a private key, which its owner alone should have", where=name, expected=_KINDS, hint="openssl pkey -in KEY -pubout"
        )
    serialization = library("cryptography.hazmat.primitives.serialization")
    try:
        if "-----BEGIN CERTIFICATE-----" in pem:
            first = library("cryptography.x509").load_pem_x509_certificates(pem.encode())[0]
            return Identity(name, "certificate", hashlib.sha256(first.public_bytes(serialization.Encoding.DER)).hexdigest(), pem)
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, library("cryptography.exceptions").UnsupportedAlgorithm) as error:
        raise SignatureError("the key cannot be read", where=name, expected=_KINDS, got=first_line(error)) from error
    public = _public_pem(key, name)
    return Identity(name, "key", hashlib.sha256(public.encode()).hexdigest(), public)


def is_encrypted(path: Path) -> bool:
    """Whether a private key needs a password. False also for what is no key: `read_private_key` says so.

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
    """A private key to sign with.

    Args:
        path: a PEM file, of an elliptic curve.
        password: of an encrypted one.

    Raises:
        SignatureError: it is no such key, it is encrypted, or the password is wrong; otherwise as `read_pem`.
    """
    data = read_pem(path).encode()
    serialization = library("cryptography.hazmat.primitives.serialization")
    try:
        key = serialization.load_pem_private_key(data, password)
    except TypeError as error:  # there is a password too many, or one is missing
        if password is None:
            raise SignatureError("the private key is encrypted", where=str(path), hint=f"Set {PASSWORD}.") from error
        raise SignatureError("the private key is not encrypted, and a password was given", where=str(path)) from error
    except (ValueError, library("cryptography.exceptions").UnsupportedAlgorithm) as error:
        wrong = "the password is wrong, or the private key is damaged" if password is not None else "this is no private key"
        raise SignatureError(wrong, where=str(path), expected=f"PEM of {', '.join(CURVES)}", got=first_line(error)) from error
    public = _public_pem(key.public_key(), str(path))
    return PrivateKey(path, hashlib.sha256(public.encode()).hexdigest(), public, password)


def certificate_key(der: bytes, where: str) -> str:
    """The sha256, as PEM, of the public key that a certificate names.

    Raises:
        SignatureError: it is no certificate, or its key cannot sign packages.
    """
    try:
        key = library("cryptography.x509").load_der_x509_certificate(der).public_key()
    except (ValueError, library("cryptography.exceptions").UnsupportedAlgorithm) as error:
        raise SignatureError(f"its certificate cannot be read: {first_line(error)}", where=where) from error
    return hashlib.sha256(_public_pem(key, where).encode()).hexdigest()


def _public_pem(key: Any, name: str) -> str:
    """A public key as PEM, in the one form that its fingerprint is taken of."""
    curve = getattr(getattr(key, "curve", None), "name", type(key).__name__)
    if curve not in CURVES:
        raise SignatureError("a key of this kind cannot sign packages", where=name, expected=", ".join(CURVES), got=curve)
    serialization = library("cryptography.hazmat.primitives.serialization")
    pem: bytes = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return pem.decode()
