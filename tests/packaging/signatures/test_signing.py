"""Signatures: who signed what, and what becomes of signatures that lie."""

from __future__ import annotations

import base64
import importlib
import json
import os
import pty
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.packaging.signers import PASSWORD, Signers
from tests.packaging.tampering import edit_graph, flip, reseal
from tests.ranks import SECONDS, end, ran, start

from trainload.cli import main as cli
from trainload.core.canonical_json import sha256_file
from trainload.core.errors import (
    IntegrityError,
    PackageError,
    SignatureError,
    StorageError,
    UnsafePackageError,
)
from trainload.packaging.package import open_package
from trainload.packaging.signatures.keys import (
    identity_of,
    is_encrypted,
    read_identity,
    read_private_key,
)
from trainload.packaging.signatures.signature_file import (
    MAX_SIGNATURES,
    SignatureFile,
    parse_signature,
    read_signature,
)
from trainload.packaging.signatures.signing import sign_package
from trainload.packaging.signatures.verify import VerifyReport, verify_package

Change = Callable[[dict[str, Any]], object]


def sign(package: Path, key: Path, name: str | None = None, **options: Any) -> SignatureFile:
    return sign_package(package, read_private_key(key), name, **options)


def verified(package: Path, *identities: Path) -> VerifyReport:
    return verify_package(package, [read_identity(path) for path in identities])


def only_problem(report: VerifyReport) -> tuple[str, str]:
    (problem,) = report.problems
    return problem.file, problem.problem


@pytest.fixture
def signed(copied: Path, signers: Signers) -> Path:
    """A package that alice signed."""
    sign(copied, signers.alice.key, "alice")
    return copied


def edit_bundle(package: Path, change: Change, name: str = "alice") -> None:
    path = package / f"signatures/{name}.sig"
    bundle = json.loads(path.read_bytes())
    change(bundle)
    path.write_text(json.dumps(bundle))


def edit_payload(package: Path, change: Change) -> None:
    def within(bundle: dict[str, Any]) -> None:
        payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        change(payload)
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()

    edit_bundle(package, within)


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


def test_a_signature_under_a_false_name_of_its_key_is_a_problem(
    signed: Path, signers: Signers
) -> None:
    """What names the key is not signed: anybody can write bob's fingerprint there."""
    edit_bundle(
        signed,
        lambda bundle: bundle["verificationMaterial"]["publicKey"].update(
            hint=sha256_file(signers.bob.public)
        ),
    )
    assert "was not made by" in only_problem(verified(signed, signers.bob.public))[1]


def test_a_package_that_was_changed_and_sealed_again_is_not_the_one_that_was_signed(
    signed: Path, signers: Signers
) -> None:
    (signed / "assets/LICENSE").write_text("all rights reserved\n")
    reseal(signed)
    for identities in ((), (signers.alice.public,)):
        file, problem = only_problem(verified(signed, *identities))
        assert file == "signatures/alice.sig"
        assert "assets/LICENSE, manifest.json" in problem


def test_a_signature_of_some_of_the_files_is_a_problem(signed: Path, signers: Signers) -> None:
    edit_payload(signed, lambda payload: payload["predicate"]["resources"].pop())
    assert (
        "missing weights/non-persistent.safetensors"
        in only_problem(verified(signed, signers.alice.public))[1]
    )


def test_a_signature_of_more_than_the_files_is_a_problem(signed: Path, signers: Signers) -> None:
    more = {"name": "debug/train.json", "algorithm": "sha256", "digest": "0" * 64}
    edit_payload(signed, lambda payload: payload["predicate"]["resources"].append(more))
    assert "extra debug/train.json" in only_problem(verified(signed, signers.alice.public))[1]


def test_a_payload_that_was_changed_beside_its_list_of_files_is_a_problem(
    signed: Path, signers: Signers
) -> None:
    edit_payload(signed, lambda payload: payload["subject"][0].update(name="another"))
    assert "was not made by" in only_problem(verified(signed, signers.alice.public))[1]


@pytest.mark.parametrize("at", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.96])
def test_a_flipped_bit_in_a_signature_is_found_where_its_signer_is_asked_for(
    signed: Path, signers: Signers, at: float
) -> None:
    path = signed / "signatures/alice.sig"
    flip(path, int(at * path.stat().st_size))
    assert only_problem(verified(signed, signers.alice.public))[0] == "signatures/alice.sig"


