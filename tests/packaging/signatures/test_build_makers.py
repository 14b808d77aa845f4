"""Policies say whose builds are loaded; without such a rule none is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.builds import made_build
from tests.packaging.signatures.sign_and_verify import sign
from tests.packaging.signers import Signers

from trainload.core.errors import PolicyError, SignatureError
from trainload.packaging.builds.build_folder import read_build
from trainload.packaging.signatures.build_makers import allows_builds, check_maker
from trainload.packaging.signatures.policy import Policy, read_policy


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return made_build(tmp_path / "tiny.build")


def trusting(*people: Path, name: str = "policy") -> Policy:
    return Policy(source=name, build_makers=tuple(person.read_text() for person in people))


SILENT = Policy(source="silent")


def refusal(build: Path, *policies: Policy) -> str:
    with pytest.raises(PolicyError) as caught:
        check_maker(build, *read_build(build), policies)
    return str(caught.value)


def test_a_build_of_a_trusted_maker_is_allowed(build: Path, signers: Signers) -> None:
    sign(build, signers.alice.key, "alice")
    check_maker(build, *read_build(build), [trusting(signers.bob.public, signers.alice.public)])


def test_a_build_without_a_signature_is_refused(build: Path, signers: Signers) -> None:
    assert "does not trust the build's maker" in refusal(build, trusting(signers.alice.public))


def test_a_build_of_another_maker_is_refused(build: Path, signers: Signers) -> None:
    sign(build, signers.bob.key, "bob")
    assert "signed by another key" in refusal(build, trusting(signers.alice.public))


def test_a_signature_of_another_build_is_refused(
    build: Path, signers: Signers, tmp_path: Path
) -> None:
    other = made_build(tmp_path / "other.build", content="other")
    sign(other, signers.alice.key, "alice")
    (build / "signatures").mkdir()
    (other / "signatures" / "alice.sig").rename(build / "signatures" / "alice.sig")
    assert "signed files differ" in refusal(build, trusting(signers.alice.public))


def test_all_policies_with_a_rule_must_trust_the_maker(build: Path, signers: Signers) -> None:
    sign(build, signers.alice.key, "alice")
    strict = trusting(signers.bob.public, name="strict")
    assert "strict" in refusal(build, trusting(signers.alice.public), strict)


def test_no_build_is_allowed_without_a_rule(build: Path, signers: Signers) -> None:
    sign(build, signers.alice.key, "alice")
    assert "no policy says" in refusal(build, SILENT)


def rules(signers: Signers) -> dict[str, tuple[Sequence[Policy], bool]]:
    trusts, forbids = trusting(signers.alice.public), trusting(name="forbids")
    return {
        "no policy": ([], False),
        "no rule": ([SILENT], False),
        "a maker": ([SILENT, trusts], True),
        "nobody": ([forbids], False),
        "a maker, and nobody": ([trusts, forbids], False),
    }


@pytest.mark.parametrize(
    "case", ["no policy", "no rule", "a maker", "nobody", "a maker, and nobody"]
)
def test_builds_are_looked_for_if_one_could_be_loaded(case: str, signers: Signers) -> None:
    policies, expected = rules(signers)[case]
    assert allows_builds(policies) is expected


def test_a_policy_file_names_makers_by_path(tmp_path: Path, signers: Signers) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(f'build_makers = ["{signers.alice.public}"]\n')
    assert read_policy(file).build_makers == (signers.alice.public.read_text(),)


def test_a_damaged_build_is_not_signed(build: Path, signers: Signers) -> None:
    (build / "0" / "train.only.bin").write_text("other")
    with pytest.raises(SignatureError, match="it was not signed"):
        sign(build, signers.alice.key, "alice")
