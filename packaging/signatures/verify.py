"""Verification of every byte of a package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainload.core.canonical_json import sha256_bytes, sha256_file
from trainload.core.errors import PackageError, StorageError, UnsafePackageError
from trainload.core.paths import open_inside
from trainload.core.work_steps import ByteStep, begin_step
from trainload.packaging.derived import derived_problems
from trainload.packaging.format.debug import debug_problems
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_files import walk
from trainload.packaging.format.package_paths import MANIFEST, OUTSIDE
from trainload.packaging.libraries.wheels import read_wheel
from trainload.packaging.package import check_graph, read_graph, read_manifest
from trainload.packaging.signatures.keys import Identity
from trainload.packaging.signatures.signature_file import (
    Kind,
    read_signature,
    signature_paths,
    signed_files,
)
from trainload.packaging.signatures.vouching import vouched_for
from trainload.packaging.tensors.weight_shards import WeightReader


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with one file of a package."""

    file: str
    problem: str


@dataclass(frozen=True, slots=True)
class SignatureState:
    """A well-formed signature of exactly this package's bytes.

    Attributes:
        file: path in the package.
        kind: "key", "certificate" (a key and its certificate), or "keyless".
        signer: fingerprint of the key or certificate, as claimed by the signature.
        identity: the requested identity that made it; None: none of them, so the claim was not
            verified.
    """

    file: str
    kind: Kind
    signer: str
    identity: str | None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `verify_package`.

    `digest` is the manifest's sha256, even if the manifest is invalid; `bytes` were read.
    """

    digest: str
    files: int
    bytes: int
    problems: tuple[Problem, ...]
    signatures: tuple[SignatureState, ...] = ()

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems


def verify_package(path: Path, identities: Sequence[Identity] = ()) -> VerifyReport:
    """Read every byte of a package, debug/ and derived/ included, and report all problems.

    Nothing of the package is run, and no trust is needed: neither the operators of other libraries
    nor those of the running torch matter. A signature that is malformed or covers other bytes is a
    problem; signers are verified only for `identities`.

    Args:
        path: the package's folder.
        identities: identities that must all have signed the package.

    Raises:
        StorageError: there is no package.
        SignatureError: identities are given, and the libraries that check signatures are missing.
    """
    path = Path(path)
    if not path.is_dir():
        raise StorageError(
            "there is no package here", where=str(path), expected=f"a folder with {MANIFEST}"
        )
    try:
        data = read_manifest(path)
    except PackageError as error:
        return VerifyReport("", 0, 0, (Problem(MANIFEST, str(error)),))
    digest = sha256_bytes(data)
    try:
        manifest = Manifest.from_bytes(data, MANIFEST)
    except PackageError as error:
        return VerifyReport(digest, 1, len(data), (Problem(MANIFEST, str(error)),))
    problems: list[Problem] = []
    sizes: dict[str, int] = {}
    try:
        sizes = {file: status.st_size for file, status in walk(path)}
    except PackageError as error:
        problems.append(Problem(error.where, str(error)))
        return VerifyReport(digest, 1, len(data), tuple(problems))
    problems += _listed_files(path, manifest, sizes)
    problems += [Problem(file, text) for file, text in debug_problems(path)]
    problems += [
        Problem(file, text)
        for file, text in derived_problems(path, frozenset(manifest.op_libraries))
    ]
    signatures, wrong = _signatures(path, manifest, digest, identities)
    problems += wrong
    damaged = {problem.file for problem in problems}
    if not damaged & set(manifest.files):
        problems += _contents(path, manifest)
    return VerifyReport(digest, len(sizes), sum(sizes.values()), tuple(problems), signatures)


def _signatures(
    path: Path, manifest: Manifest, digest: str, identities: Sequence[Identity]
) -> tuple[tuple[SignatureState, ...], list[Problem]]:
    """Return the signatures of this package, and problems with other signatures or missing ones."""
    problems: list[Problem] = []
    states: list[SignatureState] = []
    try:
        files = signed_files(manifest, digest)
        signed, refused = vouched_for(path, files, identities)
        paths = signature_paths(path)
    except UnsafePackageError as error:
        return (), [Problem(error.where, str(error))]
    identity_names = {vouched.file: vouched.identity.name for vouched in signed}
    for file in paths:
        try:
            signature = read_signature(path, file)
        except PackageError as error:
            problems.append(Problem(file, str(error)))
            continue
        different = signature.difference(files)
        if different is not None:
            problems.append(Problem(file, different))
        else:
            states.append(
                SignatureState(file, signature.kind, signature.signer, identity_names.get(file))
            )
    broken = {problem.file for problem in problems}
    problems += [
        Problem(lacking.file, lacking.reason) for lacking in refused if lacking.file not in broken
    ]
    return tuple(states), problems


def _listed_files(path: Path, manifest: Manifest, sizes: dict[str, int]) -> list[Problem]:
    problems = [
        Problem(file, "not in the manifest")
        for file in sizes
        if file not in manifest.files
        and file != MANIFEST
        and not (file.split("/")[0] in OUTSIDE and "/" in file)
    ]
    read = ByteStep("reading every byte", sum(entry.size for entry in manifest.files.values()))
    for file, entry in manifest.files.items():
        if file not in sizes:
            problems.append(Problem(file, "missing"))
        elif sizes[file] != entry.size:
            problems.append(
                Problem(file, f"has {sizes[file]} bytes, but the manifest says {entry.size}")
            )
        elif (got := sha256_file(path / file, read)) != entry.sha256:
            problems.append(
                Problem(file, f"damaged: its sha256 is {got}, but the manifest says {entry.sha256}")
            )
    return problems


def _contents(path: Path, manifest: Manifest) -> list[Problem]:
    """Return problems that digests do not show: unsafe graphs, and weights or wheels that do not
    match the manifest.
    """
    problems: list[Problem] = []
    begin_step("checking the graphs")
    for file in manifest.graph_files():
        try:
            check_graph(
                manifest, read_graph(path, manifest, file), file, frozenset(manifest.op_libraries)
            )
        except PackageError as error:
            problems.append(Problem(file, str(error)))
    problems += _wheels(path, manifest)
    if manifest.abstract is not None:
        return problems
    try:
        reader = WeightReader(path, manifest)
        read = ByteStep("checking the weights", sum(map(reader.nbytes, reader.names())))
        for name in reader.names():
            reader.check(name)
            read.add(reader.nbytes(name))
    except PackageError as error:
        problems.append(Problem(error.where.split(",")[0], str(error)))
    return problems


def _wheels(path: Path, manifest: Manifest) -> list[Problem]:
    """Return problems with wheels, and with the modules that the manifest expects in them."""
    problems = []
    for entry in manifest.op_libraries.values():
        for wheel in entry.wheels:
            try:
                with open_inside(path, wheel) as file:
                    content = read_wheel(file, wheel.rpartition("/")[2])
                if lacking := [
                    module for module in entry.modules if not content.has_module(module)
                ]:
                    problems.append(
                        Problem(
                            wheel,
                            f"it has no module {lacking[0]}, which the manifest says registers"
                            " operators",
                        )
                    )
            except PackageError as error:
                problems.append(Problem(wheel, str(error)))
    return problems