MALFORMED: dict[str, Change] = {
    "another media type": lambda bundle: bundle.update(
        mediaType="application/vnd.dev.sigstore.bundle+json;version=0.1"
    ),
    "no signer": lambda bundle: bundle["verificationMaterial"].pop("publicKey"),
    "no name of the key": lambda bundle: bundle["verificationMaterial"]["publicKey"].pop("hint"),
    "two signers": (
        lambda bundle: bundle["verificationMaterial"].update(certificate={"rawBytes": "AAAA"})
    ),
    "no marks": lambda bundle: bundle["dsseEnvelope"].update(signatures=[]),
    "two marks": (
        lambda bundle: bundle["dsseEnvelope"]["signatures"].append(
            bundle["dsseEnvelope"]["signatures"][0]
        )
    ),
    "another kind of payload": (
        lambda bundle: bundle["dsseEnvelope"].update(payloadType="text/plain")
    ),
    "a payload that is no base64": lambda bundle: bundle["dsseEnvelope"].update(payload="*"),
    "a payload that is no JSON": lambda bundle: bundle["dsseEnvelope"].update(payload="AAAA"),
    "a second spelling of the payload": lambda bundle: bundle.update(
        dsse_envelope=bundle["dsseEnvelope"]
    ),
    "an unknown field": lambda bundle: bundle.update(extra=1),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_signature_is_named_with_and_without_an_identity(
    signed: Path, signers: Signers, change: Change
) -> None:
    edit_bundle(signed, change)
    for identities in ((), (signers.alice.public,)):
        file, problem = only_problem(verified(signed, *identities))
        assert file == "signatures/alice.sig"
        assert "malformed" in problem


MALFORMED_PAYLOADS: dict[str, Change] = {
    "another predicate": lambda payload: payload.update(
        predicateType="https://model_signing/Digests/v0.1"
    ),
    "another statement": lambda payload: payload.update(_type="https://in-toto.io/Statement/v0.1"),
    "shards": lambda payload: payload["predicate"]["serialization"].update(method="shards"),
    "another hash": (
        lambda payload: payload["predicate"]["serialization"].update(hash_type="blake3")
    ),
    "links followed": (
        lambda payload: payload["predicate"]["serialization"].update(allow_symlinks=True)
    ),
    "a path that leaves the folder": (
        lambda payload: payload["predicate"]["resources"][0].update(name="../manifest.json")
    ),
    "a file twice": (
        lambda payload: payload["predicate"]["resources"].append(
            payload["predicate"]["resources"][0]
        )
    ),
}


@pytest.mark.parametrize("change", MALFORMED_PAYLOADS.values(), ids=MALFORMED_PAYLOADS.keys())
def test_a_malformed_statement_is_named(signed: Path, change: Change) -> None:
    edit_payload(signed, change)
    assert "malformed" in only_problem(verify_package(signed))[1]


def test_a_deep_signature_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(UnsafePackageError, match="nested too deeply"):
        parse_signature(b"[" * 10**6, "signatures/x.sig")


def test_brackets_within_strings_are_not_taken_for_depth() -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        parse_signature(b'{"x":"' + b'[\\"[' * 100 + b'"}', "signatures/x.sig")


def test_a_key_that_is_said_twice_is_refused() -> None:
    with pytest.raises(IntegrityError, match="a duplicate key"):
        parse_signature(b'{"mediaType":"a","mediaType":"b"}', "signatures/x.sig")


def test_too_many_signatures_are_a_problem(copied: Path) -> None:
    (copied / "signatures").mkdir()
    for number in range(MAX_SIGNATURES + 1):
        (copied / f"signatures/{number}.sig").write_text("{}")
    assert "too many signatures" in only_problem(verify_package(copied))[1]


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
    sign_package(copied, read_private_key(signers.alice.encrypted, PASSWORD), "alice")
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
        sign_package(
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
    """The library's own command, which knows nothing of packages, in this process."""
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


# The commands


def test_the_command_signs_and_verifies(
    copied: Path, signers: Signers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(["sign", str(copied), "--key", str(signers.alice.key), "--name", "alice", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["signer"] == sha256_file(signers.alice.public)
    assert cli.run(["verify", str(copied), "--identity", str(signers.alice.public)]) == 0
    assert f"verified: {signers.alice.public}" in capsys.readouterr().out


def test_verify_says_that_a_signature_was_not_asked_for(
    signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["verify", str(signed)]) == 0
    assert "(not verified: pass --identity)" in capsys.readouterr().out


def test_verify_ends_with_1_and_one_line_where_a_signature_is_missing(
    copied: Path, signers: Signers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["verify", str(copied), "--identity", str(signers.alice.public)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{copied}/signatures: there is no signature")


def test_the_password_is_in_the_environment(
    copied: Path, signers: Signers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINLOAD_KEY_PASSWORD", PASSWORD.decode())
    assert cli.run(["sign", str(copied), "--key", str(signers.alice.encrypted)]) == 0
    assert verified(copied, signers.alice.public).problems == ()


def on_terminal(terminal: str, words: Sequence[str]) -> None:
    """Run a command line in a session of its own, whose standard input and error are a terminal."""
    os.setsid()
    opened = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    for stream in (0, 2):
        os.dup2(opened, stream)
    os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing gives its processes none
    sys.argv = ["trainload", *words]
    cli.main()


def test_the_password_is_asked_for_on_a_terminal(
    copied: Path, signers: Signers, tmp_path: Path
) -> None:
    words = ["sign", str(copied), "--key", str(signers.alice.encrypted)]
    mine, theirs = pty.openpty()
    child = start(
        on_terminal,
        os.ttyname(theirs),
        words,
        cwd=tmp_path,
        log=tmp_path / "log",
        variables=os.environ,
    )
    try:
        said = os.read(mine, 1024)
        os.close(theirs)  # so that reading ends where the child, which has it by now, does
        while b"password of" not in said:
            said += os.read(mine, 1024)
        os.write(mine, PASSWORD + b"\n")
        child.join(SECONDS)
        assert child.exitcode == 0
    finally:
        end([child])
        os.close(mine)
    assert PASSWORD not in said
    assert verified(copied, signers.alice.public).problems == ()


def test_a_key_tells_whether_it_is_encrypted(signers: Signers) -> None:
    assert [
        is_encrypted(path)
        for path in (signers.alice.encrypted, signers.alice.key, signers.alice.public)
    ] == [True, False, False]


def test_an_encrypted_key_without_a_terminal_is_a_clear_error(
    copied: Path,
    signers: Signers,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert cli.run(["sign", str(copied), "--key", str(signers.alice.encrypted)]) == 2
    assert "TRAINLOAD_KEY_PASSWORD" in capsys.readouterr().err


def test_inspect_shows_signatures(
    signed: Path, signers: Signers, capsys: pytest.CaptureFixture[str]
) -> None:
    (signed / "signatures/broken.sig").write_text("{}")
    assert cli.run(["inspect", str(signed), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["signatures"]
    assert first == {
        "file": "signatures/alice.sig",
        "kind": "key",
        "signer": sha256_file(signers.alice.public),
    }
    assert "malformed" in second["problem"]


def test_without_the_libraries_signing_says_how_to_install_them(
    copied: Path, signers: Signers, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = read_private_key(signers.alice.key)
    monkeypatch.setitem(sys.modules, "model_signing.signing", None)
    with pytest.raises(SignatureError, match=r"pip install \"trainload\[signing\]\""):
        sign_package(copied, key)


def read_without_libraries(package: Path) -> None:
    """Import what reads signatures anew, where what checks them is not installed, and say of what
    kind the package's first one is.
    """
    for name in [name for name in sys.modules if name.startswith("trainload.packaging.signatures")]:
        del sys.modules[name]
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("model_signing", "cryptography")
    ]:
        del sys.modules[name]
    sys.modules.update({"model_signing": None, "cryptography": None})  # type: ignore[dict-item]  # as `import` itself notes what is not there
    verify = importlib.import_module("trainload.packaging.signatures.verify")
    print(verify.verify_package(package).signatures[0].kind)


def test_without_the_libraries_a_signature_is_still_read(signed: Path, tmp_path: Path) -> None:
    """A reader that cannot check a signature says what is there."""
    status, told = ran(read_without_libraries, signed, cwd=tmp_path)
    assert (status, told.strip()) == (0, "key"), told


def test_a_link_in_place_of_the_signatures_is_refused(signed: Path, tmp_path: Path) -> None:
    shutil.move(signed / "signatures", tmp_path / "elsewhere")
    (signed / "signatures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackageError, match="signatures"):
        open_package(signed)
    assert not verify_package(signed).ok
