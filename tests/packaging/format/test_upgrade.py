"""Manifests of older format versions are upgraded when they are read, and stay the same package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.golden.goldens import Golden, goldens
from tests.packaging.tampering import edit_manifest

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import PackageError
from trainload.packaging.format.format_version import FORMAT_VERSION
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.format.upgrade import DOWNGRADES, UPGRADES, oldest_form, upgraded
from trainload.packaging.package import open_package
from trainload.packaging.write import with_weights

OLD = [golden for golden in goldens() if golden.version < FORMAT_VERSION]
FIRST = [golden for golden in OLD if golden.version == 1]


def fields(golden: Golden) -> dict[str, Any]:
    """Return a golden's manifest as JSON, without the checksum."""
    found: dict[str, Any] = json.loads((golden.package / MANIFEST).read_bytes())
    del found["checksum"]
    return found


def read(golden: Golden) -> Manifest:
    return Manifest.from_bytes((golden.package / MANIFEST).read_bytes(), MANIFEST)


def program_digest(of: dict[str, Any]) -> str:
    """Compute the digest that docs/reference/format.md defines from the content of the file."""
    left = {name: value for name, value in of.items() if name not in ("parent", "training")}
    left["features"] = [feature for feature in of["features"] if feature != "training"]
    left["files"] = {
        path: entry for path, entry in of["files"].items() if not path.startswith("weights/")
    }
    return sha256_bytes(canonical_json(left))


def test_there_is_an_upgrade_from_every_older_version_and_a_way_back() -> None:
    assert sorted(UPGRADES) == list(range(1, FORMAT_VERSION))
    assert sorted(DOWNGRADES) == list(range(2, FORMAT_VERSION + 1))


@pytest.mark.parametrize("golden", OLD, ids=str)
def test_an_old_manifest_is_read_as_one_of_the_present_version(golden: Golden) -> None:
    manifest = read(golden)
    assert manifest.format_version == FORMAT_VERSION
    assert Manifest.from_bytes(manifest.to_bytes(), MANIFEST) == manifest


@pytest.mark.parametrize("golden", OLD, ids=str)
def test_the_way_back_leads_to_what_was_read(golden: Golden) -> None:
    assert oldest_form(upgraded(fields(golden), MANIFEST)) == fields(golden)


@pytest.mark.parametrize("golden", FIRST, ids=str)
def test_the_program_of_an_old_package_has_the_digest_that_it_had(golden: Golden) -> None:
    assert read(golden).program_digest == program_digest(fields(golden))


@pytest.mark.parametrize(
    "golden", [golden for golden in OLD if not fields(golden)["op_libraries"]], ids=str
)
def test_an_old_package_is_the_one_that_it_was(golden: Golden) -> None:
    assert open_package(golden.package).digest == sha256_bytes(
        (golden.package / MANIFEST).read_bytes()
    )


def test_new_weights_for_an_old_package_are_written_in_the_present_version(tmp_path: Path) -> None:
    (golden,) = (each for each in FIRST if each.name == "plain")
    old = open_package(golden.package)
    new = with_weights(
        old, tmp_path / "new.tl", ((name, old.weights.tensor(name)) for name in old.weights.names())
    )
    assert json.loads((new.path / MANIFEST).read_bytes())["format_version"] == FORMAT_VERSION
    assert new.manifest.program_digest == old.manifest.program_digest
    assert new.manifest.parent == old.digest
    assert (new.path / "graphs/train.json").read_bytes() == (
        old.path / "graphs/train.json"
    ).read_bytes()


def test_of_an_old_operator_library_the_distribution_alone_is_known() -> None:
    old = {"format_version": 1, "op_libraries": {"my_ops": "my-ops", "other": None}}
    new = upgraded(old, MANIFEST)["op_libraries"]
    assert new["my_ops"] == {
        "distribution": "my-ops",
        "version": None,
        "digest": None,
        "modules": [],
        "kernels": [],
        "wheels": [],
    }
    assert new["other"]["distribution"] is None
    assert oldest_form(upgraded(old, MANIFEST)) == old


def test_what_version_1_cannot_say_is_not_said_in_it() -> None:
    library: dict[str, Any] = {
        "distribution": "my-ops",
        "version": "1.2",
        "digest": None,
        "modules": [],
        "kernels": [],
        "wheels": [],
    }
    new = {"format_version": 2, "op_libraries": {"my_ops": library}}
    assert oldest_form(new) == new


@pytest.mark.parametrize("libraries", [None, [], {"my_ops": 1}, {"my_ops": {}}, "my_ops"])
def test_an_old_manifest_with_other_libraries_than_its_version_had_is_refused(
    libraries: object, tmp_path: Path
) -> None:
    shutil.copytree(FIRST[0].package, tmp_path / "p.tl")
    edit_manifest(tmp_path / "p.tl", lambda manifest: manifest.update(op_libraries=libraries))
    with pytest.raises(PackageError, match="op_libraries"):
        open_package(tmp_path / "p.tl")


def test_an_old_manifest_with_a_feature_of_a_later_version_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FIRST[0].package, tmp_path / "p.tl")
    edit_manifest(tmp_path / "p.tl", lambda manifest: manifest["features"].append("extensions"))
    with pytest.raises(PackageError, match="extensions requires wheels"):
        open_package(tmp_path / "p.tl")
