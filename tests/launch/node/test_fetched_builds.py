"""A node fetches builds from its package's store, and says why it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builds import TARGET, made_build
from tests.packaging.signatures.sign_and_verify import sign
from tests.packaging.signers import Signer, Signers

from trainload.launching.node.fetched_builds import fetched_builds
from trainload.packaging.builds.build_record import Target
from trainload.packaging.signatures.policy import Policy
from trainload.packaging.stores.store import Store, blob_path
from trainload.packaging.stores.stored_builds import builds_of, push_build


def trusting(signer: Signer) -> Policy:
    return Policy(source="policy", build_makers=(signer.public.read_text(),))


def push(store: Path, folder: Path, signer: Signer, unverified: tuple[str, ...] = ()) -> None:
    """Push a build of made bytes, signed."""
    sign(made_build(folder, unverified=unverified), signer.key, "maker")
    push_build(folder, store)


@pytest.fixture
def store(tmp_path: Path, signers: Signers) -> Path:
    """A store with a build of Alice."""
    push(tmp_path / "store", tmp_path / "tiny.build", signers.alice)
    return tmp_path / "store"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    return folder


def refusal(store: Path, policy: Policy, draft: Path, target: Target = TARGET) -> str:
    """Return why nothing is fetched; "" if nobody is told."""
    told: list[str] = []
    assert not fetched_builds(f"{store}#main/1", [policy], told.append)(target, 0, draft)
    assert list(draft.iterdir()) == []
    assert len(told) <= 1
    return "".join(told)


def test_a_build_of_a_trusted_maker_is_fetched(store: Path, signers: Signers, draft: Path) -> None:
    told: list[str] = []
    fetch = fetched_builds(f"{store}#main/1", [trusting(signers.alice)], told.append)
    assert fetch(TARGET, 0, draft)
    assert (draft / "train.only.bin").read_text() == "code"
    assert told == []


def test_a_build_of_another_maker_is_refused(store: Path, signers: Signers, draft: Path) -> None:
    assert "does not trust the build's maker" in refusal(store, trusting(signers.bob), draft)


def test_without_a_rule_about_builds_nothing_is_fetched_or_told(store: Path, draft: Path) -> None:
    assert refusal(store, Policy(source="policy"), draft) == ""


@pytest.mark.parametrize(
    ("part", "fact", "value", "told"),
    [
        ("architecture", "capability", "AVX2", "its capability is AVX512, not AVX2"),
        ("toolchain", "torch", "2.14.1", "its torch is 2.13.0+cpu, not 2.14.1"),
    ],
)
def test_a_build_for_something_else_is_refused(
    store: Path, signers: Signers, draft: Path, part: str, fact: str, value: str, told: str
) -> None:
    here = TARGET.model_copy(update={part: {**getattr(TARGET, part), fact: value}})
    assert told in refusal(store, trusting(signers.alice), draft, here)


def test_nobody_is_told_about_builds_of_other_jobs(
    store: Path, signers: Signers, draft: Path
) -> None:
    other = TARGET.model_copy(update={"job": "b" * 64})
    assert refusal(store, trusting(signers.alice), draft, other) == ""


def test_an_unverified_build_is_refused(tmp_path: Path, signers: Signers, draft: Path) -> None:
    push(tmp_path / "store", tmp_path / "tiny.build", signers.alice, unverified=("train.only",))
    assert "unverified" in refusal(tmp_path / "store", trusting(signers.alice), draft)


@pytest.mark.parametrize("file", ["build.json", "0/kernels/abc.so", "signatures/maker.sig"])
def test_a_tampered_build_is_refused(store: Path, signers: Signers, draft: Path, file: str) -> None:
    (stored,) = builds_of(Store(store), TARGET.job)
    blob = store / blob_path(stored.files[file].sha256)
    blob.chmod(0o644)
    blob.write_bytes(b"x" * blob.stat().st_size)
    assert "differs from the published one" in refusal(store, trusting(signers.alice), draft)


def test_an_older_build_is_fetched_if_the_newest_one_is_refused(
    store: Path, tmp_path: Path, signers: Signers, draft: Path
) -> None:
    push(store, tmp_path / "new.build", signers.alice, unverified=("train.only",))
    fetch = fetched_builds(f"{store}#main/1", [trusting(signers.alice)], lambda _: None)
    assert fetch(TARGET, 0, draft)


def test_a_store_that_is_not_reachable_is_told(
    tmp_path: Path, signers: Signers, draft: Path
) -> None:
    assert "there is no store" in refusal(tmp_path / "nothing", trusting(signers.alice), draft)


@pytest.mark.parametrize("package", ["gpt.tl", "oci://localhost/gpt:1"])
def test_a_folder_or_registry_has_no_builds(package: str, signers: Signers, draft: Path) -> None:
    told: list[str] = []
    assert not fetched_builds(package, [trusting(signers.alice)], told.append)(TARGET, 0, draft)
    assert told == []
