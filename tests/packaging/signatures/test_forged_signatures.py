"""Signatures that were changed, were moved to another package, or are malformed."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.signatures.sign_and_verify import only_problem, verified
from tests.packaging.signers import Signers
from tests.packaging.tampering import flip, reseal

from trainload.core.canonical_json import sha256_file
from trainload.core.errors import IntegrityError, PackageError, UnsafePackageError
from trainload.packaging.package import open_package
from trainload.packaging.signatures.signature_file import MAX_SIGNATURES, parse_signature
from trainload.packaging.signatures.verify import verify_package

Change = Callable[[dict[str, Any]], object]


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


def test_a_signature_under_a_false_name_of_its_key_is_a_problem(
    signed: Path, signers: Signers
) -> None:
    """The name of the key is not signed: anybody can write bob's fingerprint there."""
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


def test_a_link_in_place_of_the_signatures_is_refused(signed: Path, tmp_path: Path) -> None:
    shutil.move(signed / "signatures", tmp_path / "elsewhere")
    (signed / "signatures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackageError, match="signatures"):
        open_package(signed)
    assert not verify_package(signed).ok
