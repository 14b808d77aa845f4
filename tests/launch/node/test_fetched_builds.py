"""A node fetches builds from its package's store, and says why it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builds import TARGET, made_build
from tests.packaging.signatures.sign_and_verify import sign
from tests.packaging.signers import Signer, Signers

from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
from trainload.launching.node import fetched_builds
from trainload.launching.node.fetched_builds import FetchedBuilds
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


def fetched(
    store: Path | str, policy: Policy, draft: Path, target: Target = TARGET
) -> tuple[bool, str]:
    """Return whether a build is fetched into the draft, and what is told if none is."""
    told: list[str] = []
    builds = FetchedBuilds(f"{store}#main/1", [policy], told.append)
    found = any(offered.fetch(draft) for offered in builds.offered(target, 0))
    assert found is bool(list(draft.iterdir()))
    assert len(told) <= 1
    return found, "".join(told)


def refusal(store: Path, policy: Policy, draft: Path, target: Target = TARGET) -> str:
    """Return why nothing is fetched; "" if nobody is told."""
    found, told = fetched(store, policy, draft, target)
    assert not found
    return told


def test_a_build_of_a_trusted_maker_is_fetched(store: Path, signers: Signers, draft: Path) -> None:
    assert fetched(store, trusting(signers.alice), draft) == (True, "")
    assert (draft / "train.only.bin").read_text() == "code"


def test_a_build_of_another_maker_is_refused(store: Path, signers: Signers, draft: Path) -> None:
    assert "does not trust the build's maker" in refusal(store, trusting(signers.bob), draft)


def test_without_a_rule_about_builds_nothing_is_fetched_or_told(store: Path, draft: Path) -> None:
    assert refusal(store, Policy(source="policy"), draft) == ""


def test_policies_decide_anew_about_a_build_in_the_cache(
    store: Path, signers: Signers, draft: Path
) -> None:
    fetched(store, trusting(signers.alice), draft)

    def allows(*policies: Policy) -> bool:
        return FetchedBuilds(f"{store}#main/1", policies, print).allows(draft)

    nobody = Policy(source="nobody", build_makers=())
    assert [
        allows(trusting(signers.alice)),
        allows(trusting(signers.bob)),
        allows(trusting(signers.alice), nobody),
        allows(Policy(source="silent")),
        allows(trusting(signers.alice)),
    ] == [True, False, False, False, True]


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


def test_signatures_are_verified_once_for_all_processes(
    store: Path, signers: Signers, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(store, trusting(signers.alice), draft)
    monkeypatch.setattr(fetched_builds, "check_maker", lambda *_: pytest.fail("verified again"))
    assert FetchedBuilds(f"{store}#main/1", [trusting(signers.alice)], print).allows(draft)


def forged(store: Path, **changes: object) -> None:
    """Change the record of the store's build, as somebody can who may write to the store."""
    file = store / "builds" / TARGET.job / "00000001.json"
    fields = {**parse_canonical(file.read_bytes(), ""), **changes}
    del fields["checksum"]
    file.write_bytes(canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))}))


def test_a_record_that_hides_that_a_build_is_unverified_is_refused(
    tmp_path: Path, signers: Signers, draft: Path
) -> None:
    push(tmp_path / "store", tmp_path / "tiny.build", signers.alice, unverified=("train.only",))
    forged(tmp_path / "store", verified=True)
    assert "although the store says otherwise" in refusal(
        tmp_path / "store", trusting(signers.alice), draft
    )


def test_a_record_that_relabels_a_signed_build_is_refused(
    store: Path, signers: Signers, draft: Path
) -> None:
    other = TARGET.model_copy(update={"architecture": {**TARGET.architecture, "threads": 2}})
    forged(store, target=other.model_dump())
    assert "not those of the build" in refusal(store, trusting(signers.alice), draft, other)


def test_a_record_of_paths_that_cannot_exist_together_is_refused(
    store: Path, signers: Signers, draft: Path
) -> None:
    (stored,) = builds_of(Store(store), TARGET.job)
    files = {file: entry.model_dump() for file, entry in stored.files.items()}
    forged(store, files={**files, "signatures/maker.sig/more.sig": files["signatures/maker.sig"]})
    assert "both a file and a folder" in refusal(store, trusting(signers.alice), draft)


def test_a_kernel_that_this_machine_cannot_load_is_refused(
    tmp_path: Path, signers: Signers, draft: Path
) -> None:
    build = made_build(tmp_path / "tiny.build", kernel=b"no library")
    sign(build, signers.alice.key, "maker")
    push_build(build, tmp_path / "store")
    assert "a kernel cannot be loaded" in refusal(
        tmp_path / "store", trusting(signers.alice), draft
    )


def test_an_older_build_is_fetched_if_the_newest_one_is_refused(
    store: Path, tmp_path: Path, signers: Signers, draft: Path
) -> None:
    push(store, tmp_path / "new.build", signers.alice, unverified=("train.only",))
    assert fetched(store, trusting(signers.alice), draft)[0]


def test_a_damaged_record_does_not_hide_the_others(
    store: Path, tmp_path: Path, signers: Signers, draft: Path
) -> None:
    push(store, tmp_path / "new.build", signers.alice)
    (store / "builds" / TARGET.job / "00000002.json").write_text("{}")
    assert fetched(store, trusting(signers.alice), draft)[0]


def test_a_store_that_is_not_reachable_is_told(
    tmp_path: Path, signers: Signers, draft: Path
) -> None:
    assert "there is no store" in refusal(tmp_path / "nothing", trusting(signers.alice), draft)


@pytest.mark.parametrize("package", ["gpt.tl", "oci://localhost/gpt:1"])
def test_a_folder_or_registry_has_no_builds(package: str, signers: Signers) -> None:
    builds = FetchedBuilds(package, [trusting(signers.alice)], pytest.fail)
    assert list(builds.offered(TARGET, 0)) == []
