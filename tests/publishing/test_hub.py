"""Packages in repositories of the Hugging Face Hub: the real library, against a stand-in server."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants
from safetensors.torch import load
from tests.house.source import python_blocks
from tests.launch.tiny import Tiny, tiny_job, write_rows
from tests.publishing.hub_server import TOKEN, Hub, serving
from tests.retraining.ticks.hook_server import hook_server

import trainload
from trainload.cli import main as cli
from trainload.core.errors import ConflictError, IntegrityError, StorageError
from trainload.packaging.package import Package
from trainload.publishing.hub import HubPullReport, HubPushReport

# huggingface_hub's own: it uploads large files in a form that its HTTP client has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
REPO = "hf://team/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A server that the library uses in place of the Hub."""
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield server
    huggingface_hub.HfFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(tiny_job(), tmp_path_factory.mktemp("tiny") / "tiny.tl")


def pushed(package: Package, reference: str = REPO, **options: Any) -> HubPushReport:
    report = trainload.push(package.path, reference, **options)
    assert isinstance(report, HubPushReport)
    return report


def pulled(reference: str, path: Path) -> HubPullReport:
    report = trainload.pull(reference, path)
    assert isinstance(report, HubPullReport)
    return report


def files(hub: Hub, branch: str = "main") -> dict[str, bytes]:
    repo = hub.repositories["team/tiny"]
    return repo.commits[repo.branches[branch]]


def test_a_pulled_package_is_the_pushed_one(hub: Hub, package: Package, tmp_path: Path) -> None:
    report = pushed(package, message="the first")
    back = pulled(REPO, tmp_path / "back.tl")
    assert report.digest == back.digest == trainload.open(back.path).digest == package.digest
    assert back.source == f"{REPO}@{report.commit}"
    assert hub.messages == ["the first"]


def test_the_repository_has_the_model_beside_the_package(hub: Hub, package: Package) -> None:
    pushed(package)
    found = load(files(hub)["model.safetensors"])
    assert found.keys() == Tiny().state_dict().keys()
    assert all(found[name].equal(package.weights.tensor(name)) for name in found)
    assert json.loads(files(hub)["trainload.json"])["package"] == package.digest
    assert "package.tl/manifest.json" in files(hub)


