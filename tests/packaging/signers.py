"""Keys and certificates of people who sign packages, made with the library that verifies them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PASSWORD = b"open sesame"
_BEGAN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Signer:
    """Files of one key pair, with a certificate that `issuer` (below) issued."""

    key: Path
    public: Path
    encrypted: Path
    """The same private key, encrypted with PASSWORD."""
    certificate: Path


@dataclass(frozen=True, slots=True)
class Signers:
    """Two people, the issuer of their certificates, and another issuer."""

    alice: Signer
    bob: Signer
    issuer: Path
    other_issuer: Path


def make_signers(folder: Path) -> Signers:
    """Create keys and certificates in files."""
    root = ec.generate_private_key(ec.SECP256R1())
    other = ec.generate_private_key(ec.SECP256R1())
    return Signers(
        alice=_signer(folder, "alice", root, ec.SECP256R1()),
        bob=_signer(folder, "bob", root, ec.SECP384R1()),
        issuer=_write(folder / "issuer.pem", _certificate("issuer", root, "issuer", root)),
        other_issuer=_write(folder / "other.pem", _certificate("other", other, "other", other)),
    )


def _signer(
    folder: Path, name: str, root: ec.EllipticCurvePrivateKey, curve: ec.EllipticCurve
) -> Signer:
    key = ec.generate_private_key(curve)
    form = serialization.PrivateFormat.PKCS8
    pem = serialization.Encoding.PEM
    return Signer(
        key=_write(
            folder / f"{name}.key", key.private_bytes(pem, form, serialization.NoEncryption())
        ),
        public=_write(
            folder / f"{name}.pub",
            key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo),
        ),
        encrypted=_write(
            folder / f"{name}.enc",
            key.private_bytes(pem, form, serialization.BestAvailableEncryption(PASSWORD)),
        ),
        certificate=_write(folder / f"{name}.crt", _certificate(name, key, "issuer", root)),
    )


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, root: ec.EllipticCurvePrivateKey
) -> bytes:
    own = name == issuer
    usage = x509.KeyUsage(
        digital_signature=not own,
        key_cert_sign=own,
        crl_sign=own,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGAN)
        .not_valid_after(_BEGAN + datetime.timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=own, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(root, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
