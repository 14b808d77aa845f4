"""Commands of stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.places import Place, s3_place

from trainload.cli import main as cli
from trainload.packaging.package import Package


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    """Run a command with --json, and return its output."""
    status = cli.run([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.out + captured.err
    return json.loads(captured.out)


def test_a_package_goes_through_a_store_by_commands(
    packaged: Package,
    second: Package,
    folder: Place,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = folder.url
    printed(capsys, "push", packaged.path, store, "--line", "gpt", "--message", "the first")
    pushed = printed(
        capsys,
        "push",
        second.path,
        store,
        "--no-promote",
        "--fact",
        "loss=2.5",
        "--fact",
        "data=snapshot-7",
    )
    assert (pushed["release"], pushed["current"], pushed["promoted"]) == ("2", "1", False)
    assert 0 < pushed["sent_bytes"] < pushed["present_bytes"]
    promoted = printed(capsys, "promote", store, "2", "--only-if", "1", "--reason", "it is better")
    assert (promoted["line"], promoted["release"]) == ("gpt", "2")
    listed = printed(capsys, "releases", store)["lines"]["gpt"]
    assert [(each["release"], each["status"]) for each in listed] == [
        ("1", "promoted"),
        ("2", "current"),
    ]
    assert listed[1]["facts"] == {"loss": 2.5, "data": "snapshot-7"}
    pulled = printed(capsys, "pull", store, "-o", tmp_path / "back.tl", "--without-debug")
    assert (pulled["digest"], pulled["release"]) == (second.digest, "2")
    cleaned = printed(capsys, "gc", store, "--keep", "1", "--grace", "0")
    assert (cleaned["removed_releases"], cleaned["removed_blobs"]) == (["gpt 1"], 3)


def test_a_reference_names_a_line_and_a_release(
    packaged: Package,
    second: Package,
    folder: Place,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = folder.url
    printed(capsys, "push", packaged.path, f"{store}#gpt")
    printed(capsys, "push", second.path, f"{store}#gpt")
    printed(capsys, "push", second.path, f"{store}#other")
    assert (
        printed(capsys, "pull", f"{store}#gpt/1", "-o", tmp_path / "first.tl")["digest"]
        == packaged.digest
    )
    assert (
        printed(capsys, "pull", f"{store}#gpt", "-o", tmp_path / "second.tl")["digest"]
        == second.digest
    )
    assert list(printed(capsys, "releases", f"{store}#gpt")["lines"]) == ["gpt"]
    assert printed(capsys, "promote", f"{store}#gpt", "1")["digest"] == packaged.digest


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["pull", "#gpt/1", "--line", "other", "-o", "out.tl"], "two lines are named"),
        (["pull", "#gpt/1", "--release", "2", "-o", "out.tl"], "two releases are named"),
        (["releases", "#gpt/1"], "the reference names a release"),
        (["promote", "#gpt/1", "1"], "the reference names a release"),
    ],
)
def test_a_reference_that_says_too_much_is_rejected(
    folder: Place, command: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, reference, *others = command
    assert cli.run([name, folder.url + reference, *others]) == 2
    assert told in capsys.readouterr().err


def test_what_people_see(
    packaged: Package, folder: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        ["push", str(packaged.path), folder.url, "--message", "the first"],
        ["pull", folder.url, "-o", str(tmp_path / "back.tl")],
        ["releases", folder.url],
        ["gc", folder.url],
    ]
    said = []
    for command in commands:
        assert cli.run(command) == 0
        said.append(capsys.readouterr().out)
    assert "bytes)" in said[0] and "there already" in said[0]
    assert "here already" in said[1]
    listed = " ".join(said[2].split())  # a message may be wrapped
    assert "line main" in listed and "the first" in listed and "current" in listed
    assert "removed" in said[3]


def test_a_conflict_is_told_on_one_line_and_the_release_is_there(
    packaged: Package, folder: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["push", str(packaged.path), folder.url, "--only-if", "3", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "ConflictError"
    assert printed(capsys, "releases", folder.url)["lines"]["main"][0]["status"] == "candidate"


def test_the_environment_says_where_s3_is(
    packaged: Package,
    s3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = s3_place(s3)
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    printed(capsys, "push", packaged.path, place.url)
    assert (
        printed(capsys, "pull", place.url, "-o", tmp_path / "back.tl")["digest"] == packaged.digest
    )


def test_an_s3_that_cannot_be_reached_is_one_line(
    packaged: Package, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = s3_place(s3)
    for name, value in {
        **place.environment,
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()  # cached instances have other addresses
    assert cli.run(["releases", place.url]) == 2
    assert "cannot be reached" in capsys.readouterr().err