def test_the_card_has_metadata_that_the_hub_reads(hub: Hub, package: Package) -> None:
    pushed(package)
    _, head, text = files(hub)["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "trainload", "tags": ["trainload"]}
    assert package.digest in text
    assert "trainload pull hf://team/tiny" in text


def test_a_new_repository_is_private(hub: Hub, package: Package) -> None:
    pushed(package)
    assert hub.repositories["team/tiny"].private


def test_a_second_push_removes_what_the_package_no_longer_has(hub: Hub, package: Package) -> None:
    pushed(package)
    repo = hub.repositories["team/tiny"]
    mine = {"LICENSE": b"mine", "package.tl/old.json": b"{}", "model-1-of-2.safetensors": b""}
    repo.add("main", files(hub) | mine)
    pushed(package)
    assert "LICENSE" in files(hub)
    assert not {"package.tl/old.json", "model-1-of-2.safetensors"} & files(hub).keys()


def test_a_push_to_a_branch_leaves_the_main_one(hub: Hub, package: Package) -> None:
    pushed(package)
    before = hub.repositories["team/tiny"].branches["main"]
    report = pushed(package, f"{REPO}@candidate")
    assert hub.repositories["team/tiny"].branches == {"main": before, "candidate": report.commit}


def test_a_pull_names_an_earlier_commit(hub: Hub, package: Package, tmp_path: Path) -> None:
    first = pushed(package)
    hub.repositories["team/tiny"].add("main", {})
    assert pulled(f"{REPO}@{first.commit}", tmp_path / "back.tl").digest == package.digest


def test_of_two_pushes_at_the_same_time_one_fails(hub: Hub, package: Package) -> None:
    pushed(package)
    hub.before_commit = lambda: hub.repositories["team/tiny"].add("main", {})
    with pytest.raises(ConflictError, match="at the same time"):
        pushed(package)
    assert files(hub) == {}


def test_a_damaged_file_is_not_pulled(hub: Hub, package: Package, tmp_path: Path) -> None:
    pushed(package)
    name = next(each for each in files(hub) if each.startswith("package.tl/weights/model"))
    content = files(hub)[name]
    hub.repositories["team/tiny"].add("main", files(hub) | {name: content[:-1] + b" "})
    with pytest.raises(IntegrityError):
        pulled(REPO, tmp_path / "back.tl")
    assert not (tmp_path / "back.tl").exists()


def test_a_token_that_cannot_write_is_an_error_with_a_hint(
    hub: Hub, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(StorageError, match=r"denied access.*HF_TOKEN") as caught:
        pushed(package)
    assert "hf_of_somebody_else" not in str(caught.value)


def test_weights_that_are_not_accepted_leave_the_repository_as_it_was(
    hub: Hub, package: Package
) -> None:
    hub.is_full = True
    with pytest.raises(StorageError, match="403"):
        pushed(package)
    assert files(hub).keys() == {".gitattributes"}


def test_a_repository_that_does_not_exist_is_an_error(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such repository"):
        pulled("hf://team/none", tmp_path / "back.tl")


def test_a_hub_that_cannot_be_reached_is_an_error(
    hub: Hub, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="cannot be reached"):
        pushed(package)


@pytest.mark.parametrize("options", [{"line": "main"}, {"promote": False}, {"facts": {"a": 1}}])
def test_a_repository_has_no_releases(package: Package, options: dict[str, Any]) -> None:
    with pytest.raises(StorageError, match="no lines or releases"):
        pushed(package, **options)


@pytest.mark.parametrize("name", ["hf://tiny", "hf://team/tiny/more", "hf://team/tiny#main"])
def test_another_url_is_rejected(package: Package, name: str) -> None:
    with pytest.raises(StorageError, match="does not name a repository"):
        pushed(package, name)


def test_a_run_trains_the_package_at_its_url(hub: Hub, package: Package, tmp_path: Path) -> None:
    report = pushed(package)
    opened = trainload.open(f"{REPO}@{report.commit}/package.tl")
    assert opened.digest == package.digest
    result = trainload.launch(
        opened,
        trainload.plan(opened, trainload.Cluster(), "single"),
        write_rows(tmp_path / "rows.npz", 8),
        run_dir=tmp_path / "run",
        steps=1,
        backend="local",
        compile=False,
    )
    assert result.steps == 1


def test_rows_at_the_hub_are_data(hub: Hub, package: Package, tmp_path: Path) -> None:
    pushed(package)
    rows = write_rows(tmp_path / "rows.npz", 8).read_bytes()
    hub.repositories["team/tiny"].add("main", {"rows.npz": rows})
    result = trainload.launch(
        package,
        trainload.plan(package, trainload.Cluster(), "single"),
        f"{REPO}/rows.npz",
        run_dir=tmp_path / "run",
        steps=1,
        backend="local",
        compile=False,
    )
    assert result.steps == 1


def test_a_repository_is_a_source_of_weights(hub: Hub, package: Package, tmp_path: Path) -> None:
    pushed(package)
    result = trainload.launch(
        package,
        trainload.plan(package, trainload.Cluster(), "single"),
        write_rows(tmp_path / "rows.npz", 8),
        run_dir=tmp_path / "run",
        weights_from=REPO,
        steps=1,
        backend="local",
        compile=False,
    )
    assert result.steps == 1
    spec = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (spec["given"]["kind"], spec["given"]["source"]) == ("files", REPO)


def test_the_example_of_the_page_runs(
    hub: Hub, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt.tl").symlink_to(package.path)
    (example,) = python_blocks("docs/guides/hub.md")
    exec(example, {})
    assert trainload.open("copy.tl").digest == package.digest


def test_the_commands_push_and_pull(
    hub: Hub, package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["push", str(package.path), REPO, "--message", "by hand", "--json"]) == 0
    commit = json.loads(capsys.readouterr().out)["commit"]
    output = str(tmp_path / "back.tl")
    assert cli.run(["pull", f"{REPO}@{commit}", "--output", output]) == 0
    assert trainload.open(output).digest == package.digest


ELSEWHERE = [b"<html>Log in</html>", b"[]", b"{}", b'"x"']


@pytest.mark.parametrize("body", ELSEWHERE)
def test_a_pull_from_a_server_that_is_not_a_hub_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    with hook_server(lambda number: 200, body=body) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        with pytest.raises(StorageError, match="does not respond as the Hub does"):
            trainload.pull(REPO, tmp_path / "back.tl")


@pytest.mark.parametrize("body", ELSEWHERE)
def test_a_push_to_a_server_that_is_not_a_hub_says_so_without_the_token(
    package: Package, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hook_server(lambda number: 200, body=body) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        with pytest.raises(StorageError, match="does not respond as the Hub does") as caught:
            trainload.push(package.path, REPO)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
