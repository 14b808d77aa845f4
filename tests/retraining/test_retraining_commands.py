"""The `retrain` commands, and the output of other commands for a retrained line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.retraining.ticking import LINE, config_of

import trainload
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store


def test_the_commands_of_a_line(store: Store, commands: Any) -> None:
    status, out, _ = commands("history", store.url, "--json")
    assert (status, [row["what"] for row in json.loads(out)["history"]]) == (
        0,
        ["current", "promoted", "no data", "promoted"],
    )
    status, out, _ = commands("lineage", f"{store.url}#{LINE}/2")
    assert (status, out.count("eval.loss <= champion.eval.loss * 1.05"), "frozen" in out) == (
        0,
        1,
        True,
    )
    status, out, _ = commands("rollback", store.url, "--json")
    assert (status, json.loads(out)["release"]) == (0, "2")


def test_a_file_is_written_checked_and_run(small: Package, folder: Path, commands: Any) -> None:
    status, _, _ = commands("retrain", "init", str(folder / "new.yaml"))
    assert (status, (folder / "new.yaml").is_file()) == (0, True)
    config = config_of(folder, small, schedule={"every": "1d"})
    (folder / "retrain.yaml").write_text(yaml.safe_dump(config.to_json()))
    status, out, _ = commands("retrain", "check", str(folder / "retrain.yaml"), "--json")
    assert (status, json.loads(out)["plan"], json.loads(out)["data"]) == (
        0,
        "single on 1",
        "files: 1; rows of the last 1: 60",
    )
    status, out, said = commands(
        "retrain", "tick", str(folder / "retrain.yaml"), "--at", "2026-01-01T00:00:00Z", "--json"
    )
    assert (status, json.loads(out)["outcome"]) == (0, "promoted"), said
    status, out, _ = commands("retrain", "run", str(folder / "retrain.yaml"), "--ticks", "1")
    assert (status, "no data" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--at", "yesterday"), "a time such as 2026-11-23T06:00:00Z"),
        (("--at", "2026-01-01T00:00:00"), "the time has no time zone"),
        ((), "Set the key `schedule`"),
    ],
)
def test_a_time_that_is_none_is_refused(
    small: Package, folder: Path, commands: Any, arguments: tuple[str, ...], words: str
) -> None:
    (folder / "retrain.yaml").write_text(yaml.safe_dump(config_of(folder, small).to_json()))
    status, _, said = commands("retrain", "tick", str(folder / "retrain.yaml"), *arguments)
    assert (status, words in said) == (2, True), said


def test_a_metric_that_there_is_not_is_found_by_check(
    small: Package, folder: Path, commands: Any
) -> None:
    config = config_of(folder, small, gate={"require": "eval.acuracy > 0.5"})
    (folder / "retrain.yaml").write_text(yaml.safe_dump(config.to_json()))
    status, _, said = commands("retrain", "check", str(folder / "retrain.yaml"))
    assert (
        status,
        "gate.require: there is no such metric" in said,
        "Did you mean eval.accuracy?" in said,
    ) == (2, True, True), said


def test_data_that_cannot_be_trained_on_is_found_by_check(
    small: Package, folder: Path, commands: Any
) -> None:
    trainload.write_rows([{"x": np.zeros((4, 5), np.float32)}], folder / "data" / "0.arrow")
    (folder / "retrain.yaml").write_text(yaml.safe_dump(config_of(folder, small).to_json()))
    status, _, said = commands("retrain", "check", str(folder / "retrain.yaml"))
    assert (
        status,
        "data.files: none of the data files can be used for training" in said,
        "'cls'" in said,
    ) == (2, True, True), said


def test_an_old_release_is_exported_from_its_store(
    lived: Path, tmp_path: Path, commands: Any
) -> None:
    name = f"{lived / 'store'}#{LINE}/2"
    status, _, said = commands("export", name, "--to", "huggingface")
    assert (status, "pass --output" in said) == (2, True), said
    status, _, said = commands(
        "export", name, "--to", "huggingface", "--output", str(tmp_path / "old"), "--json"
    )
    assert status == 0, said
    found = load_file(tmp_path / "old" / "model.safetensors")
    assert torch.equal(found["0.weight"], trainload.open(name).weights.tensor("0.weight"))


def test_a_store_has_a_page(store: Store, tmp_path: Path, commands: Any) -> None:
    status, out, _ = commands(
        "report", store.url, "--output", str(tmp_path / "page.html"), "--json"
    )
    assert (status, json.loads(out)["lines"]) == (
        0,
        {LINE: {"current": "3", "releases": 3, "ticks": 3}},
    )
    page = (tmp_path / "page.html").read_text()
    assert all(
        each in page
        for each in (
            "2026-01-01 00:00:00",
            "no data",
            "evaluation loss",
            "accuracy",
            "drift",
            "frozen",
        )
    )
    assert "<script" not in page


def test_what_people_have_written_is_text_in_it(
    store: Store, tmp_path: Path, commands: Any
) -> None:
    store.promote(LINE, 2, reason="<img src=x onerror=alert(1)>")
    commands("report", f"{store.url}#{LINE}", "--output", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert ("<img" in page, "&lt;img src=x" in page) == (False, True)


def test_a_file_that_is_no_report_is_not_written_over(
    store: Store, tmp_path: Path, commands: Any
) -> None:
    (tmp_path / "thesis.html").write_text("years of work")
    status, _, said = commands("report", store.url, "--output", str(tmp_path / "thesis.html"))
    assert (status, "it exists already and is not a report" in said) == (2, True)
