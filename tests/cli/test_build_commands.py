"""The command line makes, signs and publishes builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.builds import TARGET, made_build
from tests.packaging.signers import Signers

from trainload.cli import main as cli
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.packaging.stores.stored_builds import builds_of

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "pass -o BUILD, or --push STORE"),
        (["--push", "store"], "--push requires --key"),
        (["--push", "store#gpt", "--key", "key.pem"], "not to a line"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    options: list[str], told: str, capsys: Capture
) -> None:
    assert cli.run(["build", "gpt.tl", "--plan", "plan.json", *options]) == 2
    assert told in capsys.readouterr().err


def test_a_build_is_signed_and_pushed_in_separate_steps(
    tmp_path: Path, signers: Signers, capsys: Capture
) -> None:
    build, store = made_build(tmp_path / "tiny.build"), tmp_path / "store"
    assert cli.run(["sign", str(build), "--key", str(signers.alice.key)]) == 0
    capsys.readouterr()
    assert cli.run(["push", str(build), str(store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == TARGET.job
    assert len(list(builds_of(Store(store), TARGET.job))) == 1


def test_a_build_that_is_not_signed_is_not_pushed(tmp_path: Path, capsys: Capture) -> None:
    build = made_build(tmp_path / "tiny.build")
    assert cli.run(["push", str(build), str(tmp_path / "store")]) == 2
    assert "trainload sign" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--line", "gpt"], ["--no-promote"], ["--fact", "loss=1"]])
def test_options_of_releases_are_refused_for_a_build(
    option: list[str], tmp_path: Path, capsys: Capture
) -> None:
    build = made_build(tmp_path / "tiny.build")
    assert cli.run(["push", str(build), str(tmp_path / "store"), *option]) == 2
    assert "a build has no line" in capsys.readouterr().err


@pytest.mark.slow
def test_a_build_is_made_signed_and_pushed_at_once(
    tiny: Package, tmp_path: Path, signers: Signers, capsys: Capture
) -> None:
    plan, store = tmp_path / "plan.json", tmp_path / "store"
    assert cli.run(["plan", str(tiny.path), "-o", str(plan)]) == 0
    capsys.readouterr()
    options = ["--plan", str(plan), "--push", str(store), "--key", str(signers.alice.key)]
    assert cli.run(["build", str(tiny.path), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["unverified"], report["pushed"]["new"]) == ([], True)
    assert len(list(builds_of(Store(store), report["job"]))) == 1
