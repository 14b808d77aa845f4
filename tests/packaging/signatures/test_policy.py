"""Policies: what they require, where they are found, and that none weakens another."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.signers import Signers
from tests.packaging.tampering import UNKNOWN_LIBRARY, edit_manifest

from trainload.cli import main as cli
from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import PolicyError, SignatureError
from trainload.packaging.package import open_package
from trainload.packaging.signatures import policy as policies
from trainload.packaging.signatures.keys import read_private_key
from trainload.packaging.signatures.policy import (
    POLICY,
    Policy,
    check_policies,
    find_policies,
    read_policy,
    which_trusts_extensions,
)
from trainload.packaging.signatures.signing import sign_folder

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a policy file from lines of TOML."""

    def write_lines(*lines: str, name: str = "policy.toml") -> Path:
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return write_lines


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path at which the machine's policy is expected."""
    monkeypatch.setattr(policies, "SYSTEM_POLICY", tmp_path / "system.toml")
    monkeypatch.delenv(POLICY, raising=False)
    return tmp_path / "system.toml"


def signed_by(signers: Signers, count: int = 1) -> tuple[str, ...]:
    people = f'["{signers.alice.public}", "{signers.bob.public}"]'
    return ("require_signature = true", f"identities = {people}", f"signatures = {count}")


def sign(package: Path, key: Path, name: str) -> None:
    sign_folder(package, read_private_key(key), name)


def refusal(package: Path, path: Path) -> str:
    with pytest.raises(PolicyError) as caught:
        check_policies(package, [read_policy(path)])
    return str(caught.value)


def test_a_package_that_is_signed_as_demanded_may_be_run(
    copied: Path, signers: Signers, write: Write
) -> None:
    sign(copied, signers.bob.key, "bob")
    assert (
        check_policies(copied, [read_policy(write(*signed_by(signers)))])
        == open_package(copied).digest
    )


def test_an_unsigned_package_is_refused_by_a_line_that_names_policy_and_keys(
    copied: Path, signers: Signers, write: Write
) -> None:
    line = refusal(copied, write(*signed_by(signers)))
    assert "policy.toml forbids running it: it is not signed as required" in line
    assert "expected 1 of 2 identities" in line
    assert "trainload sign" in line


def test_a_package_that_somebody_else_signed_is_refused(
    copied: Path, signers: Signers, write: Write
) -> None:
    sign(copied, signers.bob.key, "bob")
    path = write("require_signature = true", f'identities = ["{signers.alice.public}"]')
    assert "signed by another key" in refusal(copied, path)


def test_a_package_that_was_changed_after_it_was_signed_is_refused(
    copied: Path, signers: Signers, write: Write
) -> None:
    sign(copied, signers.alice.key, "alice")
    edit_manifest(copied, lambda manifest: manifest["recipe"].update(seed=8))
    assert "the signed files differ from those that are here: changed manifest.json" in refusal(
        copied, write(*signed_by(signers))
    )


def test_as_many_identities_as_are_demanded_must_have_signed(
    copied: Path, signers: Signers, write: Write
) -> None:
    path = write(*signed_by(signers, 2))
    sign(copied, signers.alice.key, "alice")
    assert "got 1;" in refusal(copied, path)
    sign(copied, signers.alice.key, "alice-again")
    assert "got 1;" in refusal(copied, path)
    sign(copied, signers.bob.key, "bob")
    check_policies(copied, [read_policy(path)])


def test_one_certificate_that_two_identities_would_do_for_is_one_signature(
    copied: Path, signers: Signers, write: Write
) -> None:
    both = signers.issuer.read_text() + signers.other_issuer.read_text()
    (copied.parent / "both.pem").write_text(both)
    path = write(
        "require_signature = true",
        f'identities = ["{signers.issuer}", "both.pem"]',
        "signatures = 2",
    )
    sign_folder(
        copied, read_private_key(signers.alice.key), "alice", certificate=signers.alice.certificate
    )
    assert "got 1" in refusal(copied, path)


