"""A package that a policy rejects does not run: on the driver, on a worker, or on resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.launch.commands import refused
from tests.launch.forked import refused_apart
from tests.packaging.signers import Signers
from tests.packaging.tampering import edit_manifest

import trainload
from trainload.core.canonical_json import canonical_json
from trainload.core.errors import IntegrityError, PolicyError
from trainload.launching.api.launch import prepare
from trainload.launching.node.libraries import open_for_run
from trainload.launching.run.contact import FileContact
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_spec import read_spec
from trainload.launching.run.run_state import Summary
from trainload.launching.worker.preparation import prepare_node
from trainload.packaging.package import Package
from trainload.packaging.signatures import policy as policies
from trainload.packaging.signatures.keys import read_private_key
from trainload.packaging.signatures.policy import POLICY
from trainload.packaging.signatures.signing import sign_folder

ALONE = ("--backend", "local", "--no-compile")


@pytest.fixture
def package(tiny: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Copy of the tiny package for signing, on a machine without a policy."""
    monkeypatch.delenv(POLICY, raising=False)
    monkeypatch.setattr(policies, "SYSTEM_POLICY", tmp_path / "system.toml")
    shutil.copytree(tiny.path, tmp_path / "tiny.tl")
    return trainload.open(tmp_path / "tiny.tl")


@pytest.fixture
def policy(signers: Signers, tmp_path: Path) -> Path:
    """Policy that requires alice's signature."""
    path = tmp_path / "policy.toml"
    path.write_text(f'require_signature = true\nidentities = ["{signers.alice.public}"]\n')
    return path


def sign(package: Package, signers: Signers) -> None:
    sign_folder(package.path, read_private_key(signers.alice.key), "alice")


def launched(package: Package, data: Path, run_dir: Path, policy: Path | None) -> None:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(
        package, plan, data, run_dir=run_dir, steps=2, backend="local", compile=False, policy=policy
    )


def prepared(package: Package, data: Path, run_dir: Path, policy: Path | None) -> None:
    """Write what a launch prepares for its workers, without starting them."""
    plan = trainload.plan(package, trainload.Cluster(), "single")
    prepare(
        package, plan, data, run_dir=run_dir, steps=2, backend="local", compile=False, policy=policy
    )


@pytest.mark.parametrize("extra", [(), ("--dry-run",)], ids=["launch", "dry run"])
def test_an_unsigned_package_is_not_launched(
    package: Package,
    policy: Path,
    tiny_data: Path,
    tmp_path: Path,
    extra: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command: list[str | Path] = [
        "--policy",
        policy,
        "launch",
        package.path,
        "--data",
        tiny_data,
        "--run-dir",
        tmp_path / "run",
        *ALONE,
    ]
    assert "forbids running it: it is not signed as required" in refused(
        [*command, *extra], tmp_path, capsys
    )


def test_the_environment_s_policy_holds_without_being_named(
    package: Package, policy: Path, tiny_data: Path, tmp_path: Path
) -> None:
    command: list[str | Path] = [
        "launch",
        package.path,
        "--data",
        tiny_data,
        "--run-dir",
        "run",
        *ALONE,
    ]
    assert "policy.toml forbids running it" in refused_apart(
        command, tmp_path, first=None, **{POLICY: str(policy)}
    )


def test_a_signed_package_trains_and_its_run_keeps_the_policy(
    package: Package, policy: Path, tiny_data: Path, tmp_path: Path, signers: Signers
) -> None:
    sign(package, signers)
    launched(package, tiny_data, tmp_path / "run", policy)
    assert [event.kind for event in read_events(tmp_path / "run")].count("step") == 2
    spec = read_spec(tmp_path / "run")
    assert (spec.digest, [held.source for held in spec.policies]) == (package.digest, [str(policy)])


def test_a_worker_holds_the_package_to_its_own_machine_s_policy(
    package: Package, policy: Path, tiny_data: Path, tmp_path: Path
) -> None:
    prepared(package, tiny_data, tmp_path / "run", None)
    (tmp_path / "system.toml").write_bytes(policy.read_bytes())
    with pytest.raises(PolicyError, match=r"system\.toml"):
        prepare_node(read_spec(tmp_path / "run"), [0], FileContact(tmp_path / "run", 0, Summary()))


def test_a_worker_holds_the_package_to_its_driver_s_policy(
    package: Package, policy: Path, tiny_data: Path, tmp_path: Path, signers: Signers
) -> None:
    sign(package, signers)
    prepared(package, tiny_data, tmp_path / "run", policy)
    policy.unlink()
    (package.path / "signatures/alice.sig").unlink()
    with pytest.raises(PolicyError, match=r"policy\.toml"):
        prepare_node(read_spec(tmp_path / "run"), [0], FileContact(tmp_path / "run", 0, Summary()))


def test_a_package_that_was_replaced_since_the_launch_is_not_run(
    package: Package, tiny_data: Path, tmp_path: Path
) -> None:
    """Even a child of the package, which the plan would fit, does not run."""
    prepared(package, tiny_data, tmp_path / "run", None)
    edit_manifest(package.path, lambda manifest: manifest.update(parent=package.digest))
    with pytest.raises(IntegrityError, match="not the package that the run was launched with"):
        prepare_node(read_spec(tmp_path / "run"), [0], FileContact(tmp_path / "run", 0, Summary()))
    with pytest.raises(IntegrityError, match="not the package that the run was launched with"):
        trainload.resume(tmp_path / "run", backend="local")


def test_a_package_that_was_replaced_since_it_was_opened_is_not_launched(
    package: Package, policy: Path, tiny_data: Path, tmp_path: Path, signers: Signers
) -> None:
    edit_manifest(package.path, lambda manifest: manifest["recipe"].update(seed=8))
    sign(package, signers)
    with pytest.raises(IntegrityError, match="replaced since it was opened"):
        launched(package, tiny_data, tmp_path / "run", policy)


def test_a_run_is_not_resumed_where_a_policy_forbids_it(
    package: Package, policy: Path, tiny_data: Path, tmp_path: Path
) -> None:
    prepared(package, tiny_data, tmp_path / "run", None)
    with pytest.raises(PolicyError, match="not signed"):
        trainload.resume(tmp_path / "run", backend="local", policy=policy)


def test_nothing_of_a_library_is_imported_before_the_policies_were_asked(
    package: Package, policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "library.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(PolicyError):
        open_for_run(
            package.path,
            {"library": str(tmp_path / "library.py")},
            [policies.read_policy(policy)],
            None,
        )
    assert not (tmp_path / "ran").exists()


def test_a_run_from_before_digests_were_kept_can_be_read(
    package: Package, tiny_data: Path, tmp_path: Path
) -> None:
    prepared(package, tiny_data, tmp_path / "run", None)
    run = json.loads((tmp_path / "run/run.json").read_bytes())
    del run["digest"], run["policies"]
    (tmp_path / "run/run.json").write_bytes(canonical_json(run))
    spec = read_spec(tmp_path / "run")
    assert open_for_run(Path(spec.package), {}, spec.policies, spec.digest).digest == package.digest
