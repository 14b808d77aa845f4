"""Sign and verify packages in one call, with files of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainload.packaging.signatures.keys import read_identity, read_private_key
from trainload.packaging.signatures.signature_file import SignatureFile
from trainload.packaging.signatures.signing import sign_folder
from trainload.packaging.signatures.verify import VerifyReport, verify_package


def sign(package: Path, key: Path, name: str | None = None, **options: Any) -> SignatureFile:
    return sign_folder(package, read_private_key(key), name, **options)


def verified(package: Path, *identities: Path) -> VerifyReport:
    return verify_package(package, [read_identity(path) for path in identities])


def only_problem(report: VerifyReport) -> tuple[str, str]:
    (problem,) = report.problems
    return problem.file, problem.problem
