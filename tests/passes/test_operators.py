"""`trainload ops` and `trainload show`."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from tests.capture.jobs import Model
from tests.capture.jobs import job as small_job
from torch import nn
from torch.nn import functional

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PassError
from trainload.packaging.package import Package, open_package
from trainload.transforms.operator_sets import (
    STEP,
    UPDATE,
    OperatorUse,
    operator_uses,
    read_operator_file,
)

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    model = Model(
        lambda self, x: self.drop(functional.layer_norm(functional.gelu(x), (8,))),
        drop=nn.Dropout(0.1),
    )
    return trainload.freeze(small_job(model), tmp_path_factory.mktemp("ops") / "p.tl")


@pytest.fixture(scope="module")
def uses(package: Package) -> dict[str, OperatorUse]:
    return {use.name: use for use in operator_uses(package)}


def said(capsys: Capture, *arguments: object) -> dict[str, object]:
    assert cli.run([*map(str, arguments), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_calls_are_counted_by_graph(uses: dict[str, OperatorUse]) -> None:
    assert uses["aten.linear.default"].counts == {"train": 2, "eval": 2}
    assert uses["aten.gelu_backward.default"].counts == {STEP: 1}
    assert set(uses["aten.mul.Tensor"].counts) >= {STEP}
    assert UPDATE in {graph for use in uses.values() for graph in use.counts}


@pytest.mark.slow
def test_calls_in_bodies_are_counted(packaged: Package) -> None:
    uses = {use.name: use for use in operator_uses(packaged)}
    assert uses["aten.sin.default"].counts["train"] == 1  # in a branch of cond
    assert uses["cond"].core is None


def test_schemas_are_those_of_the_manifest(package: Package, uses: dict[str, OperatorUse]) -> None:
    recorded = {
        name.removeprefix("torch.ops."): schema for name, schema in package.manifest.ops.items()
    }
    assert recorded.items() <= {name: use.schema for name, use in uses.items()}.items()


def test_an_operator_says_what_it_is_and_becomes(uses: dict[str, OperatorUse]) -> None:
    layer_norm = uses["aten.layer_norm.default"]
    assert (layer_norm.core, layer_norm.device_specific, layer_norm.becomes) == (
        False,
        False,
        ("aten.native_layer_norm.default",),
    )
    assert (uses["aten.gelu.default"].core, uses["aten.gelu.default"].becomes) == (True, ())


def test_the_table_has_every_operator(
    package: Package, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["ops", str(package.path)]) == 0
    text = capsys.readouterr().out
    assert "aten.layer_norm.default" in text
    assert "aten.native_layer_norm.default" in text
    assert "outside core ATen" in text


def test_the_full_set_changes_nothing(package: Package, capsys: Capture) -> None:
    found = said(capsys, "ops", package.path, "--set", "full")
    assert found["passes"] == []
    assert all(count["before"] == count["after"] for count in found["counts"].values())  # type: ignore[attr-defined]  # JSON


def test_the_core_set_leaves_outside_what_cannot_be_decomposed(
    package: Package, capsys: Capture
) -> None:
    found = said(capsys, "ops", package.path, "--set", "core")
    assert found["outside_core"] == ["aten.dropout.default"]
    assert found["package"] is None


def test_the_chosen_set_is_part_of_the_package_that_is_written(
    package: Package, tmp_path: Path, capsys: Capture
) -> None:
    said(capsys, "ops", package.path, "--set", "core", "-o", tmp_path / "core.tl")
    made = open_package(tmp_path / "core.tl")
    assert [(entry.name, entry.options) for entry in made.manifest.passes] == [
        ("trainload.passes:decompose", {"operators": "core"})
    ]
    assert "torch.ops.aten.layer_norm.default" not in made.manifest.ops


def test_a_file_names_what_is_decomposed(package: Package, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "set").write_text(
        "# what our backend lacks\naten.layer_norm.default  # composite\n\n"
    )
    counts = said(capsys, "ops", package.path, "--set", tmp_path / "set")["counts"]
    assert counts["aten.layer_norm.default"] == {"before": 2, "after": 0}  # type: ignore[index]  # JSON
    assert counts["aten.linear.default"] == {"before": 4, "after": 4}  # type: ignore[index]  # JSON


@pytest.mark.parametrize("line", ["aten.no_such_thing.default", "linear", "aten.linear", "../x"])
def test_a_file_that_names_no_operator_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "set").write_text(f"aten.linear.default\n{line}\n")
    with pytest.raises(PassError, match=r"set:2: torch has no such operator"):
        read_operator_file(tmp_path / "set")


def test_a_set_that_is_no_file_is_refused(package: Package, capsys: Capture) -> None:
    assert cli.run(["ops", str(package.path), "--set", "cores"]) == 2
    assert "expected full, core, or a file of operator names" in capsys.readouterr().err


def ask(package: Package, answers: str, monkeypatch: pytest.MonkeyPatch, *more: object) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answers))
    assert cli.run(["ops", str(package.path), "--interactive", *map(str, more)]) == 0


@pytest.mark.slow
def test_what_is_chosen_by_hand_is_kept_and_what_is_not_is_left(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    ask(package, "n\nn\ny\ny\nq\n", monkeypatch, "-o", tmp_path / "new.tl")
    asked = re.findall(r"(aten\.\S+), \d+ calls, becomes", capsys.readouterr().err)
    assert asked[0] == "aten.linear.default"  # the most frequent one
    made = open_package(tmp_path / "new.tl")
    assert [entry.options["operators"] for entry in made.manifest.passes] == [(asked[2],)]
    assert f"torch.ops.{asked[2]}" not in made.manifest.ops
    assert "torch.ops.aten.linear.default" in made.manifest.ops


def test_the_effect_is_shown_before_it_is_kept(
    package: Package, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    ask(package, "y\nn\nq\n", monkeypatch)
    shown = capsys.readouterr().err
    assert shown.index("parity") < shown.index("keep it?")
    assert "before, " in shown


def test_the_end_of_the_answers_leaves_nothing(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    assert cli.run(["ops", str(package.path), "--interactive", "-o", str(tmp_path / "new.tl")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_show_prints_nodes_beside_their_source(
    package: Package, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["show", str(package.path), "--module", "last"]) == 0
    text = capsys.readouterr().out
    assert "aten.linear.default(" in text
    assert "tests/capture/jobs.py:" in text
    assert "last: Tensor = self.last(self.middle(self, self.first(x)))" in text


def test_show_has_a_json_form(package: Package, capsys: Capture) -> None:
    assert (
        cli.run(["show", str(package.path), "--module", "last", "--graph", "eval", "--json"]) == 0
    )
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["module"], line["source"]) == (
        "last",
        "last: Tensor = self.last(self.middle(self, self.first(x)))",
    )
