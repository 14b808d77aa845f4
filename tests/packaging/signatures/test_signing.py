"""Signatures with keys and certificates, and their verification."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.packaging.signatures.sign_and_verify import only_problem, sign, verified
from tests.packaging.signers import PASSWORD, Signers
from tests.packaging.tampering import edit_graph, flip
from tests.ranks import ran

from trainload.core.canonical_json import sha256_file
from trainload.core.errors import SignatureError, StorageError
from trainload.packaging.package import open_package
from trainload.packaging.signatures.keys import (
    identity_of,
    is_encrypted,
    read_identity,
    read_private_key,
)
from trainload.packaging.signatures.signature_file import read_signature
from trainload.packaging.signatures.signing import sign_folder
from trainload.packaging.signatures.verify import verify_package


def test_a_signature_is_verified_by_its_public_key(signed: Path, signers: Signers) -> None:
    report = verified(signed, signers.alice.public)
    assert report.problems == ()
    (state,) = report.signatures
    assert (state.file, state.kind, state.identity) == (
        "signatures/alice.sig",
        "key",
        str(signers.alice.public),
    )


def test_a_key_s_fingerprint_is_the_sha256_of_its_public_file(
    signed: Path, signers: Signers
) -> None:
    assert read_signature(signed, "signatures/alice.sig").signer == sha256_file(
        signers.alice.public
    )


def test_signing_leaves_the_digest_as_it_was(copied: Path, signers: Signers) -> None:
    before = open_package(copied).digest
    sign(copied, signers.alice.key)
    assert open_package(copied).digest == before


def test_a_signature_without_a_name_is_called_by_its_key(copied: Path, signers: Signers) -> None:
    assert (
        sign(copied, signers.alice.key).file
        == f"signatures/{sha256_file(signers.alice.public)[:16]}.sig"
    )


def test_a_signature_covers_exactly_the_manifest_and_the_files_that_it_lists(signed: Path) -> None:
    files = open_package(signed).manifest.files
    assert set(read_signature(signed, "signatures/alice.sig").files) == {"manifest.json", *files}


def test_several_people_sign_side_by_side(signed: Path, signers: Signers) -> None:
    sign(signed, signers.bob.key, "bob")
    report = verified(signed, signers.alice.public, signers.bob.public)
    assert report.problems == ()
    assert [state.identity for state in report.signatures] == [
        str(signers.alice.public),
        str(signers.bob.public),
    ]


def test_without_an_identity_a_signature_is_reported_and_not_believed(signed: Path) -> None:
    report = verify_package(signed)
    assert report.ok
    assert [state.identity for state in report.signatures] == [None]


def test_a_missing_signature_is_a_problem(copied: Path, signers: Signers) -> None:
    file, problem = only_problem(verified(copied, signers.alice.public))
    assert file == "signatures"
    assert "there is no signature" in problem


def test_another_key_s_signature_is_a_problem_that_names_both_keys(
    signed: Path, signers: Signers
) -> None:
    file, problem = only_problem(verified(signed, signers.bob.public))
    assert file == "signatures/alice.sig"
    assert sha256_file(signers.alice.public) in problem
    assert sha256_file(signers.bob.public) in problem


def test_what_a_killed_writer_left_in_signatures_is_ignored(signed: Path, signers: Signers) -> None:
    (signed / "signatures/.bob.sig.0123456789ab.part").write_text("half")
    assert verified(signed, signers.alice.public).problems == ()
    sign(signed, signers.bob.key, "bob")
    assert sorted(path.name for path in (signed / "signatures").glob("[!.]*")) == [
        "alice.sig",
        "bob.sig",
    ]


def test_a_damaged_package_is_not_signed(copied: Path, signers: Signers) -> None:
    flip(copied / "assets/LICENSE", 3)
    with pytest.raises(SignatureError, match=r"has problems.*damaged"):
        sign(copied, signers.alice.key)
    assert not (copied / "signatures").exists()


def test_an_unsafe_package_is_not_signed(copied: Path, signers: Signers) -> None:
    edit_graph(
        copied, lambda graph: graph["graph_module"]["graph"]["nodes"][0].update(target="os.system")
    )
    with pytest.raises(SignatureError, match="has problems"):
        sign(copied, signers.alice.key)


def test_a_signature_is_not_replaced(signed: Path, signers: Signers) -> None:
    before = (signed / "signatures/alice.sig").read_bytes()
    with pytest.raises(StorageError, match="a signature of this name already exists"):
        sign(signed, signers.bob.key, "alice")
    assert (signed / "signatures/alice.sig").read_bytes() == before


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a" * 200])
def test_a_signature_s_name_is_a_plain_one(copied: Path, signers: Signers, name: str) -> None:
    if name:
        with pytest.raises(SignatureError, match="name"):
            sign(copied, signers.alice.key, name)
    assert not (copied / "signatures").exists()


def test_an_encrypted_key_needs_its_password(copied: Path, signers: Signers) -> None:
    with pytest.raises(SignatureError, match="is encrypted"):
        read_private_key(signers.alice.encrypted)
    with pytest.raises(SignatureError, match="password is wrong"):
        read_private_key(signers.alice.encrypted, b"guess")
    sign_folder(copied, read_private_key(signers.alice.encrypted, PASSWORD), "alice")
    assert verified(copied, signers.alice.public).problems == ()


def test_a_private_key_is_no_identity(signers: Signers) -> None:
    with pytest.raises(SignatureError, match="private key"):
        read_identity(signers.alice.key)


def test_a_public_key_signs_nothing(signers: Signers) -> None:
    with pytest.raises(SignatureError, match="not a private key"):
        read_private_key(signers.alice.public)


def test_a_key_of_another_kind_is_refused_by_its_name() -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    public = ed25519.Ed25519PrivateKey.generate().public_key()
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()
    with pytest.raises(SignatureError, match=r"secp256r1.*Ed25519"):
        identity_of(pem, "ed")


def test_a_missing_key_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the key cannot be read"):
        read_identity(tmp_path / "none.pem")


def test_a_certificate_is_verified_by_who_issued_it(copied: Path, signers: Signers) -> None:
    sign(copied, signers.alice.key, "alice", certificate=signers.alice.certificate)
    report = verified(copied, signers.issuer)
    assert report.problems == ()
    assert [(state.kind, state.identity) for state in report.signatures] == [
        ("certificate", str(signers.issuer))
    ]


def test_a_certificate_of_another_issuer_is_a_problem(copied: Path, signers: Signers) -> None:
    sign(copied, signers.alice.key, "alice", certificate=signers.alice.certificate)
    assert "was not issued by" in only_problem(verified(copied, signers.other_issuer))[1]


def test_a_certificate_does_not_stand_for_a_bare_key(signed: Path, signers: Signers) -> None:
    assert "is signed by a key" in only_problem(verified(signed, signers.issuer))[1]


def test_another_s_certificate_is_refused_when_signing(copied: Path, signers: Signers) -> None:
    with pytest.raises(SignatureError, match="does not match"):
        sign(copied, signers.alice.key, certificate=signers.bob.certificate)


def test_an_encrypted_key_is_refused_beside_a_certificate(copied: Path, signers: Signers) -> None:
    with pytest.raises(SignatureError, match="encrypted"):
        sign_folder(
            copied,
            read_private_key(signers.alice.encrypted, PASSWORD),
            certificate=signers.alice.certificate,
        )


def test_a_missing_certificate_is_a_clear_error(
    copied: Path, signers: Signers, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=r"none\.crt"):
        sign(copied, signers.alice.key, certificate=tmp_path / "none.crt")


def test_a_package_made_of_a_signed_one_is_not_signed(signed: Path, tmp_path: Path) -> None:
    from trainload.packaging.write import with_weights

    package = open_package(signed)
    state = package.program().state
    made = with_weights(package, tmp_path / "new.tl", [(name, state[name] + 1) for name in state])
    assert not (made.path / "signatures").exists()


def model_signing(*arguments: str | Path) -> Result:
    """Run the library's own command, which does not know packages, in this process."""
    from model_signing._cli import main

    return CliRunner().invoke(main, [str(word) for word in arguments])