def test_an_identity_may_stand_in_the_policy_itself(
    copied: Path, signers: Signers, write: Write
) -> None:
    sign(copied, signers.alice.key, "alice")
    path = write(
        "require_signature = true", f"identities = ['''{signers.alice.public.read_text()}''']"
    )
    check_policies(copied, [read_policy(path)])


def test_a_path_in_a_policy_is_relative_to_its_folder(
    copied: Path, signers: Signers, write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/alice.pub").write_bytes(signers.alice.public.read_bytes())
    path = write("require_signature = true", 'identities = ["keys/alice.pub"]')
    monkeypatch.chdir("/")
    sign(copied, signers.alice.key, "alice")
    check_policies(copied, [read_policy(path)])


def test_a_policy_that_was_sent_elsewhere_has_its_keys_with_it(
    copied: Path, signers: Signers, write: Write
) -> None:
    sign(copied, signers.alice.key, "alice")
    sent = Policy.model_validate_json(read_policy(write(*signed_by(signers))).model_dump_json())
    check_policies(copied, [sent])


def test_a_denied_digest_is_refused(copied: Path, write: Write) -> None:
    digest = open_package(copied).digest
    assert f"its digest is denied (got {digest})" in refusal(copied, write(f'deny = ["{digest}"]'))


def test_an_allowed_digest_needs_no_signature(copied: Path, signers: Signers, write: Write) -> None:
    digest = open_package(copied).digest
    check_policies(copied, [read_policy(write(*signed_by(signers), f'allow = ["{digest}"]'))])


def test_an_allowance_is_of_its_own_policy_alone(
    copied: Path, signers: Signers, write: Write
) -> None:
    allowing = read_policy(write(f'allow = ["{open_package(copied).digest}"]'))
    demanding = read_policy(write(*signed_by(signers), name="other.toml"))
    with pytest.raises(PolicyError, match=r"other\.toml"):
        check_policies(copied, [allowing, demanding])


def test_operators_of_other_namespaces_than_the_policy_s_are_refused(
    copied: Path, write: Write
) -> None:
    edit_manifest(
        copied,
        lambda manifest: manifest.update(
            op_libraries=dict.fromkeys(("fast", "other"), UNKNOWN_LIBRARY)
        ),
    )
    assert "of libraries that are not allowed (expected only fast, got other)" in refusal(
        copied, write('namespaces = ["fast"]')
    )
    check_policies(copied, [read_policy(write('namespaces = ["fast", "other"]'))])


def with_extension(package: Path) -> None:
    (package / "extensions").mkdir()
    name = "extensions/fast-1-py3-none-any.whl"
    with zipfile.ZipFile(package / name, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo("fast.py"), "")
        wheel.writestr(zipfile.ZipInfo("fast-1.dist-info/METADATA"), "Name: fast\nVersion: 1\n")
    data = (package / name).read_bytes()
    entry = {"media_type": "application/zip", "sha256": sha256_bytes(data), "size": len(data)}
    library = {
        **UNKNOWN_LIBRARY,
        "distribution": "fast",
        "version": "1",
        "modules": ["fast"],
        "wheels": [name],
    }

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = entry
        manifest["op_libraries"]["fast"] = library
        manifest["features"] = sorted({*manifest["features"], "custom-ops", "extensions"})

    edit_manifest(package, change)


def test_a_package_with_operator_libraries_in_it_is_refused_where_they_are_never_run(
    copied: Path, write: Write
) -> None:
    path = write('extensions = "never"')
    check_policies(copied, [read_policy(path)])
    with_extension(copied)
    assert "it contains operator libraries" in refusal(copied, path)


def test_a_package_with_operator_libraries_in_it_must_be_signed_where_only_signed_ones_are_run(
    copied: Path, signers: Signers, write: Write
) -> None:
    path = write('extensions = "signed"', f'identities = ["{signers.alice.public}"]')
    check_policies(copied, [read_policy(path)])
    with_extension(copied)
    assert "it is not signed as required" in refusal(copied, path)
    sign(copied, signers.alice.key, "alice")
    check_policies(copied, [read_policy(path)])


def test_a_policy_that_wants_operator_libraries_signed_says_that_signed_ones_may_be_loaded(
    signers: Signers, write: Write
) -> None:
    signed = read_policy(
        write(
            'extensions = "signed"',
            f'identities = ["{signers.alice.public}"]',
            f'allow = ["{"a" * 64}"]',
        )
    )
    silent = read_policy(write(*signed_by(signers), name="other.toml"))
    assert which_trusts_extensions([silent, signed], "b" * 64) == signed
    # a policy whose `allow` lists the digest has not checked signatures
    assert which_trusts_extensions([silent, signed], "a" * 64) is None
    assert which_trusts_extensions([silent], "b" * 64) is None


WRONG = {
    "an unknown key": ["require_signatures = true"],
    "a value of another type": ["require_signature = 1"],
    "a digest that is none": ['deny = ["abc"]'],
    "a signature of nobody": ["require_signature = true"],
    "more signatures than identities": [
        "require_signature = true",
        "identities = [KEY]",
        "signatures = 2",
    ],
    "no signatures": ["require_signature = true", "identities = [KEY]", "signatures = 0"],
    "one identity twice": ["require_signature = true", "identities = [KEY, KEY]"],
    "identities without effect": ["identities = [KEY]"],
    "a digest allowed and denied": [f'allow = ["{"a" * 64}"]', f'deny = ["{"a" * 64}"]'],
    "an unknown word": ['extensions = "sometimes"'],
    "a source of its own": ['source = "elsewhere"'],
    "not valid TOML": ["require_signature: true"],
}


@pytest.mark.parametrize("lines", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_policy_is_refused_with_its_file(
    lines: list[str], signers: Signers, write: Write
) -> None:
    path = write(*(line.replace("KEY", f'"{signers.alice.public}"') for line in lines))
    with pytest.raises(PolicyError, match=r"policy\.toml"):
        read_policy(path)


def test_a_policy_of_a_broken_key_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "broken.pub").write_text(
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
    )
    with pytest.raises(SignatureError, match=r"broken\.pub"):
        read_policy(write("require_signature = true", 'identities = ["broken.pub"]'))


def test_a_policy_that_is_named_and_missing_is_an_error(
    system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_policies() == ()
    with pytest.raises(PolicyError, match="cannot be read"):
        find_policies(tmp_path / "none.toml")
    monkeypatch.setenv(POLICY, str(tmp_path / "none.toml"))
    with pytest.raises(PolicyError, match="cannot be read"):
        find_policies()


def test_a_machine_s_policy_that_cannot_be_read_is_an_error(system: Path) -> None:
    os.symlink("nowhere", system)
    with pytest.raises(PolicyError, match="cannot be read"):
        find_policies()


def test_all_policies_that_are_found_hold(
    system: Path, copied: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = open_package(copied).digest
    deny = f'deny = ["{digest}"]'
    allow = write(f'allow = ["{digest}"]', name="allow.toml")
    denying = write(deny, name="deny.toml")
    for machine, environment, named in (
        (denying, allow, allow),
        (allow, denying, allow),
        (allow, allow, denying),
    ):
        system.write_bytes(machine.read_bytes())
        monkeypatch.setenv(POLICY, str(environment))
        with pytest.raises(PolicyError, match="denied"):
            check_policies(copied, find_policies(named))


def test_verify_says_whether_the_policies_let_a_package_be_run(
    system: Path, copied: Path, signers: Signers, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--policy", str(write(*signed_by(signers))), "verify", str(copied)]
    assert cli.run(command) == 1
    assert "forbids running it" in capsys.readouterr().err
    sign(copied, signers.alice.key, "alice")
    assert cli.run(command) == 0
