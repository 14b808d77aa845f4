"""The command that signs a package: sign."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from trainload.cli.commands.shared import json_option, out, package_argument, print_json
from trainload.cli.view import tables as view
from trainload.core.errors import PackageError
from trainload.core.versions import check_supported_torch

_pem = click.Path(path_type=Path)


@click.command(short_help="Sign a package.")
@package_argument
@click.option("--key", type=_pem, required=True, metavar="FILE", help="Private key, in PEM.")
@click.option("--name", metavar="NAME", help="Name of the signature. Default: fingerprint.")
@click.option("--certificate", type=_pem, metavar="FILE", help="Certificate of the key, in PEM.")
@click.option(
    "--chain", type=_pem, multiple=True, metavar="FILE", help="Intermediate certificates, in PEM."
)
@json_option
def sign(
    package: Path,
    key: Path,
    name: str | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Sign a package: write signatures/NAME.sig into it.

    The digest and other signatures do not change. The password of an encrypted key is read from
    $TRAINLOAD_KEY_PASSWORD or from the terminal. Keys must be elliptic curve keys: openssl ecparam
    -name prime256v1 -genkey -noout -out key.pem
    """
    if chain and certificate is None:
        raise click.UsageError("--chain requires --certificate.")
    if not package.exists():
        raise PackageError("there is no such package", where=str(package))
    check_supported_torch()
    from trainload.publishing import trust

    signature = trust.sign(
        package, key, name=name, password=_password(key), certificate=certificate, chain=chain
    )
    if as_json:
        print_json(
            {
                "package": package,
                "file": signature.file,
                "kind": signature.kind,
                "signer": signature.signer,
                "signed": len(signature.files),
            }
        )
        return
    rows = [
        ("signature", str(package / signature.file)),
        (signature.kind, signature.signer),
        ("signed", f"{len(signature.files)} files"),
    ]
    out().print(view.table(rows))


def _password(key: Path) -> bytes | None:
    """Return the password of an encrypted key, from the environment or a terminal; None if there is
    none, or none is needed.
    """
    from trainload.packaging.signatures.keys import PASSWORD, is_encrypted

    password = os.environ.get(PASSWORD)
    if not password and sys.stdin.isatty() and is_encrypted(key):
        password = str(click.prompt(f"password of {key}", hide_input=True, err=True))
    return password.encode() if password else None