def test_the_library_s_own_command_verifies_the_folder(signed: Path, signers: Signers) -> None:
    arguments = (
        "verify",
        "key",
        signed,
        "--signature",
        signed / "signatures/alice.sig",
        "--public_key",
        signers.alice.public,
    )
    assert model_signing(*arguments).exit_code == 0
    flip(signed / "weights/non-persistent.safetensors", -1)
    assert model_signing(*arguments).exit_code == 1


def test_a_signature_of_the_library_s_own_command_is_verified(
    copied: Path, signers: Signers, tmp_path: Path
) -> None:
    outside = [
        part
        for folder in ("debug", "derived", "signatures")
        for part in ("--ignore-paths", copied / folder)
    ]
    done = model_signing(
        "sign",
        "key",
        copied,
        "--signature",
        tmp_path / "a.sig",
        "--private_key",
        signers.alice.key,
        *outside,
    )
    assert done.exit_code == 0, done.output
    (copied / "signatures").mkdir()
    shutil.copy(tmp_path / "a.sig", copied / "signatures/a.sig")
    assert verified(copied, signers.alice.public).problems == ()


def test_a_key_tells_whether_it_is_encrypted(signers: Signers) -> None:
    assert [
        is_encrypted(path)
        for path in (signers.alice.encrypted, signers.alice.key, signers.alice.public)
    ] == [True, False, False]


def test_without_the_libraries_signing_says_how_to_install_them(
    copied: Path, signers: Signers, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = read_private_key(signers.alice.key)
    monkeypatch.setitem(sys.modules, "model_signing.signing", None)
    with pytest.raises(SignatureError, match=r"pip install \"trainload\[signing\]\""):
        sign_folder(copied, key)


def read_without_libraries(package: Path) -> None:
    """Import the reader of signatures again without the libraries that verify them.

    Print the kind of the package's first signature.
    """
    for name in [name for name in sys.modules if name.startswith("trainload.packaging.signatures")]:
        del sys.modules[name]
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("model_signing", "cryptography")
    ]:
        del sys.modules[name]
    sys.modules.update({"model_signing": None, "cryptography": None})  # type: ignore[dict-item]  # as `import` itself records missing modules
    verify = importlib.import_module("trainload.packaging.signatures.verify")
    print(verify.verify_package(package).signatures[0].kind)


def test_without_the_libraries_a_signature_is_still_read(signed: Path, tmp_path: Path) -> None:
    """A reader that cannot verify a signature still shows it."""
    status, told = ran(read_without_libraries, signed, cwd=tmp_path)
    assert (status, told.strip()) == (0, "key"), told
